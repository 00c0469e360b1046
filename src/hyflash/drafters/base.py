"""The drafter contract: one file per method, found by its file name, no registry.

A drafter file `NAME.py` defines `class DrafterImpl(Drafter)` with a `Config`; its docstring's first line is
its summary. State holds committed tokens only: `commit` is its only writer, `propose` leaves it as it was, so
nothing ever rolls back. State is batched: `new_state(num_rows)` gives empty rows, `reset` empties one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hyflash.core import (
    Commit,
    Draft,
    DraftCost,
    DraftOutput,
    DraftRequest,
    LossTerms,
    Outcomes,
    Proposal,
    TargetHooks,
    TargetInfo,
    TrainBatch,
)
from hyflash.errors import HyflashError, UserError
from hyflash.ops.kernels import Kernels
from hyflash.options import Options


class DrafterConfig(Options):
    """Options of a drafter; each field's description is its help text."""

    @classmethod
    def tiny(cls) -> Self:
        """A small valid config for the contract tests (2 layers at most, small windows)."""
        return cls()


class State(ABC):
    """Memory of a drafter for several rows."""

    @abstractmethod
    def reset(self, row: int) -> None:
        """Empty one row for a new sequence."""

    @abstractmethod
    def nbytes(self, row: int) -> int:
        """Bytes this row holds now."""

    @abstractmethod
    def snapshot(self, row: int) -> dict[str, Any]:
        """A copy of one row (tensors and plain values) that later commits do not change."""

    @abstractmethod
    def restore(self, row: int, saved: dict[str, Any]) -> None:
        """Put a snapshot into a row, bit for bit."""


class Drafter(nn.Module, ABC):
    """Proposes tokens. `target_layer_ids` are the taps it reads (empty: it needs no features)."""

    Config: ClassVar[type[DrafterConfig]]
    trainable: ClassVar[bool] = True
    source: ClassVar[str] = ""
    """Paper or project the method is from."""

    optional_tensors: ClassVar[tuple[str, ...]] = ()
    """Name patterns of tensors that a checkpoint of another method may lack; they keep their fresh values."""

    addable: ClassVar[tuple[str, ...]] = ()
    """Options that may be given to a checkpoint whose own value is 0: parts and limits that it can be given later."""
    tunable: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Options that may change under the same weights, with the values that `hyflash calibrate` tries, in this order."""
    owns_words: ClassVar[bool] = False
    """Whether its checkpoints hold an embedding and a head of its own; those of others are copies of the target's."""
    cheap: ClassVar[bool] = False
    """Whether a proposal costs next to nothing beside a forward of the target: it looks up, and runs no network."""

    target_layer_ids: tuple[int, ...] = ()
    target_kv_layers: tuple[int, ...] = ()
    """Decoder layers whose keys and values it reads in the target's own cache (`DraftRequest.kv`, `Commit.kv`)."""
    weighs_prices: ClassVar[bool] = False
    """Whether `propose` decides by `DraftRequest.prices` how much to draft; else the length policy decides alone."""
    cuts_by_prices: bool = False
    """Whether `propose` may cut what the length policy asked for, by `DraftRequest.prices` and its own confidence."""
    samples: bool = False
    """Whether `propose` can sample drafts for the rows with `DraftRequest.draws`."""
    recycles: bool = False
    """Whether `commit` wants `Verdict.replies`: what the target would have said after drafts, also rejected ones."""
    calibrates: bool = False
    """Whether `calibrate` has something to fit."""
    max_draft_tokens: int = 0
    """Most tokens one proposal can hold."""
    max_positions: int | None = None
    """Longest context (anchor position + drafts) it can serve; None is no limit. `propose` keeps to it as well."""

    loaded_from: Path | None = None
    """Directory of the checkpoint that every tensor is from; None for others."""

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        super().__init__()
        self.config = config
        self.hooks = hooks

    @classmethod
    def read_config(cls, config: Mapping[str, Any], info: TargetInfo, *, directory: Path) -> dict[str, Any] | None:
        """Options from a published config.json in a directory, for `NAME:DIRECTORY`; None: it is read as a DFlash's.

        Raises UserError for one that cannot be honoured.
        """
        return None

    @classmethod
    def import_config(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Options from another method's checkpoint; a method may leave some to its own defaults."""
        return dict(values)

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Our tensor names and shapes from a foreign checkpoint's. Raises UserError for what cannot be honoured."""
        return dict(weights)

    @abstractmethod
    def new_state(self, num_rows: int) -> State:
        """Empty state with rows 0..num_rows-1."""

    @abstractmethod
    def commit(self, state: State, new: Commit) -> None:
        """Take committed tokens into the state; the only writer."""

    @abstractmethod
    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Draft tokens after each row's anchor. Must not change the state."""

    @abstractmethod
    def cost(self, context_tokens: int) -> DraftCost:
        """Static bytes and FLOPs of one sequence at this context."""

    def use_kernels(self, kernels: Kernels | None) -> bool:
        """Serve on the CPU kernels from now on (None: on torch); whether this drafter can. Training stays on torch."""
        return False

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """Training forward at the batch's anchors; equals the serving proposal after committing each prefix."""
        raise HyflashError(f"{type(self).__module__} is training-free.")

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        """Training loss as sums."""
        raise HyflashError(f"{type(self).__module__} is training-free.")

    def logits(self, out: DraftOutput) -> Tensor:
        """Logits (B, A, L, V) of a training forward over the whole vocabulary; serving picks among the same."""
        return self.hooks.head(out.hidden)

    def calibrate(self, outcomes: Outcomes) -> dict[str, float]:
        """Fit the stated confidence to how proposals fared on held-out texts; returns figures for the log."""
        return {}

    def predict(self, out: DraftOutput, batch: TrainBatch) -> Tensor:
        """Greedy tokens (B, A, L) that a training forward stands for, each after the labels before it."""
        return self.logits(out).argmax(-1)

    def start(self, batches: list[TrainBatch]) -> dict[str, float]:
        """Closed-form start from a few batches, where the method has one; returns figures for the log."""
        return {}

    def set_draft_vocab(self, ids: Tensor) -> None:
        """Set the static part (n,) of a reduced draft vocabulary before training, where the method has one."""
        raise HyflashError(f"{type(self).__module__} has no reduced draft vocabulary.")

    @property
    def trains_on_text(self) -> bool:
        """Whether training needs tokens alone: `forward` then takes batches without features as well."""
        return False

    @property
    def counts_labels(self) -> bool:
        """Whether `set_label_counts` is still wanted before training."""
        return False

    def set_label_counts(self, counts: Tensor) -> None:
        """Take how often each token is a label, (V,) int64, before training, where the method wants it."""
        raise HyflashError(f"{type(self).__module__} does not count labels.")


def check_samples(drafter: Drafter | None, name: str) -> None:
    """Refuse `draft_sampling` without a drafter that can sample. Raises UserError."""
    if drafter is None or not drafter.samples:
        found = "there is none" if drafter is None else f"{name} cannot"
        raise UserError(
            f"draft_sampling needs a drafter that samples its drafts, as hyflash does; {found}. Leave it out."
        )


def to_proposal(tokens: Tensor, lengths: Sequence[int], probs: Tensor, num_nonfinite: int) -> Proposal:
    """A proposal from tokens and confidences (B, L), the first `lengths[b]` of each row."""
    rows = zip(tokens.tolist(), probs.tolist(), lengths, strict=True)
    return Proposal([Draft(ids[:n], rates[:n]) for ids, rates, n in rows], num_nonfinite=num_nonfinite)


def cut_at_nonfinite(finite: Tensor, wanted: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Tokens of each row before its first position that is not finite (B, L) bool, `wanted` (B) at most, and the number
    of rows that it cut short."""
    good = finite.long().cumprod(1).sum(1).tolist()
    lengths = tuple(min(w, g) for w, g in zip(wanted, good, strict=True))
    return lengths, sum(g < min(w, finite.shape[1]) for w, g in zip(wanted, good, strict=True))


def pick_tokens(logits: Tensor, wanted: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], Tensor, int]:
    """Greedy tokens of a block, cut at the first non-finite position.

    In: logits (B, L, V), wanted lengths (B). Out: tokens (B, L), lengths, probability of each token (B, L)
    float32, and the number of rows cut short.
    """
    finite = torch.isfinite(logits).all(-1)  # (B, L)
    lengths, cut = cut_at_nonfinite(finite, wanted)
    clean = torch.where(finite[..., None], logits, torch.zeros_like(logits)).float()
    probs, tokens = clean.softmax(-1).max(-1)
    return tokens, lengths, probs, cut
