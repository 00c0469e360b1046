"""How many drafts would be accepted at each place of a target's own answers: what `length_policies.py` replays.

In: a target (default SmolLM2; `hyflash pull smollm2-135m` first), a drafter, prompts. Out: one JSON line on stdout: for
each domain the answers (greedy), each a list with, for every place, how many of the drafts made there equal what
follows. The drafter walks token by token and hears how each proposal fared, as if every place were a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

import torch

from hyflash import api, environment, hub
from hyflash.bench import workloads
from hyflash.cli.main import calm_libraries
from hyflash.core import Commit, DraftRequest, Request, SamplingParams, TargetOptions, Verdict
from hyflash.drafters.base import Drafter
from hyflash.engine.replay import Recording, record
from hyflash.errors import UserError

PIECE = 512
"""Tokens of a commit of the prompt."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("-d", "--drafter", default=None, help="default: what runs when none is named")
    parser.add_argument("--prompts", action="append", help="file of prompts, may be given several times")
    parser.add_argument("--limit", type=int, default=40, help="prompts of a domain (default 40)")
    parser.add_argument("-n", "--num-tokens", type=int, default=256, help="new tokens of each, at most (default 256)")
    parser.add_argument("--num-draft-tokens", type=int, default=10)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def walk(drafter: Drafter, text: Recording, num_draft_tokens: int) -> list[int]:
    """Drafts accepted at each place of the answer, the last token left to the target as in the engine."""
    state, ids, first = drafter.new_state(1), (*text.prompt_ids, *text.answer_ids), len(text.prompt_ids) - 1
    out: list[int] = []

    def commit(begin: int, end: int, verdict: Verdict | None = None) -> None:
        features = None if text.features is None else text.features[None, begin:end]
        new = Commit(rows=[0], tokens=[ids[begin:end]], features=features, verdict=verdict, kv=text)
        drafter.commit(state, new)

    for begin in range(0, first, PIECE):
        commit(begin, min(begin + PIECE, first))
    for at in range(first, len(ids) - 1):
        asked = DraftRequest(rows=[0], anchors=[ids[at]], num_tokens=[num_draft_tokens], kv=text)
        (draft,) = drafter.propose(state, asked).drafts
        pairs = zip(draft.tokens, ids[at + 1 : -1], strict=False)
        out.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        commit(at, at + 1, Verdict([draft], [out[-1]], [ids[at + 1 + out[-1]]]))
    return out


def measure(target: api.LoadedTarget, drafter: Drafter, options: argparse.Namespace) -> list[dict[str, object]]:
    """One result a domain."""
    plain = api.make_engine(target, None)
    results: list[dict[str, object]] = []
    domains = workloads.read(options.prompts or [workloads.DEMO], limit=options.limit)
    params = SamplingParams(max_tokens=options.num_tokens)
    for domain, prompts in domains.items():
        texts = []
        for ids in workloads.natural(domain, prompts, target.tokenizer).prompts:
            (answer,) = plain.generate([Request(prompt_ids=ids, params=params)])
            kv = drafter.target_kv_layers
            recording = record(target.model, drafter.target_layer_ids, ids, answer.token_ids, kv_layers=kv)
            with torch.no_grad():
                texts.append(walk(drafter, recording, options.num_draft_tokens))
        results.append({"domain": domain, "accepted": texts})
        places = sum(map(len, texts))
        print(f"{domain}: {places} places, {sum(map(sum, texts)) / places:.3f} drafts accepted", file=sys.stderr)
    return results


def main() -> int:
    """Run it."""
    options = arguments()
    calm_libraries()
    options.drafter = options.drafter or hub.default_drafter(options.target)
    try:
        target = api.load_target(options.target, TargetOptions(num_threads=options.threads))
        drafter = api.load_drafter(options.drafter, target)
        if drafter is None or not 1 <= options.num_draft_tokens <= drafter.max_draft_tokens:
            most = 0 if drafter is None else drafter.max_draft_tokens
            raise UserError(f"num_draft_tokens is {options.num_draft_tokens}; this drafter proposes 1 to {most}.")
        results = measure(target, drafter, options)
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    print(json.dumps({"settings": vars(options), "provenance": environment.provenance(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
