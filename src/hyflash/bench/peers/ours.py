"""Our own targets as engines of a cost measurement: the native one and the torch one alike.

In: a loaded target and what its file holds. Out: an `Engine` named `hyflash native` or `hyflash torch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

import hyflash
from hyflash.bench.floors import Shape, Work
from hyflash.bench.peers import find
from hyflash.bench.peers.base import PIECE, Engine
from hyflash.core import Rows
from hyflash.targets.base import Target

_GGUF_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class TargetEngine(Engine):
    """A target with one sequence."""

    def __init__(self, target: Target, shape: Shape, *, is_gguf: bool) -> None:
        """`is_gguf`: the model comes from such a file, whose weights the native target computes with as they are."""
        how = target.describe()
        number = str(how.get("kv") or how["dtype"])
        self.name, self.weights = f"hyflash {how['backend']}", str(how.get("weights") or _GGUF_NAMES[number])
        weight_bytes = round(find.BYTES_PER_WEIGHT.get(self.weights, 0) * shape.num_weights)
        self.work = Work(
            shape=shape,
            weight_bytes=shape.stored_bytes if is_gguf and how["backend"] == "native" else weight_bytes,
            kv_bytes=1 + 4 / shape.head_dim if number == "int8" else torch.finfo(getattr(torch, number)).bits / 8,
        )
        self.about = {
            "version": f"hyflash {hyflash.__version__}",
            "build": ", ".join(f"{k} {v}" for k, v in how.items()),
        }
        self.max_tokens = target.info.max_context
        self._target, self._seq, self._num_prompt = target, target.open(), 0
        self._logits = torch.empty(0)

    def start(self, ids: Sequence[int]) -> None:
        """Feed the prompt in pieces; only the last row's logits are made, as before decoding."""
        self._target.truncate(self._seq, 0)
        for first in range(0, len(ids), PIECE):
            self._forward(ids[first : first + PIECE], "last" if first + PIECE >= len(ids) else "none")
        self._num_prompt = len(ids)

    def verify(self, ids: Sequence[int]) -> None:
        """One forward with all logits."""
        self._forward(ids, "all")

    def logits(self) -> NDArray[np.float32]:
        """Of the last `verify`."""
        return self._logits.numpy()

    def rewind(self) -> None:
        """Truncate to the prompt."""
        self._target.truncate(self._seq, self._num_prompt)

    def close(self) -> None:
        """Give the sequence back; the target is the caller's."""
        self._target.close(self._seq)

    def _forward(self, ids: Sequence[int], logits: Literal["all", "last", "none"]) -> None:
        rows = Rows(tokens=torch.tensor(ids), seqs=(self._seq,), lengths=(len(ids),), logits=logits)
        out = self._target.forward(rows)
        if out.logits is not None:
            self._logits = out.logits
