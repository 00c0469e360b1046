"""The network of a block drafter: fused features, slot inputs, layers, correction.

In: features of committed tokens and an anchor. Out: hidden states of the slots after it. Training and serving give it
contexts of their own kind (`dflash.py`). Parameter names are those of z-lab's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyflash.core import TargetHooks
from hyflash.drafters import zlab
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.packed_drafter import PackedDrafter
from hyflash.drafters.packing import PackingDrafter
from hyflash.errors import HyflashError
from hyflash.layers import (
    DraftLayer,
    GRUCorrection,
    LayerContext,
    MarkovCorrection,
    RidgeStart,
    RMSNorm,
    TapNorm,
    init_linear,
)
from hyflash.ops.attention import context_mask
from hyflash.ops.rope import rope_tables


class BlockModel(PackingDrafter):
    """What all block drafters are made of; subclasses train and serve it."""

    config: DFlashConfig
    start_index: Tensor

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; zeros in the config are filled in from the target. Raises UserError."""
        if not isinstance(config, DFlashConfig):
            raise HyflashError(f"expected a block drafter's config, found {type(config).__name__}.")
        cfg = config.resolved(hooks)
        super().__init__(cfg, hooks)
        dim, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.windows = tuple(0 if i in cfg.full_layers else cfg.window for i in range(cfg.num_layers))
        self.max_positions = None if all(self.windows) else cfg.max_positions
        self.tap_norm = TapNorm(len(cfg.taps), dim, eps) if cfg.tap_norm else None
        self.fc = init_linear(nn.Linear(len(cfg.taps) * dim, dim, bias=False))
        self.hidden_norm = RMSNorm(dim, eps)
        self.layers = nn.ModuleList(self._new_layers())
        self.norm = RMSNorm(dim, eps) if cfg.final_norm else None
        self.correction: MarkovCorrection | GRUCorrection | None = None
        if cfg.correction == "markov":
            self.correction = MarkovCorrection(dim, rank=cfg.correction_rank, eps=eps)
        elif cfg.correction == "gru":
            self.correction = GRUCorrection(dim, width=cfg.correction_width, rank=cfg.correction_rank, eps=eps)
        self.ridge: RidgeStart | None = None
        start_index = torch.tensor([cfg.taps.index(tap) for tap in cfg.start_taps or ()], dtype=torch.int64)
        self.register_buffer("start_index", start_index, persistent=False)
        if cfg.start == "ridge":
            self.ridge = RidgeStart(
                dim, num_taps=len(start_index), num_slots=cfg.num_draft_tokens, rank=cfg.start_rank, eps=eps
            )
            for layer in self._layers():
                layer.silence()

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Names of z-lab's checkpoints are ours; see `zlab.py` for the spellings of others."""
        return zlab.own_names(weights, config) if isinstance(config, DFlashConfig) else dict(weights)

    def _new_layers(self) -> list[nn.Module]:
        return [self._new_layer() for _ in range(self.config.num_layers)]

    def _new_layer(self) -> DraftLayer:
        return DraftLayer(self.config.hidden_size, **self._layer_parts())

    def _layer_parts(self) -> dict[str, Any]:
        """Arguments of a new layer beside its width."""
        cfg = self.config
        return {
            "inner": cfg.intermediate_size,
            "num_heads": cfg.num_heads,
            "num_kv_heads": cfg.num_kv_heads,
            "head_dim": cfg.head_dim,
            "eps": cfg.rms_norm_eps,
            "bias": cfg.attention_bias,
            "memory": self._new_memory(),
        }

    def _new_memory(self) -> nn.Module | None:
        """Memory of a new layer; DFlash has none."""
        return None

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _causal(self, layer: int) -> bool:
        return self.config.causal_block and layer not in self.config.full_layers

    def context_features(self, taps: Tensor) -> Tensor:
        """Fuse clamped features (..., C, D) into context features (..., D)."""
        normed = taps if self.tap_norm is None else self.tap_norm(taps)
        out: Tensor = self.hidden_norm(self.fc(normed.flatten(-2)))
        return out

    def _slot_inputs(self, tokens: Tensor, before: Tensor, packed: PackedDrafter | None = None) -> Tensor:
        """Block inputs (B, A, S, D) of anchor tokens (B, A) and start taps at anchor - 1 (B, A, C', D).

        A closed-form start makes the input of every slot that drafts, and has read the anchor for it.
        """
        cfg = self.config
        anchor = self._embed(tokens)
        if self.ridge is not None:
            start = self.ridge if packed is None else packed.start
            slots = start(before, anchor).to(anchor.dtype)
            if cfg.sample_from_anchor:
                return slots
        else:
            mask = self._embed(torch.tensor(cfg.mask_token_id, device=tokens.device))
            slots = mask.expand(*tokens.shape, cfg.num_slots - 1, -1)
        return torch.cat((anchor[:, :, None], slots), dim=2)

    def _block_tables(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables (B, A, S, K) of blocks at anchors (B, A)."""
        slots = torch.arange(self.config.num_slots, device=anchors.device)
        return rope_tables(anchors[..., None] + slots, dim=self.config.head_dim, theta=self.config.rope_theta)

    def _mask(self, positions: Tensor, anchors: Tensor, window: Tensor | None) -> Tensor:
        return context_mask(
            positions,
            anchors,
            window=window,
            num_slots=self.config.num_slots,
            counts_slots=self.config.window_counts_slots,
        )

    def _run(self, x: Tensor, contexts: list[LayerContext]) -> Tensor:
        """Layers and final norm: slots (B, A, S, D) -> (B, A, L, D). One that drafts nothing ends with the last."""
        for i, (layer, context) in enumerate(zip(self._layers(), contexts, strict=True)):
            x = layer(x, context, self.config.first_slot if i == len(contexts) - 1 else 0)
        return x if self.norm is None else self.norm(x)
