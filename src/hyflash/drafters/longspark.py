"""LongSpark: drafts from a summary of fixed size, the last rows of the target's cache, and the last token's features.

In: the target's keys and values at one layer for each draft layer, and the taps of the last verified token. Out: draft
tokens. Each attention sees three sources at once: what a few learnt queries of every head find in the target's whole
text (their outputs are values, the queries themselves the keys), the target's last `window` rows as they are, and the
block. The queries are fixed, so what they find is an exact online softmax: a state of fixed size, to which only
committed tokens are added. Taps reach every slot through its input. Bytes and time do not grow with the context.

After LongSpark; the summary is made here and not inside the target's own pass, and sizes follow the target (ours).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import Commit, DraftCost, TargetHooks
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.context import BlockState
from hyflash.drafters.shared_kv import SharedKVConfig, SharedKVDrafter, Summary, kv_of
from hyflash.layers import LayerContext, RMSNorm, init_linear, rms
from hyflash.ops.online_softmax import at_anchors, find, merge


class LongSparkConfig(SharedKVConfig):
    """Options of `longspark`."""

    window: int = Field(default=256, ge=0, description="last rows of the target's keys and values that are read; 0 all")
    num_global: int = Field(default=16, ge=0, description="learnt queries of each head and layer; 0 no summary")
    use_boundary: bool = Field(default=True, description="the last verified token's taps reach the slots")
    sample_from_anchor: bool = Field(
        default=True, description="the anchor's slot drafts the first token: one slot fewer for as many drafts"
    )

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=2, num_draft_tokens=3, num_taps=2, window=8, num_global=3)


class DrafterImpl(SharedKVDrafter):
    """Block drafter over a summary, a window and the block; its state does not grow."""

    Config: ClassVar[type[DrafterConfig]] = LongSparkConfig
    source: ClassVar[str] = "LongSpark"
    config: LongSparkConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        cfg = self.config
        dim = cfg.hidden_size
        shape = (cfg.num_layers, cfg.num_heads, cfg.num_global, cfg.head_dim)
        self.queries = nn.Parameter(torch.randn(shape)) if cfg.num_global else None
        self.slot_embedding = nn.Parameter(torch.zeros(cfg.num_slots, dim))
        self.boundary_out = init_linear(nn.Linear(dim, dim, bias=False)) if cfg.use_boundary else None
        self.slot_in = init_linear(nn.Linear(2 * dim if cfg.use_boundary else dim, dim, bias=False))
        self.slot_out = init_linear(nn.Linear(dim, dim, bias=False))
        self.slot_norm = RMSNorm(dim, cfg.rms_norm_eps)
        if cfg.start == "ridge":  # which predicts the slots alone at first
            nn.init.zeros_(self.slot_norm.weight)

    def _slots(self, x: Tensor, last: Tensor) -> Tensor:
        """What the layers see of slot inputs x (B, A, S, D): mixed with the slot's place and the taps (B, A, C, D)."""
        mixed = rms(x, self.slot_norm.eps).to(x.dtype) + self.slot_embedding
        if self.boundary_out is not None:
            fused = self.fc((last if self.tap_norm is None else self.tap_norm(last)).flatten(-2))
            boundary = self.hidden_norm(self.boundary_out(F.silu(fused)))
            mixed = torch.cat((mixed, boundary[:, :, None].expand_as(mixed)), dim=-1)
        out: Tensor = self.slot_norm(self.slot_out(F.silu(self.slot_in(mixed))))
        return out if self.ridge is None else x + out

    def blocks(self, x: Tensor, contexts: list[LayerContext], last: Tensor) -> Tensor:
        """Hidden states (B, A, L, D) of slot inputs x (B, A, S, D)."""
        return self._run(self._slots(x, last), contexts)

    def _train_summary(self, index: int, keys: Tensor, values: Tensor, anchors: Tensor) -> Summary | None:
        if self.queries is None:
            return None
        return self.queries[index], at_anchors(self.queries[index], keys, values, anchors)

    # ---------------------------------------------------------------------------------------- serving

    def _fixed(self, num_rows: int) -> dict[str, Tensor]:
        fixed = super()._fixed(num_rows)
        for i, queries in enumerate(() if self.queries is None else self.queries):
            fixed[f"found.{i}"] = torch.zeros(num_rows, *queries.shape, device=queries.device)
            fixed[f"lse.{i}"] = torch.zeros(num_rows, *queries.shape[:-1], device=queries.device)
        return fixed

    def _take(self, state: BlockState, new: Commit, starts: list[int], taps: Tensor) -> None:
        """Add the committed tokens to what the queries have found."""
        for i, queries in enumerate(() if self.queries is None else self.queries):
            found, lse = state.fixed[f"found.{i}"], state.fixed[f"lse.{i}"]
            for row, start, count in zip(new.rows, starts, new.lengths, strict=True):
                if count == 0:
                    continue
                keys, values = kv_of(new.kv).read(row, self.config.kv_layers[i], start, start + count)
                span = find(queries, keys.to(queries.device), values.to(queries.device))
                # An empty row is all zeros, and its log-sum-exp is not 0.
                both = merge((found[row], lse[row]), span) if start else span
                found[row], lse[row] = both

    def _serve_summary(self, index: int, state: BlockState, rows: list[int]) -> Summary | None:
        if self.queries is None:
            return None
        return self.queries[index], state.fixed[f"found.{index}"][rows][:, None]

    def cost(self, context_tokens: int) -> DraftCost:
        """As for every drafter over the target's keys and values, and the summary of each committed token."""
        base, cfg = super().cost(context_tokens), self.config
        mixing = sum(
            p.numel() for part in (self.boundary_out, self.slot_in, self.slot_out) if part for p in part.parameters()
        )
        asked = cfg.num_layers * cfg.num_heads * cfg.num_global * cfg.head_dim
        return replace(
            base,
            propose_flops=base.propose_flops + 2 * cfg.num_slots * mixing + 4 * cfg.num_slots * asked,
            commit_flops_per_token=4 * asked,
        )
