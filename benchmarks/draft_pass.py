"""What a draft pass costs: `hyflash` with random weights, on torch and on the CPU kernels in turns.

In: a target on the CPU kernels (default SmolLM2; `hyflash pull smollm2-135m` first) and context lengths. Out: one line
a context (`--json`: one object with provenance), ms of a proposal, of the commit of a few tokens, and of both.
Between two passes the target runs, as in decoding, so that weights come from memory and not from a cache (`--warm`
leaves that out). The text is random, one token in 16 outside the static draft vocabulary: what a counted list misses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hyflash import api, drafters, environment, hub
from hyflash.cli.main import calm_libraries
from hyflash.core import Commit, DraftRequest, Rows, TargetOptions
from hyflash.drafters.base import Drafter, State
from hyflash.errors import UserError
from hyflash.ops.kernels import WEIGHTS
from hyflash.targets.base import Target
from hyflash.targets.native import NativeTarget

PIECE = 512  # tokens of a commit while the context is filled
VISIT = 10
"""Passes of a path before the other one has its turn."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 8192], help="committed tokens")
    parser.add_argument("--committed", type=int, default=2, help="tokens of the commit (default 2)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="slots of a block: the anchor and the draft tokens")
    parser.add_argument("--vocab", type=int, default=8192, help="static draft vocabulary")
    parser.add_argument("--correction", default="none", choices=["none", "gru"])
    parser.add_argument("--weights", default="q8_0", choices=list(WEIGHTS), help="how the kernels keep them")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=100, help="passes of each path (default 100)")
    parser.add_argument("--warm", action="store_true", help="no target forward between two passes")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def new_drafter(options: argparse.Namespace, target: Target) -> Drafter:
    """The drafter to be timed; the same weights at every call."""
    method = drafters.load_class("hyflash")
    values = {
        "num_layers": options.layers,
        "num_draft_tokens": options.slots - 1,
        "draft_vocab_size": options.vocab,
        "correction": options.correction,
        "start": "ridge",
        "start_rank": 768,
    }
    torch.manual_seed(0)
    return method(method.Config.parse(values, where="draft_pass"), target.hooks()).eval()


def random_commit(drafter: Drafter, num: int, generator: torch.Generator) -> Commit:
    """`num` tokens with features."""
    info = drafter.hooks.info
    static = drafter.get_buffer("draft_ids")
    known = static[torch.randint(len(static), (num,), generator=generator)]
    other = torch.randint(info.vocab_size, (num,), generator=generator)
    rare = torch.rand(num, generator=generator) < 1 / 16
    features = torch.randn(1, num, len(drafter.target_layer_ids), info.hidden_size, generator=generator)
    return Commit(rows=[0], tokens=[torch.where(rare, other, known).tolist()], features=features)


def filled(drafter: Drafter, context: int) -> State:
    """A state with one row of `context` random tokens; equal for drafters of equal weights."""
    state, generator = drafter.new_state(1), torch.Generator().manual_seed(1)
    for start in range(0, context, PIECE):
        drafter.commit(state, random_commit(drafter, min(PIECE, context - start), generator))
    return state


def one_pass(drafter: Drafter, state: State, request: DraftRequest, new: Commit) -> tuple[float, float, float]:
    """Milliseconds of a proposal, of a commit, and of both; the state is put back afterwards."""
    saved = state.snapshot(0)
    begin = time.perf_counter()
    drafter.propose(state, request)
    middle = time.perf_counter()
    drafter.commit(state, new)
    end = time.perf_counter()
    state.restore(0, saved)
    return 1e3 * (middle - begin), 1e3 * (end - middle), 1e3 * (end - begin)


def verifier(target: Target) -> Callable[[], None]:
    """A forward such as decoding has between two draft passes."""
    seq, tokens = target.open(), torch.arange(4)

    def run() -> None:
        target.forward(Rows(tokens=tokens, seqs=(seq,), lengths=(len(tokens),), top=1))
        target.truncate(seq, 0)

    return run


def measure(
    paths: dict[str, Drafter], context: int, options: argparse.Namespace, between: Callable[[], None]
) -> list[dict[str, Any]]:
    """One result a path: medians and minima over passes that take turns."""
    states = {name: filled(drafter, context) for name, drafter in paths.items()}
    request = DraftRequest(rows=[0], anchors=[5], num_tokens=[options.slots - 1])
    new = random_commit(paths["kernels"], options.committed, torch.Generator().manual_seed(2))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in paths}
    many = torch.get_num_threads()
    while min(map(len, times.values())) < options.repeats:
        for name, drafter in paths.items():
            # As `api.load_drafter` has it: torch's own threads spin for a while after each operation.
            torch.set_num_threads(1 if name == "kernels" else many)
            for visit in range(-2, VISIT):  # the first two warm up
                if not options.warm:
                    between()
                taken = one_pass(drafter, states[name], request, new)
                if visit >= 0:
                    times[name].append(taken)
    torch.set_num_threads(many)
    results = []
    for name, found in times.items():
        result: dict[str, Any] = {"path": name, "context": context}
        for part, values in zip(("propose", "commit", "pass"), zip(*found, strict=True), strict=True):
            result[f"{part}_ms_median"] = round(statistics.median(values), 4)
            result[f"{part}_ms_min"] = round(min(values), 4)
        results.append(result)
    return results


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All contexts. Raises UserError for a target that does not run on the kernels."""
    target = api.load_target(options.target, TargetOptions(num_threads=options.threads)).model
    if not isinstance(target, NativeTarget):
        raise UserError(f"{options.target} runs on {target.describe()['backend']}; expected one on the CPU kernels.")
    paths = {"torch": new_drafter(options, target), "kernels": new_drafter(options, target)}
    if not paths["kernels"].use_kernels(target.kernels(options.weights)):
        raise UserError(f"a drafter of the shapes of {options.target} does not run on the CPU kernels.")
    results = []
    with torch.inference_mode():
        between = verifier(target)
        for context in options.contexts:
            results += measure(paths, context, options, between)
            if not options.json:
                for r in results[-len(paths) :]:
                    figures = ", ".join(
                        f"{part} {r[f'{part}_ms_median']:.2f} (least {r[f'{part}_ms_min']:.2f})"
                        for part in ("propose", "commit", "pass")
                    )
                    print(f"{r['path']:8} context {context:5}: ms {figures}", flush=True)
    return results


def main() -> int:
    """Run the benchmark."""
    options = arguments()
    calm_libraries()
    try:
        results = run(options)
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    if options.json:
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"settings": vars(options), "provenance": provenance, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
