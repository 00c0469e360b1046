"""Block drafters without keys and values of their own: their attention reads the target's, at some of its layers.

In: the taps of the last committed token, and the target's keys and values of those before the anchor, of which nothing
is kept. Out: draft tokens; heads, corrections, starts and losses are those of `dflash.py`. Queries and the block's own
keys are rotated as the target rotates at the layer that is read, at absolute positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from hyflash.core import Commit, DraftCost, DraftOutput, DraftRequest, TargetHooks, TargetKV, TrainBatch
from hyflash.drafters import dflash
from hyflash.drafters.base import DrafterConfig, State
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.context import BlockState
from hyflash.drafters.packed_drafter import PackedDrafter
from hyflash.errors import HyflashError, UserError
from hyflash.layers import LayerContext
from hyflash.ops.kernels import Kernels
from hyflash.ops.online_softmax import Span, nothing
from hyflash.ops.rope import turn_tables

Summary = tuple[Tensor, Tensor]


def upper_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Layers spread over the upper half: 17, 25 and 34 of 36, as H-Spec reads them. Some twice where there are few."""
    first, last = num_layers // 2 - 1, num_layers - 2
    if count == 1:
        return (max(0, last),)
    return tuple(max(0, first + (last - first) * i // (count - 1)) for i in range(count))


class SharedKVConfig(DFlashConfig):
    """Options of `dflash`, less those about keys and values, which are the target's."""

    window: int = Field(default=2048, ge=0, description="committed tokens whose keys and values are read; 0 all")
    target_kv_layers: tuple[int, ...] | None = Field(
        default=None,
        description="decoder layers whose keys and values are read, one an attention; default: over the upper half",
    )

    @property
    def num_attentions(self) -> int:
        """Attentions, each of which reads the target's keys and values at one layer."""
        return self.num_layers

    @property
    def reads_kv(self) -> bool:
        """Whether they see more than the block."""
        return True

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Resolved target_kv_layers."""
        return self.target_kv_layers or ()

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        info = hooks.info
        for name in ("num_kv_heads", "head_dim", "rope_theta"):
            own, theirs = getattr(self, name), getattr(info, name)
            if own not in (0, theirs):
                raise UserError(
                    f"{name} is {own}; expected {theirs}, as target {info.name!r} has, whose keys and values are read."
                )
        if self.window_counts_slots or self.full_layers:
            raise UserError("window_counts_slots and full_layers are of drafters with keys and values of their own.")
        return super().resolved(hooks).model_copy(update={"target_kv_layers": self._kv_layers(info.num_layers)})

    def _kv_layers(self, num_layers: int) -> tuple[int, ...]:
        wanted, layers = self.num_attentions if self.reads_kv else 0, self.target_kv_layers
        if layers is None:
            layers = upper_layers(num_layers, wanted)
        if len(layers) != wanted or any(not 0 <= layer < num_layers for layer in layers):
            raise UserError(
                f"target_kv_layers is {list(layers)}; expected {wanted} layers from 0 to {num_layers - 1}, one for "
                "each attention."
            )
        return layers


class SharedKVDrafter(dflash.DrafterImpl):
    """A block drafter over the target's keys and values; subclasses have the layers."""

    Config: ClassVar[type[DrafterConfig]] = SharedKVConfig
    config: SharedKVConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Raises UserError also for a target that does not say how it rotates its keys."""
        super().__init__(config, hooks)
        cfg, info = self.config, hooks.info
        self.target_kv_layers = tuple(sorted(set(cfg.kv_layers)))
        self._sources: list[int | None] = list(cfg.kv_layers) if cfg.reads_kv else [None] * cfg.num_attentions
        plain = tuple(info.rope_theta ** (-2 * i / info.head_dim) for i in range(info.head_dim // 2))
        self._rotations = [
            (plain, 1.0) if hooks.rotation is None or layer is None else hooks.rotation(layer)
            for layer in self._sources
        ]
        self.windows = (cfg.window,) * len(cfg.kv_layers)

    @abstractmethod
    def blocks(self, x: Tensor, contexts: list[LayerContext], last: Tensor) -> Tensor:
        """Hidden states (B, A, L, D) of slot inputs x (B, A, S, D), given the context of each reading attention and the
        taps (B, A, C, D) of the token before the anchor, zeros before the first."""

    def _hidden(self, tokens: Tensor, contexts: list[LayerContext], last: Tensor) -> Tensor:
        """Hidden states (B, A, L, D) of blocks at anchor tokens (B, A)."""
        return self.blocks(self._slot_inputs(tokens, last[:, :, self.start_index]), contexts, last)

    def _context(
        self, index: int, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, summary: Summary | None
    ) -> LayerContext:
        """Context of one attention: keys, values (B, T, G, K) that the mask (B, A, 1, T) shows anchors at (B, A)."""
        frequencies, factor = self._rotations[index]
        slots = torch.arange(self.config.num_slots, device=positions.device)
        angles = torch.tensor(frequencies, dtype=torch.float64)
        cos, sin = turn_tables(positions[..., None] + slots, angles, factor)
        weight = self.fc.weight
        return LayerContext(
            keys=keys.to(weight),
            values=values.to(weight),
            mask=mask,
            cos=cos,
            sin=sin,
            causal=self.config.causal_block,
            summary=summary,
        )

    # --------------------------------------------------------------------------------------- training

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """Hidden states of all draft positions at all anchors, corrections teacher-forced."""
        if torch.is_grad_enabled():
            self.forget()  # a step will follow
        taps, num_tokens = self._clean(batch.features), batch.tokens.shape[1]
        anchors = batch.anchors.clamp(0, num_tokens - 1)
        rows = torch.arange(len(taps), device=taps.device)[:, None]
        last = taps[rows, (anchors - 1).clamp(min=0)] * (anchors > 0)[..., None, None]
        places = torch.arange(num_tokens, device=anchors.device)[None]
        starts = 0 if batch.starts is None else batch.starts[:, None]
        contexts = []
        for i, layer in enumerate(self._sources):
            window = torch.full_like(batch.lengths, self.config.window) if self.config.window else None
            keys, values = self._nothing(len(taps)) if layer is None else self._train_kv(batch, layer)
            summary = self._train_summary(i, keys, values, anchors)
            mask = self._mask(places[:, : keys.shape[1]], anchors, window)
            contexts.append(self._context(i, keys, values, mask, anchors + starts, summary))
        return self._output(self._hidden(batch.tokens.gather(1, anchors), contexts, last), batch)

    def _train_kv(self, batch: TrainBatch, layer: int) -> Summary:
        kv, wanted = batch.target_kv, len(self.target_kv_layers)
        if kv is None or kv.shape[2] != wanted:
            found = "none" if kv is None else f"those of {kv.shape[2]} layers"
            raise HyflashError(f"drafter needs keys and values of layers {self.target_kv_layers}; found {found}.")
        both = kv[:, :, self.target_kv_layers.index(layer)]
        return both[:, :, 0], both[:, :, 1]

    def _nothing(self, num_rows: int) -> Summary:
        """Keys and values (B, 0, G, K) of an attention that sees the block alone."""
        none = self.fc.weight.new_zeros(num_rows, 0, self.config.num_kv_heads, self.config.head_dim)
        return none, none

    def _train_summary(self, index: int, keys: Tensor, values: Tensor, anchors: Tensor) -> Summary | None:
        """What an attention sees beside the window: keys (H, M, K) and values (B, A, H, M, K) at the anchors."""
        return None

    # ---------------------------------------------------------------------------------------- serving

    def pack(self, kernels: Kernels) -> PackedDrafter | None:
        """Nothing yet: the CPU kernels' own pass reads a drafter's own keys and values."""
        return None

    def new_state(self, num_rows: int) -> BlockState:
        """Empty state without any keys and values."""
        return BlockState(lengths=[0] * num_rows, stores=[], fixed=self._fixed(num_rows))

    def _fixed(self, num_rows: int) -> dict[str, Tensor]:
        weight, shape = self.fc.weight, (num_rows, len(self.target_layer_ids), self.config.hidden_size)
        return super()._fixed(num_rows) | {"last": torch.zeros(shape, dtype=weight.dtype, device=weight.device)}

    def _kept(self, taps: Tensor) -> Tensor:
        return taps

    def _take(self, state: BlockState, new: Commit, starts: list[int], taps: Tensor) -> None:
        """The target has kept its keys and values already."""

    @torch.no_grad()
    def block_hidden(self, state: State, request: DraftRequest) -> Tensor:
        """Hidden states (B, L, D) of a full block after each row's anchor, before correction and head."""
        own, rows = BlockState.of(state), list(request.rows)
        anchors = torch.tensor([own.lengths[row] for row in rows], device=self.fc.weight.device)[:, None]
        contexts = []
        for i, layer in enumerate(self._sources):
            mask = torch.ones(len(rows), 1, 1, 0, dtype=torch.bool, device=anchors.device)
            context = self._context(i, *self._nothing(len(rows)), mask, anchors, self._serve_summary(i, own, rows))
            if layer is not None:
                context = replace(context, attend=self._attend(kv_of(request.kv), own, rows, layer))
            contexts.append(context)
        return self._hidden(self._anchors(request)[:, None], contexts, own.fixed["last"][rows][:, None])[:, 0]

    def _attend(self, kv: TargetKV, state: BlockState, rows: list[int], layer: int) -> Callable[[Tensor], Span]:
        """What queries (B, 1, Q, H, K) see in the rows' last tokens at a layer."""
        width, scale = self.config.window, self.config.head_dim**-0.5

        def attend(queries: Tensor) -> Span:
            found = []
            for row, asked in zip(rows, queries[:, 0] * scale, strict=True):
                end = state.lengths[row]
                first = max(0, end - width) if width else 0
                found.append(kv.attend(row, layer, first, end, asked) if end else nothing(asked.float()))
            out, lse = (torch.stack(part)[:, None].to(queries.device) for part in zip(*found, strict=True))
            return out, lse

        return attend

    def _serve_summary(self, index: int, state: BlockState, rows: list[int]) -> Summary | None:
        """As in training, for rows of the state."""
        return None

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `State.nbytes` counts them, none of them keys and values; FLOPs as `dflash` counts them."""
        base = super().cost(context_tokens)
        return replace(
            base,
            state_bytes=sum(t.nbytes for t in self._fixed(1).values()),
            kv_bytes_per_token=0,
            propose_flops=base.propose_flops + 2 * self.fc.weight.numel(),
            commit_flops_per_token=0,
        )


def kv_of(kv: TargetKV | None) -> TargetKV:
    """What the engine hands over. Raises HyflashError where it has not."""
    if kv is None:
        raise HyflashError("the drafter reads the target's keys and values, and was given none.")
    return kv
