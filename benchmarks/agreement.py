"""Greedy texts of our CPU kernels under transformers in fp32 on the dequantised weights: where would it say otherwise?

In: a GGUF file (default: SmolLM2 as it ships) and prompts. Out: one line a prompt, each place where transformers' best
token after the same text is another one, with its margin there in logits, and a summary (`--json`: one object with
provenance). The kernels round activations to 8 bits, so near ties may turn. Exit 1 where a margin exceeds `--tie`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from hyflash import api, environment, hub
from hyflash.bench import workloads
from hyflash.cli.main import calm_libraries
from hyflash.core import Request, Rows, SamplingParams, TargetOptions
from hyflash.errors import UserError
from hyflash.targets.base import Target


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("--prompts", default=workloads.DEMO, help="prompt file, or demo")
    parser.add_argument("--limit", type=int, default=20, help="prompts (default 20)")
    parser.add_argument("-n", "--num-tokens", type=int, default=100, help="new tokens of each (default 100)")
    parser.add_argument("--tie", type=float, default=0.5, help="margin in logits below which two tokens nearly tie")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


@torch.inference_mode()
def disagreements(target: Target, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[dict[str, Any]]:
    """Places of the answer where the target's best token after the text before is another one."""
    text, seq = torch.tensor([*prompt, *answer[:-1]]), target.open()
    out = target.forward(Rows(tokens=text, seqs=(seq,), lengths=(len(text),)))
    target.close(seq)
    assert out.logits is not None
    logits = out.logits[len(prompt) - 1 :]
    best = logits.argmax(-1)
    return [
        {"at": i, "ours": token, "theirs": int(best[i]), "margin": float(logits[i, best[i]] - logits[i, token])}
        for i, token in enumerate(answer)
        if int(best[i]) != token
    ]


def main() -> int:
    """Run it."""
    options = arguments()
    calm_libraries()
    threads = options.threads or environment.num_threads()
    try:
        ours = api.load_target(options.target, TargetOptions(backend="native", num_threads=threads))
        theirs = api.load_target(options.target, TargetOptions(backend="torch", num_threads=threads))
        domains = workloads.read([options.prompts], limit=None)
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    prompts = workloads.in_turns(domains, ours.tokenizer)[: options.limit]
    engine = api.make_engine(ours, None, max_rows=1)
    found, num_tokens = [], 0
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=options.num_tokens)
        (result,) = engine.generate([Request(prompt_ids=prompt, params=params)])
        places = disagreements(theirs.model, prompt, result.token_ids)
        num_tokens += len(result.token_ids)
        found += [{"prompt": i, **place} for place in places]
        margins = ", ".join(f"{place['margin']:.3f} at {place['at']}" for place in places) or "none"
        print(
            f"prompt {i}: {len(result.token_ids)} tokens, others by a margin of {margins}", file=sys.stderr, flush=True
        )
    largest = max((place["margin"] for place in found), default=0.0)
    summary = {"num_prompts": len(prompts), "num_tokens": num_tokens, "num_others": len(found), "largest": largest}
    if options.json:
        weights = ours.model.describe()["weights"]
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"weights": weights, **summary, "places": found, "provenance": provenance}))
    else:
        print(f"{len(found)} of {num_tokens} tokens differ, by a margin of at most {largest:.3f} logits")
    return int(largest > options.tie)


if __name__ == "__main__":
    sys.exit(main())
