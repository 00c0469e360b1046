"""transformers' own eager forward as a peer: what most people run.

In: a model directory. Out: an `Engine` whose `verify` is one forward over a DynamicCache, in bfloat16 where the CPU
multiplies it natively, else float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyflash.bench.floors import Shape, Work
from hyflash.bench.peers.base import PIECE, Engine, MissingPeer
from hyflash.environment import hardware
from hyflash.errors import reason


class Transformers(Engine):
    """A causal LM of transformers. Raises MissingPeer."""

    name = "transformers"

    def __init__(self, path: str, shape: Shape, *, num_threads: int, max_tokens: int) -> None:
        import transformers

        dtype = torch.bfloat16 if "avx512_bf16" in hardware()["cpu_flags"] else torch.float32
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        except MemoryError:
            raise
        except Exception as err:  # errors of every kind
            raise MissingPeer(f"transformers cannot load {path}: {reason(err)}") from err
        self._model: Any = model.eval().requires_grad_(False)
        self._cache_class: Any = transformers.DynamicCache
        torch.set_num_threads(num_threads)
        self.weights = "BF16" if dtype is torch.bfloat16 else "F32"
        self.about = {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}
        self.max_tokens = max_tokens
        self.work = Work(shape=shape, weight_bytes=shape.num_weights * dtype.itemsize, kv_bytes=dtype.itemsize)
        self._cache, self._logits = self._cache_class(), torch.empty(0)

    def start(self, ids: Sequence[int]) -> None:
        """Feed the prompt in pieces; only the last row's logits are made."""
        self._cache = self._cache_class()
        for first in range(0, len(ids), PIECE):
            self._forward(torch.tensor(ids[first : first + PIECE]), keep=1)

    def verify(self, ids: Sequence[int]) -> None:
        """One forward with all logits."""
        self._forward(torch.tensor(ids), keep=0)

    def logits(self) -> NDArray[np.float32]:
        """Of the last `verify`."""
        return self._logits.float().numpy()

    def rewind(self) -> None:
        """Crop the cache to the prompt."""
        self._cache.crop(-len(self._logits))

    def close(self) -> None:
        """Drop the model."""
        self._model = self._cache = None

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, *, keep: int) -> None:
        out = self._model(input_ids=ids[None], cache=self._cache, use_cache=True, logits_to_keep=keep)
        self._logits = out.logits[0]
