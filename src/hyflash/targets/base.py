"""The target contract: logits and features for ragged rows of several sequences, over a KV cache that truncates.

A target owns every fact of its model family (embedding scale, soft-caps, norms, sliding layers); nothing
above it may know them. Implementations: `native.py` (our CPU kernels), `hf.py` (any Hugging Face causal LM),
`replay.py` (recorded text).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from torch import Tensor

from hyflash.core import Rows, TargetHooks, TargetInfo, TargetOutput
from hyflash.errors import UserError
from hyflash.ops.kernels import Kernels

Exactness = Literal["invariant", "recheck", "off"]


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

    def kv_view(self, seq: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of a layer's keys (rotated) and values of a sequence, each (T, G, K) float32. Not every target can."""
        raise UserError(f"{self.info.name} does not show its keys and values.")

    def kernels(self, weights: str) -> Kernels | None:
        """CPU kernels for a drafter that keeps its weights so and runs between this target's forwards; None: torch."""
        return None

    def describe(self) -> dict[str, Any]:
        """What computes and how, for reports: `backend`, and what that has to say."""
        return {"backend": "other"}

    def memory(self) -> dict[str, int]:
        """Bytes by what they hold."""
        return {"kv_bytes": self.kv_bytes()}
