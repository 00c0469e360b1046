"""The worst case: a drafter that is always wrong costs how much? Plain decoding and it in turns, on one engine each.

In: a target and drafters (default: SmolLM2's own block drafter, and what runs when none is named), whose every token is
replaced by its successor in the vocabulary: they cost what they cost and are never right. Out: one line a drafter with
the median time of a text over plain decoding's (`--json`: one object with provenance). The adaptive length should stop
asking.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hyflash import api, environment, hub
from hyflash.bench import workloads
from hyflash.cli.main import calm_libraries
from hyflash.core import Proposal, Request, SamplingParams, TargetOptions
from hyflash.drafters.base import Drafter
from hyflash.drafters.compose import Composite
from hyflash.errors import UserError


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("-d", "--drafter", action="append", help="may be given several times")
    parser.add_argument("--limit", type=int, default=9, help="demo prompts (default 9)")
    parser.add_argument("-n", "--num-tokens", type=int, default=256, help="new tokens of each (default 256)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def spoil(drafter: Drafter, vocab_size: int) -> Drafter:
    """Make every token it proposes another one, in place; of a composition, every part's."""
    parts = [m for m in drafter.modules() if isinstance(m, Drafter) and not isinstance(m, Composite)]
    for part in parts:
        object.__setattr__(part, "propose", partial(_spoilt, part.propose, vocab_size))
    return drafter


def _spoilt(honest: Callable[..., Proposal], vocab_size: int, *args: Any) -> Proposal:
    proposal = honest(*args)
    return proposal._replace(
        drafts=[d._replace(tokens=[(t + 1) % vocab_size for t in d.tokens]) for d in proposal.drafts]
    )


def main() -> int:
    """Run it."""
    options = arguments()
    calm_libraries()
    try:
        default = hub.default_drafter(options.target)
        specs = options.drafter or [default.rpartition("+")[2], default]
        target = api.load_target(options.target, TargetOptions(num_threads=options.threads))
        engines = {"plain": api.make_engine(target, None, max_rows=1)}
        for spec in specs:
            drafter = api.load_drafter(spec, target)
            assert drafter is not None
            engines[spec] = api.make_engine(
                target, spoil(drafter, target.model.info.vocab_size), length="adaptive", max_rows=1
            )
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    domains = workloads.read([workloads.DEMO], limit=None)
    prompts = workloads.in_turns(domains, target.tokenizer)[: options.limit]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.repeats):
        for ids in prompts:
            params = SamplingParams(max_tokens=options.num_tokens, ignore_eos=True)
            texts = {}
            for name, engine in engines.items():
                began = time.perf_counter()
                (result,) = engine.generate([Request(prompt_ids=ids, params=params)])
                seconds[name].append(time.perf_counter() - began)
                texts[name] = result.token_ids
            assert all(text == texts["plain"] for text in texts.values())
    rows = []
    for spec in specs:
        ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[spec], strict=True)]
        rows.append({"drafter": spec, "speedup": statistics.median(ratios), "num_texts": len(ratios)})
        print(
            "{drafter}, always wrong: {speedup:.3f}x plain over {num_texts} texts".format(**rows[-1]), file=sys.stderr
        )
    if options.json:
        print(json.dumps({"rows": rows, "provenance": {**environment.provenance(), "argv": sys.argv}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
