"""The target contract: logits and features for ragged rows of several sequences, over a KV cache that truncates.

A target owns every fact of its model family (embedding scale, soft-caps, norms, sliding layers); nothing
above it may know them. Implementations: `native.py` (our CPU kernels), `hf.py` (any Hugging Face causal LM),
`replay.py` (recorded text).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hyflash.core import Rows, TargetHooks, TargetInfo, TargetOutput
from hyflash.errors import HyflashError, UserError
from hyflash.ops.kernels import Kernels
from hyflash.ops.online_softmax import look

Exactness = Literal["invariant", "recheck", "off"]


def copy_kv(target: Target, seq: int, layers: Sequence[int]) -> Tensor:
    """Keys and values of all tokens of a sequence at some layers: (T, R, 2, G, K) float32, a copy. Raises UserError."""
    views = [target.kv_view(seq, layer) for layer in layers]
    if any(keys.shape != values.shape for keys, values in views):
        raise UserError(f"the values of {target.info.name} are not as wide as its keys; no drafter reads such a cache.")
    return torch.stack([torch.stack(view, dim=1) for view in views], dim=1)


class Target(ABC):
    """A causal LM that verifies. Sequences are integer handles from `open`."""

    info: TargetInfo
    exactness: Exactness
    """"invariant": a row's bits do not depend on the rows beside it; "recheck": they may, by `epsilon` in a logit."""
    epsilon: float
    """Largest logit difference seen between widths at calibration, times a safety factor; 0 when invariant."""

    @abstractmethod
    def open(self) -> int:
        """Start an empty sequence and return its handle."""

    @abstractmethod
    def close(self, seq: int) -> None:
        """Forget a sequence; its memory is reused."""

    @abstractmethod
    def length(self, seq: int) -> int:
        """Tokens in the sequence's cache."""

    @abstractmethod
    def truncate(self, seq: int, length: int) -> None:
        """Drop all cached tokens at positions >= length."""

    @abstractmethod
    def forward(self, rows: Rows) -> TargetOutput:
        """Append rows to their sequences' caches and return logits and features. Raises UserError past max_context."""

    @abstractmethod
    def hooks(self) -> TargetHooks:
        """Embedding and head for drafters, sharing the target's own weights."""

    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes the caches of all open sequences hold now."""

    def kv_view(self, seq: int, layer: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (T, G, K) float32 of a sequence's tokens first..last-1 (None: to its end) at a layer.

        Keys are rotated, in the rotate-half order whatever the target keeps. Views where it keeps float32, else copies:
        read them before the sequence changes, and do not write to them. Layers with a sliding window show all tokens.
        Raises UserError where a target cannot, HyflashError for tokens that are not in the cache.
        """
        raise UserError(f"{self.info.name} does not show its keys and values.")

    def kv_attend(self, seq: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """What queries (Q, H, K) see in a sequence's tokens first..last-1 (at least one) at a layer, where they lie.

        Queries are scaled, and rotated in the rotate-half order. Out: outputs (Q, H, K) and log-sum-exps (Q, H), both
        float32. Raises as `kv_view`, and HyflashError for queries of another shape.
        """
        self._check_queries(first, last, queries)
        return look(queries, *self.kv_view(seq, layer, first, last))

    def _check_queries(self, first: int, last: int, queries: Tensor) -> None:
        """For `kv_attend`: there must be a token to see, and heads that its keys fit."""
        groups, width = self.info.num_kv_heads, self.info.head_dim
        if queries.dim() != 3 or queries.shape[1] % groups or queries.shape[2] != width or first == last:
            raise HyflashError(
                f"queries {tuple(queries.shape)} over tokens {first} to {last}; expected (Q, H, {width}) with H a "
                f"multiple of {groups}, over at least one token."
            )

    def _kv_span(self, seq: int, layer: int, first: int, last: int | None) -> tuple[int, int]:
        """Checked bounds of `kv_view`."""
        if not 0 <= layer < self.info.num_layers:
            raise UserError(f"layer {layer} is none of {self.info.name}; expected 0 to {self.info.num_layers - 1}.")
        held = self.length(seq)
        last = held if last is None else last
        if not 0 <= first <= last <= held:
            raise HyflashError(f"tokens {first} to {last} are not in a cache of {held}.")
        return first, last

    def kernels(self, weights: str) -> Kernels | None:
        """CPU kernels for a drafter that keeps its weights so and runs between this target's forwards; None: torch."""
        return None

    def describe(self) -> dict[str, Any]:
        """What computes and how, for reports: `backend`, and what that has to say."""
        return {"backend": "other"}

    def memory(self) -> dict[str, int]:
        """Bytes by what they hold."""
        return {"kv_bytes": self.kv_bytes()}
