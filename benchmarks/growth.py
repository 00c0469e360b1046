"""Does memory grow? Many requests through one engine, then what the process and the target hold against the beginning.

In: a target and a drafter (default: SmolLM2 and its own). Out: resident bytes and the target's own figures after a
tenth of the requests, half of them and all (`--json`: one object with provenance). Requests are greedy and sampled, of
unequal lengths, four at once, and every seventh is cancelled half-way. Exit 1 where more than `--allowed` MB came on in
the second half.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from hyflash import api, environment, hub
from hyflash.bench import workloads
from hyflash.cli.main import calm_libraries
from hyflash.core import Request, SamplingParams, TargetOptions
from hyflash.engine.decode import Engine
from hyflash.errors import UserError

TOGETHER = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("-d", "--drafter", default=None)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("-n", "--num-tokens", type=int, default=64, help="new tokens of the longest")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--allowed", type=float, default=8.0, help="MB of growth that is no failure")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def resident_bytes() -> int:
    """Memory of this process that is in RAM and its own, Linux only."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def serve(engine: Engine, prompts: list[tuple[int, ...]], first: int, num: int, num_tokens: int) -> None:
    """Requests first..first + num - 1, some at once."""
    for at in range(first, first + num, TOGETHER):
        ids = []
        for i in range(at, min(at + TOGETHER, first + num)):
            sampled: dict[str, Any] = {"temperature": 0.8, "seed": i} if i % 2 else {}
            params = SamplingParams(max_tokens=1 + i * 13 % num_tokens, ignore_eos=True, **sampled)
            ids.append(engine.submit(Request(prompt_ids=prompts[i % len(prompts)], params=params)))
            if i % 7 == 0:
                engine.step()
                engine.cancel(ids[-1])
        while engine.num_unfinished:
            engine.step()
        for request_id in ids:
            engine.result(request_id)


def main() -> int:
    """Run it."""
    options = arguments()
    calm_libraries()
    try:
        target = api.load_target(options.target, TargetOptions(num_threads=options.threads))
        spec = options.drafter or hub.default_drafter(options.target)
        engine = api.make_engine(target, api.load_drafter(spec, target), length="adaptive", max_rows=TOGETHER)
        domains = workloads.read([workloads.DEMO], limit=None)
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    prompts = [ids for name, own in domains.items() for ids in workloads.natural(name, own, target.tokenizer).prompts]
    stops = [max(1, options.requests // 10), max(2, options.requests // 2), options.requests]
    found: list[dict[str, Any]] = []
    for first, stop in zip([0, *stops], stops, strict=False):
        serve(engine, prompts, first, stop - first, options.num_tokens)
        memory = target.model.memory() if hasattr(target.model, "memory") else {}
        found.append({"num_requests": stop, "resident_bytes": resident_bytes(), **memory})
        print(found[-1], file=sys.stderr, flush=True)
    growth = found[2]["resident_bytes"] - found[1]["resident_bytes"]
    if options.json:
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"drafter": spec, "growth_bytes": growth, "at": found, "provenance": provenance}))
    else:
        print(f"{growth / 1e6:+.1f} MB from request {stops[1]} to request {options.requests}")
    return int(growth > 1e6 * options.allowed)


if __name__ == "__main__":
    sys.exit(main())
