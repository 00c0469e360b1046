"""HyFlash: block drafting with local attention and a recurrent memory of the target's features, in fixed bytes.

After the abstract of HyFlash (no text or code is public): an independent implementation, hyper-parameters ours.
In: features of committed tokens. The last `window` of them are attended to as in DFlash; all of them are written,
one by one, into a fixed-size state per layer, which every slot of a block reads. Out: draft tokens. The memory's
output projection starts at zero, so a new HyFlash is exactly a windowed DFlash and DFlash weights can be upgraded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import TargetHooks, TrainBatch
from hyflash.drafters import dflash
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.context import BlockState
from hyflash.drafters.packed_drafter import MemoryParts, PackedDrafter
from hyflash.errors import UserError
from hyflash.layers import RMSNorm, init_linear
from hyflash.ops.kernels import HEAD_STEP, Kernels
from hyflash.ops.memory import MEMORY_CORES, MemoryCore, empty_state, gates, read, read_at_anchors, write

Reader = Callable[[Tensor], Tensor]


class HyFlashConfig(DFlashConfig):
    """Options of `hyflash`: those of `dflash` and of the memory."""

    window: int = Field(default=256, ge=0, description="committed tokens a block attends to; 0 all")
    memory_core: Literal["none", "mean", "gla", "delta", "mamba2"] = Field(
        default="delta", description="recurrence of the memory; none is a windowed DFlash"
    )
    memory_heads: int = Field(default=0, ge=0, description="memory heads per layer; 0 as num_kv_heads")
    memory_dim: int = Field(default=0, ge=0, description="key and value width of a memory head; 0 as head_dim")
    min_half_life: float = Field(default=32.0, gt=0, description="tokens after which the fastest head forgets half")
    max_half_life: float = Field(default=65536.0, gt=0, description="the same of the slowest head, at the start")
    memory_dropout: float = Field(default=0.1, ge=0, lt=1, description="training: share of sequences without memory")
    random_window: float = Field(default=0.5, ge=0, le=1, description="training: share with a smaller random window")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2, window=8)

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        base = super().resolved(hooks)
        if self.min_half_life > self.max_half_life:
            raise UserError(
                f"min_half_life is {self.min_half_life}; expected at most max_half_life {self.max_half_life}."
            )
        return base.model_copy(
            update={
                "memory_heads": self.memory_heads or base.num_kv_heads,
                "memory_dim": self.memory_dim or base.head_dim,
            }
        )


class BackboneConfig(HyFlashConfig):
    """Options of drafters that put a head of their own on a block drafter: those of `hyflash`, a DFlash by default."""

    window: int = Field(default=0, ge=0, description="committed tokens a block attends to; 0 all")
    memory_core: Literal["none", "mean", "gla", "delta", "mamba2"] = Field(
        default="none", description="recurrence of the memory: delta and a window make the backbone a HyFlash"
    )


class PrefixMemory(nn.Module):
    """One layer's memory: what is written from context features, and what slots read. No positions, no block writes."""

    def __init__(self, config: HyFlashConfig) -> None:
        super().__init__()
        dim, heads, width = config.hidden_size, config.memory_heads, config.memory_heads * config.memory_dim
        self.core: MemoryCore = MEMORY_CORES[config.memory_core]
        self.heads, self.head_dim = heads, config.memory_dim
        self.q_proj = init_linear(nn.Linear(dim, width, bias=False))
        self.k_proj = init_linear(nn.Linear(dim, width, bias=False))
        self.v_proj = init_linear(nn.Linear(dim, width, bias=False))
        self.z_proj = init_linear(nn.Linear(dim, width, bias=False))
        self.b_proj = init_linear(nn.Linear(dim, heads)) if self.core.strength == "beta" else None
        self.a_proj = nn.Linear(dim, heads, bias=False)
        nn.init.zeros_(self.a_proj.weight)
        # At dt = 1 a head with A = ln 2 / h halves what it holds every h tokens.
        ratio = (config.max_half_life / config.min_half_life) ** (1 / max(1, heads - 1))
        half_lives = config.min_half_life * ratio ** torch.arange(heads, dtype=torch.float64)
        self.A_log = nn.Parameter((math.log(2.0) / half_lives).log().float())
        self.dt_bias = nn.Parameter(torch.full((heads,), math.log(math.e - 1.0)))
        self.norm = RMSNorm(config.memory_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, dim, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def writes(self, context: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys (unit length), values (B, T, H, K), write strengths and log-decays (B, T, H) of features (B, T, D)."""
        decay = self.a_proj(context)
        strength = decay if self.b_proj is None else self.b_proj(context)
        beta, g = gates(self.core, strength=strength, decay=decay, a_log=self.A_log, dt_bias=self.dt_bias)
        return F.normalize(self._heads(self.k_proj(context)), dim=-1), self._heads(self.v_proj(context)), beta, g

    def queries(self, x: Tensor) -> Tensor:
        """Unit queries (..., H, K) of normed slots (..., D)."""
        return F.normalize(self._heads(self.q_proj(x)), dim=-1)

    def output(self, found: Tensor, x: Tensor) -> Tensor:
        """Addition (..., D) to the residual from what was read (..., H, K), gated by the slots x (..., D)."""
        gate = F.silu(self.z_proj(x))
        out: Tensor = self.o_proj(self.norm(found).flatten(-2).to(gate.dtype) * gate)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.float().view(*x.shape[:-1], self.heads, self.head_dim)


class DrafterImpl(dflash.DrafterImpl):
    """Block drafter with windowed attention and a recurrent memory; its state does not grow."""

    Config: ClassVar[type[DrafterConfig]] = HyFlashConfig
    source: ClassVar[str] = "HyFlash (abstract); independent implementation, hyper-parameters ours"
    optional_tensors: ClassVar[tuple[str, ...]] = ("layers.*.memory.*",)
    config: HyFlashConfig

    @classmethod
    def import_config(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a DFlash checkpoint; full attention becomes our default window, as the memory sees the rest."""
        return {name: value for name, value in values.items() if name != "window" or value}

    def _new_memory(self) -> nn.Module | None:
        return None if self.config.memory_core == "none" else PrefixMemory(self.config)

    def _memories(self) -> list[PrefixMemory]:
        """The layers' memories; empty when the core is none."""
        return [layer.memory for layer in self._layers() if isinstance(layer.memory, PrefixMemory)]

    # --------------------------------------------------------------------------------------- training

    @property
    def frozen(self) -> bool:
        """Whether the backbone stays as it is and only a head on it learns."""
        return not self.fc.weight.requires_grad

    def train(self, mode: bool = True) -> Self:
        """As usual; a frozen backbone keeps its whole window and memory, as in serving."""
        super().train(mode)
        return super().train(False) if mode and self.frozen else self

    def _train_windows(self, batch: TrainBatch) -> list[Tensor | None]:
        """Shrink the window of some sequences to W/4..W at random, so that the memory is needed."""
        windows = super()._train_windows(batch)
        if not (self.training and self.config.random_window > 0 and self.config.window > 1):
            return windows
        size, device = batch.lengths.shape, batch.lengths.device
        least = max(1, self.config.window // 4)
        smaller = torch.randint(least, self.config.window + 1, size, device=device)
        chosen = torch.rand(size, device=device) < self.config.random_window
        return [None if w is None else torch.where(chosen, smaller, w) for w in windows]

    def _train_readers(self, context: Tensor, batch: TrainBatch, anchors: Tensor) -> list[Reader | None]:
        """Memory reads at the anchors, by chunked recurrence; off for a random share of sequences."""
        if self.config.memory_core == "none":
            return super()._train_readers(context, batch, anchors)
        keep: Tensor | None = None
        if self.training and self.config.memory_dropout > 0:
            draw = torch.rand(batch.lengths.shape, device=context.device)
            keep = (draw >= self.config.memory_dropout).float()[:, None, None, None]
        return [self._train_reader(memory, context, batch, anchors, keep) for memory in self._memories()]

    def _train_reader(
        self, memory: PrefixMemory, context: Tensor, batch: TrainBatch, anchors: Tensor, keep: Tensor | None
    ) -> Reader:
        k, v, beta, g = memory.writes(context)
        empty = empty_state(
            batch=len(context),
            heads=memory.heads,
            key_dim=memory.head_dim,
            value_dim=memory.head_dim,
            device=context.device,
        )

        def reader(x: Tensor) -> Tensor:
            found = read_at_anchors(
                memory.core,
                q=memory.queries(x),
                k=k,
                v=v,
                beta=beta,
                g=g,
                initial_state=empty,
                anchors=anchors,
                lengths=batch.lengths,
            )
            out = memory.output(found, x)
            return out if keep is None else out * keep

        return reader

    # ---------------------------------------------------------------------------------------- serving

    def _fixed(self, num_rows: int) -> dict[str, Tensor]:
        fixed = super()._fixed(num_rows)
        for i, memory in enumerate(self._memories()):
            fixed[f"memory.{i}"] = empty_state(
                batch=num_rows,
                heads=memory.heads,
                key_dim=memory.head_dim,
                value_dim=memory.head_dim,
                device=self.fc.weight.device,
            )
        return fixed

    def _memory_parts(self, layer: int) -> MemoryParts | None:
        if self.config.memory_core == "none":
            return None
        memory = self._memories()[layer]
        return MemoryParts(
            core=memory.core.name,
            queries=memory.q_proj,
            gates=memory.z_proj,
            keys=memory.k_proj,
            values=memory.v_proj,
            decay=memory.a_proj,
            strength=memory.b_proj,
            a_log=memory.A_log,
            dt_bias=memory.dt_bias,
            norm=memory.norm,
            out=memory.o_proj,
        )

    def pack(self, kernels: Kernels) -> PackedDrafter | None:
        """As DFlash; the memory's width must be a multiple of 16 as well."""
        fits = self.config.memory_core == "none" or self.config.memory_dim % HEAD_STEP == 0
        return super().pack(kernels) if fits else None

    def _write_memory(self, state: BlockState, rows: list[int], lengths: list[int], context: Tensor) -> None:
        valid = torch.tensor(lengths, device=context.device)
        for i, memory in enumerate(self._memories()):
            k, v, beta, g = memory.writes(context)
            held = state.fixed[f"memory.{i}"]
            held[rows] = write(memory.core, k=k, v=v, beta=beta, g=g, state=held[rows], lengths=valid)

    def _serve_reader(self, layer: int, state: BlockState, rows: list[int]) -> Reader | None:
        if self.config.memory_core == "none":
            return None
        memory, held = self._memories()[layer], state.fixed[f"memory.{layer}"][rows]

        def reader(x: Tensor) -> Tensor:
            return memory.output(read(memory.queries(x)[:, 0], held)[:, None], x)

        return reader

    def _memory_flops(self) -> tuple[int, int]:
        propose = commit = 0
        for memory in self._memories():
            width, square = memory.heads * memory.head_dim, memory.heads * memory.head_dim**2
            dim = self.config.hidden_size
            propose += 2 * self.config.num_slots * (3 * dim * width + square)
            commit += 2 * dim * (2 * width + 2 * memory.heads) + 6 * square
        return propose, commit
