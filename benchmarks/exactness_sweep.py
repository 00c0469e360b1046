"""The exactness promise at length: every family, drafter, width and batch against plain decoding, token for token.

In: nothing but options; models are tiny, random and made anew. Out: one line a setting on stderr, a summary on
stdout (`--json`: one object with provenance), exit 1 when any text differs. Half of the prompts are decoded
greedily, half sampled with a seed. Drafts are made right up to a random place, so commits split in every way.

The whole (50 prompts x 200 tokens) takes a few hours of one core; `--limit 4 -n 40` a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the tiny models are those of the tests

import torch
from forks import compare, verdict

from drafting import KINDS, HalfRight, tiny_drafter
from families import FAMILIES, family_dir, text
from hyflash import environment
from hyflash.core import Request, SamplingParams
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.targets import hf

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=50, help="prompts of each family (default 50)")
    parser.add_argument("-n", "--num-tokens", type=int, default=200, help="new tokens of each prompt (default 200)")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--drafters", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="rows of a verify forward")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="requests decoded at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def requests_of(limit: int, num_tokens: int) -> list[Request]:
    """Ragged prompts of 1 to 40 tokens; every second one is sampled."""
    return [
        Request(
            prompt_ids=tuple(text(1 + 13 * i % 40, seed=i).tolist()),
            params=SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i, **(SAMPLED if i % 2 else {})),
        )
        for i in range(limit)
    ]


def sweep(family: str, options: argparse.Namespace, where: Path) -> list[dict[str, Any]]:
    """All settings of one family; plain texts are decoded one request at a time."""
    target = hf.load(str(family_dir(where, family)))
    requests = requests_of(options.limit, options.num_tokens)
    plain = [Engine(target).generate([request])[0] for request in requests]
    texts = [[*r.prompt_ids, *r.token_ids] for r in plain]
    out = []
    for kind in options.drafters:
        spec, changes = KINDS[kind]
        drafter = tiny_drafter(spec, target.hooks(), **changes)
        for width in options.widths:
            for batch in options.batches:
                began = time.perf_counter()
                engine = Engine(
                    target,
                    HalfRight(drafter, texts, seed=width),
                    policy=FixedLength(width - 1),
                    max_rows=batch,
                    prefill_chunk=5 * width,
                )
                found = compare(engine.generate(requests), plain)
                setting = {"family": family, "drafter": kind, "width": width, "batch": batch, "exact": target.exactness}
                out.append({**setting, **found, "num_rechecks": engine.counters["rechecks"]})
                print(
                    f"{family:12} {kind:18} width {width:2} batch {batch} {found['num_tokens']:6} tokens "
                    f"tau {found['tau']:5.2f} {time.perf_counter() - began:6.1f} s  {verdict(found)}",
                    file=sys.stderr,
                    flush=True,
                )
    return out


def main() -> int:
    """Run the sweep; 0 when every text was identical."""
    options = arguments()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as where:
        for family in options.families:
            results += sweep(family, options, Path(where))
    forks = sum(len(r["forks"]) for r in results)
    summary = {
        "num_settings": len(results),
        "num_texts": sum(r["num_texts"] for r in results),
        "num_tokens": sum(r["num_tokens"] for r in results),
        "num_forks": forks,
        "identical": forks == 0,
    }
    if options.json:
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"settings": vars(options), "provenance": provenance, **summary, "results": results}))
    else:
        print(
            f"{summary['num_settings']} settings, {summary['num_texts']} texts, {summary['num_tokens']} tokens: "
            + ("all identical to plain decoding" if not forks else f"{forks} texts differ")
        )
    return 0 if forks == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
