"""The exactness promise on a real model: texts with drafters against plain decoding, token for token.

In: a target (default SmolLM2; `hyflash pull smollm2-135m` first) and drafters. Out: one line a setting on stderr, a
summary on stdout (`--json`: one object with provenance), exit 1 when any text differs. Prompts alternate between
greedy and sampled; plain texts are decoded one by one, the others also four at once; the last text is a long one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from forks import compare, verdict

from hyflash import api, environment, hub
from hyflash.bench import workloads
from hyflash.cli.main import calm_libraries
from hyflash.core import Request, SamplingParams, TargetOptions
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import UserError

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
LONG = 400
"""Tokens of the one long text: short ones hide forks."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument(
        "-d", "--drafter", action="append", help="may be given several times (default: lookup and the target's own)"
    )
    parser.add_argument("--prompts", default=workloads.DEMO, help="prompt file, or demo")
    parser.add_argument("--limit", type=int, default=20, help="prompts (default 20)")
    parser.add_argument("-n", "--num-tokens", type=int, default=120, help="new tokens of each prompt (default 120)")
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 4, 8], help="rows of a verify forward")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="requests decoded at once")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--backend", default="auto", help="auto, native or torch")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def requests_of(options: argparse.Namespace, target: api.LoadedTarget) -> list[Request]:
    """Prompts of all domains in turn, repeated with other seeds until there are enough; the last one is long."""
    domains = workloads.read([options.prompts], limit=None)
    turns = workloads.in_turns(domains, target.tokenizer)
    out = []
    for i in range(options.limit):
        # Greedy on the first pass through the prompts' even places, sampled elsewhere: no request comes twice.
        sampled = SAMPLED if i % 2 or i >= len(turns) else {}
        params = SamplingParams(max_tokens=options.num_tokens, ignore_eos=True, seed=i, **sampled)
        out.append(Request(prompt_ids=turns[i % len(turns)], params=params))
    long = SamplingParams(max_tokens=LONG, ignore_eos=True)
    return [*out, Request(prompt_ids=turns[0], params=long)]


def drafters_of(options: argparse.Namespace) -> list[str]:
    """The drafters asked for, or lookup and what ships for the target."""
    return options.drafter or list(dict.fromkeys(["lookup", hub.default_drafter(options.target)]))


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """All drafters, widths and batches. Raises UserError for what cannot be loaded."""
    target = api.load_target(options.target, TargetOptions(backend=options.backend, num_threads=options.threads))
    requests = requests_of(options, target)
    plain = []
    for i, request in enumerate(requests):
        print(f"\rplain text {i + 1} of {len(requests)}", end="", file=sys.stderr, flush=True)
        plain += Engine(target.model, tokenizer=target.tokenizer).generate([request])
    print(file=sys.stderr)
    results = []
    for spec in drafters_of(options):
        drafter = api.load_drafter(spec, target)
        if drafter is None:
            raise UserError("the drafter is none; there is nothing to compare.")
        for width in options.widths:
            for batch in options.batches:
                began = time.perf_counter()
                engine = Engine(target.model, drafter, policy=FixedLength(width - 1), max_rows=batch)
                found = compare(engine.generate(requests), plain)
                setting = {"drafter": spec, "width": width, "batch": batch}
                results.append({**setting, **found, "num_rechecks": engine.counters["rechecks"]})
                print(
                    f"{spec} width {width} batch {batch}: {found['num_tokens']} tokens, tau {found['tau']:.2f}, "
                    f"{time.perf_counter() - began:.0f} s: {verdict(found)}",
                    file=sys.stderr,
                    flush=True,
                )
    return {
        "target": options.target,
        "backend": target.model.describe(),
        "exact": target.model.exactness,
        "epsilon": target.model.epsilon,
        "num_forks": sum(len(r["forks"]) for r in results),
        "identical": not any(r["forks"] for r in results),
        "results": results,
    }


def main() -> int:
    """Run the sweep; 0 when every text was identical."""
    options = arguments()
    calm_libraries()
    try:
        summary = sweep(options)
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    if options.json:
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"settings": vars(options), "provenance": provenance, **summary}))
    else:
        tokens = sum(r["num_tokens"] for r in summary["results"])
        print(
            f"{len(summary['results'])} settings, {tokens} tokens, rows {summary['exact']}: "
            + ("all texts identical to plain decoding" if summary["identical"] else f"{summary['num_forks']} differ")
        )
    return 0 if summary["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
