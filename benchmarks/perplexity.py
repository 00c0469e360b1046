"""Perplexity of one GGUF file on our CPU kernels and in llama.cpp (`make peers`): do they compute the same model?

In: a GGUF file and plain text files. Out: one line a text and the ratio over all of them (`--json`: one object with
provenance). Texts are cut at equal distances from the files and tokenised once; both engines read the same tokens, the
first of each only as context. Exit 1 where the perplexities differ by more than `--limit` per cent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hyflash import api, environment, hub
from hyflash.bench.peers import find
from hyflash.bench.peers.base import Engine, MissingPeer
from hyflash.bench.peers.llama_cpp import LlamaCpp
from hyflash.bench.peers.ours import TargetEngine
from hyflash.cli.main import calm_libraries
from hyflash.core import TargetOptions
from hyflash.errors import UserError


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("texts", type=Path, nargs="+", help="UTF-8 text files")
    parser.add_argument("--num-texts", type=int, default=20)
    parser.add_argument("--num-tokens", type=int, default=512, help="of a text, 3 to 512")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--limit", type=float, default=0.5, help="per cent of difference that is allowed")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def passages(files: Sequence[Path], num: int, num_chars: int) -> list[str]:
    """`num` passages of about this many characters, taken in turns from the files at equal distances."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    shares = [len(range(i, num, len(texts))) for i in range(len(texts))]
    found = []
    for text, share in zip(texts, shares, strict=True):
        step = len(text) // (share + 1)
        found += [text[step * (i + 1) :][:num_chars] for i in range(share)]
    return found


def surprise(engine: Engine, ids: Sequence[int]) -> float:
    """Mean negative log-likelihood (nats) of ids[2:], each given all before it."""

    def run() -> float:
        engine.start(ids[:1])
        engine.verify(ids[1:])
        logits = torch.from_numpy(np.asarray(engine.logits()))[:-1]
        return float(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[2:])))

    return engine.thread.submit(run).result()


def main() -> int:
    """Run it."""
    options = arguments()
    calm_libraries()
    threads = options.threads or environment.num_threads()
    try:
        loaded = api.load_target(str(options.model), TargetOptions(backend="native", num_threads=threads))
        shape = find.shape_of(hub.find_target(str(options.model)), loaded.model.info)
        theirs = LlamaCpp(options.model, shape, num_threads=threads, max_tokens=max(1024, options.num_tokens))
    except (UserError, MissingPeer) as err:
        print(err, file=sys.stderr)
        return 1
    ours = TargetEngine(loaded.model, shape, is_gguf=True)
    rows = []
    for text in passages(options.texts, options.num_texts, 12 * options.num_tokens):
        ids = loaded.tokenizer.encode(text)[: options.num_tokens]
        rows.append({"num_tokens": len(ids), "ours": surprise(ours, ids), "llama_cpp": surprise(theirs, ids)})
        if not options.json:
            print("{num_tokens} tokens: nats {ours:.4f}, llama.cpp {llama_cpp:.4f}".format(**rows[-1]), flush=True)
    mean = {name: math.exp(sum(row[name] for row in rows) / len(rows)) for name in ("ours", "llama_cpp")}
    apart = 100 * abs(mean["ours"] / mean["llama_cpp"] - 1)
    ours.end()
    theirs.end()
    if options.json:
        provenance = {**environment.provenance(), "argv": sys.argv}
        found = {"model": options.model.name, "perplexity": mean, "per_cent_apart": apart, "texts": rows}
        print(json.dumps({**found, "provenance": provenance}))
    else:
        print(f"perplexity {mean['ours']:.4f}, llama.cpp {mean['llama_cpp']:.4f}: {apart:.3f} % apart")
    return int(not apart <= options.limit)


if __name__ == "__main__":
    sys.exit(main())
