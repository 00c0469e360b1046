"""Make a drafter's draft vocabulary smaller: `python recipes/trim_vocab.py CHECKPOINT ANSWERS... --size N --out OUT`.

In: a block drafter's checkpoint and the target's answers. Out: the same checkpoint, of whose static draft vocabulary
the N tokens that are most frequent in the answers are left. Tokens of the context are drafted as before. A drafter that
was trained with a large vocabulary loses nothing by it on the embedded target, and its head reads less memory
(`docs/experiments.md`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hyflash.data.answers import read_answers
from hyflash.errors import UserError


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--size", type=int, required=True, help="static tokens that stay")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def trim(checkpoint: Path, answers: list[Path], *, size: int, out: Path) -> float:
    """Write the smaller checkpoint; returns the share of the answers' tokens in what is left. Raises UserError."""
    weights = load_file(checkpoint / "model.safetensors")
    if "draft_ids" not in weights:
        raise UserError(f"{checkpoint}: has no reduced draft vocabulary.")
    old = weights["draft_ids"].tolist()
    if not 1 <= size <= len(old):
        raise UserError(f"size is {size}; expected 1 to {len(old)}, what the checkpoint has.")
    counts = Counter(token for path in answers for answer in read_answers(path).answers for token in answer.answer_ids)
    kept = sorted(sorted(old, key=lambda token: -counts[token])[:size])
    share = sum(counts[token] for token in kept) / max(1, counts.total())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["hyflash"]["config"]["draft_vocab_size"] = size
    card = json.loads((checkpoint / "card.json").read_text(encoding="utf-8"))
    card["draft_vocab"] = {"size": size, "trained_with": len(old), "share": share}
    out.mkdir(parents=True, exist_ok=True)
    save_file({**weights, "draft_ids": torch.tensor(kept)}, out / "model.safetensors", metadata={"format": "pt"})
    for name, value in (("card.json", card), ("config.json", config)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return share


def main() -> None:
    """Trim, and say what is left."""
    options = arguments()
    try:
        share = trim(options.checkpoint, options.answers, size=options.size, out=options.out)
    except UserError as err:
        sys.exit(f"error: {err}")
    print(f"{options.out}: {options.size} tokens, {share:.2%} of the answers'")  # noqa: T201


if __name__ == "__main__":
    main()
