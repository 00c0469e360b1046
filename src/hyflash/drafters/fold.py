"""FOLD: a DFlash checkpoint that keeps its exact positions near by and folds all distant tokens to one distance.

In: features of committed tokens, as DFlash. Out: draft tokens. A DFlash has seen no positions beyond the contexts it
was trained on, and its attention thins out over more tokens than it ever had. Here the last `fold_window` tokens are
attended to where they are; every older one stands at one distance, so that content alone decides, with scores times
`kappa` and a mass times `far_weight`. Nothing is trained: any DFlash checkpoint serves (`fold:CHECKPOINT`).
No text or code of the method is public: this is our reconstruction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from hyflash.core import DraftOutput, TargetHooks, TrainBatch
from hyflash.drafters import dflash
from hyflash.drafters.base import Drafter, DrafterConfig
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.context import BlockState, ContextShape, ContextStore, ContextView, GrowingStore
from hyflash.drafters.packed_drafter import PackedDrafter
from hyflash.errors import HyflashError, UserError
from hyflash.layers import LayerContext
from hyflash.ops.attention import FarContext
from hyflash.ops.blocks import Place
from hyflash.ops.kernels import Kernels, Ring
from hyflash.ops.rope import rope_tables, rotate


class FoldConfig(DFlashConfig):
    """Options of `fold`: those of `dflash` and of what is far."""

    fold_window: int = Field(
        default=256, ge=0, description="committed tokens at their exact positions, in layers without window; 0 all"
    )
    kappa: float = Field(
        default=0.0, ge=0, le=100, description="factor of far scores; 0 is max(1, ln far tokens / ln fold_window)"
    )
    far_weight: float = Field(default=1.0, ge=0, le=1e6, description="factor of far attention's mass; 0 is a window")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2, fold_window=8)

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        if self.window and not self.full_layers:
            raise UserError(
                f"window is {self.window} in every layer of this drafter, so that nothing far is left to fold; "
                "expected a DFlash with full attention."
            )
        if not self.fold_window and (self.kappa not in (0.0, 1.0) or self.far_weight != 1.0):
            raise UserError(
                f"fold_window is 0, so that nothing is far, but kappa is {self.kappa} and far_weight "
                f"{self.far_weight}; expected kappa 0 or 1 and far_weight 1, or a fold_window."
            )
        return super().resolved(hooks)


class FoldStore(GrowingStore):
    """Every committed token of each row, keys not rotated: the last `window` are rotated at read, others never."""

    def __init__(self, shape: ContextShape, num_rows: int, window: int) -> None:
        super().__init__(shape, num_rows)
        self.window = window

    def _kept_keys(self, keys: Tensor, start: int) -> Tensor:
        return keys

    def view(self, rows: list[int], lengths: list[int]) -> ContextView:
        """The last tokens; positions count from the oldest of them."""
        held = [min(length, self.window) for length in lengths]
        data = self.slices(rows, [n - h for n, h in zip(lengths, held, strict=True)], held)
        device = self.shape.device
        position = torch.arange(data.shape[1], device=device)
        cos, sin = rope_tables(position, dim=self.shape.head_dim, theta=self.shape.rope_theta)
        return ContextView(
            keys=rotate(data[:, :, 0], cos, sin),
            values=data[:, :, 1],
            positions=position.expand(len(rows), -1),
            anchors=torch.tensor(held, dtype=torch.int64, device=device),
        )

    def far(self, rows: list[int], lengths: list[int]) -> tuple[Tensor, list[int]]:
        """Keys and values (B, T, 2, G, K) of the tokens before the last ones, and how many each row has."""
        counts = [max(0, length - self.window) for length in lengths]
        return self.slices(rows, [0] * len(rows), counts), counts

    def place(self, row: int, start: int, count: int, memory: Tensor | None) -> Place:
        raise HyflashError("the kernels know no far context.")

    def ring(self, row: int, length: int, num_slots: int) -> Ring:
        raise HyflashError("the kernels know no far context.")


class DrafterImpl(dflash.DrafterImpl):
    """A DFlash whose distant context stands at one distance."""

    Config: ClassVar[type[DrafterConfig]] = FoldConfig
    trainable: ClassVar[bool] = False
    tunable: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "fold_window": (0, 32, 64, 128, 256, 512, 1024),
        "far_weight": (0.0, 0.001, 0.01, 0.1, 1.0),
        "kappa": (0.0, 1.0, 1.5, 2.0, 3.0),
    }
    source: ClassVar[str] = "FOLD (its summary; no text is public); our reconstruction"
    config: FoldConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        cfg = self.config
        self.requires_grad_(False)
        self.folds = cfg.fold_window > 0 and cfg.far_weight > 0
        """Whether there is a far context: without one this is a DFlash, full or windowed, on the very same path."""
        if cfg.fold_window:
            self.max_positions = None
            if not self.folds:
                self.windows = tuple(width or cfg.fold_window for width in self.windows)

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """Raises HyflashError: what there is to train is a DFlash."""
        return Drafter.forward(self, batch)

    def _new_store(self, shape: ContextShape, num_rows: int, window: int) -> ContextStore:
        if self.folds and not window:
            return FoldStore(shape, num_rows, self.config.fold_window)
        return super()._new_store(shape, num_rows, window)

    def _serve_context(self, layer: int, own: BlockState, rows: list[int], lengths: list[int]) -> LayerContext:
        near, store = super()._serve_context(layer, own, rows, lengths), own.stores[layer]
        if not isinstance(store, FoldStore):
            return near
        kept, counts = store.far(rows, lengths)
        if not any(counts):
            return near
        count = torch.tensor(counts, device=kept.device)
        cos, sin = self._far_tables(len(rows), kept.device)
        far = FarContext(
            keys=kept[:, :, 0],
            values=kept[:, :, 1],
            mask=torch.arange(kept.shape[1], device=kept.device) < count[:, None, None],
            cos=cos,
            sin=sin,
            sharpness=torch.tensor([[self._sharpness(n)] for n in counts], device=kept.device),
            log_weight=math.log(self.config.far_weight),
        )
        return replace(near, far=far)

    def _far_tables(self, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rotary tables (B, 1, S, K) that put every slot one window away from all that is far."""
        cfg = self.config
        distance = torch.full((num_rows, 1, cfg.num_slots), cfg.fold_window, device=device)
        return rope_tables(distance, dim=cfg.head_dim, theta=cfg.rope_theta)

    def _sharpness(self, num_far: int) -> float:
        """Factor of far scores: the configured one, or one that keeps the spread over n tokens as it was over a window:
        to make up for n equal scores a best one must stand out by ln n, not ln W."""
        if self.config.kappa:
            return self.config.kappa
        return max(1.0, math.log(max(num_far, 1)) / math.log(max(self.config.fold_window, 2)))

    def pack(self, kernels: Kernels) -> PackedDrafter | None:
        """As DFlash; None with a far context, which the kernels do not know."""
        return None if self.folds else super().pack(kernels)
