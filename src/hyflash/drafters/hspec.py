"""H-Spec: Mamba-2 and attention in one block drafter, without a cache: attention reads the target's keys and values.

In: the taps of the last verified token, and the target's keys and values at a few layers. Out: draft tokens. Layers are
residual sublayers by a pattern. An attention's context is what the target itself keeps at its layer, the last `window`
tokens; a Mamba-2 mixer scans the slots of the block from a state that is a linear map of the last verified token's
fused taps, one map for all mixers. So nothing is carried from round to round but those taps.

After H-Spec; weights start at random here, not from the target's layers, and sizes follow the target (ours).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from hyflash.core import DraftCost, TargetHooks
from hyflash.drafters.base import DrafterConfig
from hyflash.drafters.mamba import MambaMixer
from hyflash.drafters.shared_kv import SharedKVConfig, SharedKVDrafter
from hyflash.errors import UserError
from hyflash.layers import MLP, BlockAttention, LayerContext, RMSNorm, init_linear

KINDS = ("mamba", "attention", "mlp")


class HSpecConfig(SharedKVConfig):
    """Options of `hspec`."""

    pattern: str = Field(
        default="mamba mlp | attention mlp", description="sublayers mamba, attention and mlp, layers apart by |"
    )
    num_layers: int = Field(default=0, ge=0, description="draft layers; 0 as many as the pattern has")
    causal_block: bool = Field(default=True, description="slots see no later slot of the block")
    use_target_kv: bool = Field(default=True, description="attention reads the target's keys and values")
    use_seed: bool = Field(default=True, description="mixers start from the last verified token's taps, not from zero")
    mamba_heads: int = Field(default=0, ge=0, description="heads of a mixer; 0 as many as fill the width")
    mamba_head_dim: int = Field(default=0, ge=0, description="width of a mixer's head; 0 as the target's heads")
    mamba_state: int = Field(default=4, ge=1, description="state width of a mixer's head")
    mamba_groups: int = Field(
        default=1, ge=1, description="groups of a mixer's heads with the same input and output maps"
    )
    mamba_conv: int = Field(default=4, ge=1, description="slots that a mixer's convolution sees")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_draft_tokens=3, num_taps=2, window=8, pattern="mamba attention mlp | mamba")

    @property
    def sublayers(self) -> tuple[tuple[str, ...], ...]:
        """The pattern, layer by layer. Raises UserError for a word that is no sublayer."""
        layers = tuple(tuple(part.split()) for part in self.pattern.split("|"))
        if any(not layer or not set(layer) <= set(KINDS) for layer in layers):
            raise UserError(f"pattern is {self.pattern!r}; expected layers of {', '.join(KINDS)}, apart by |.")
        return layers

    @property
    def num_attentions(self) -> int:
        """Attention sublayers."""
        return sum(layer.count("attention") for layer in self.sublayers)

    @property
    def reads_kv(self) -> bool:
        """Whether they see more than the block."""
        return self.use_target_kv

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        found = {kind for layer in self.sublayers for kind in layer}
        for switch, kind in (("use_target_kv", "attention"), ("use_seed", "mamba")):
            if getattr(self, switch) and kind not in found:
                raise UserError(f"{switch} needs a sublayer {kind} in the pattern {self.pattern!r}; switch it off.")
        if self.num_layers not in (0, len(self.sublayers)):
            raise UserError(f"num_layers is {self.num_layers}; the pattern {self.pattern!r} has {len(self.sublayers)}.")
        if not self.use_target_kv and self.target_kv_layers:
            raise UserError("target_kv_layers names layers to read, and use_target_kv is off; leave one out.")
        base = super().resolved(hooks)
        width = self.mamba_head_dim or base.head_dim
        heads = self.mamba_heads or max(1, base.hidden_size // width)
        if heads % self.mamba_groups:
            raise UserError(f"mamba_groups is {self.mamba_groups}; expected a divisor of the {heads} heads of a mixer.")
        sizes = {"num_layers": len(self.sublayers), "mamba_head_dim": width, "mamba_heads": heads}
        return base.model_copy(update=sizes)


class HSpecLayer(nn.Module):
    """Residual pre-norm sublayers, one after the other."""

    def __init__(self, kinds: tuple[str, ...], config: HSpecConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.norms = nn.ModuleList(RMSNorm(dim, eps) for _ in kinds)
        self.parts = nn.ModuleList(_new_part(kind, config) for kind in kinds)

    def forward(self, x: Tensor, contexts: Iterator[LayerContext], seed: Tensor | None) -> Tensor:
        """Slots (B, A, S, D) -> the same; each attention takes the next context, each mixer starts from the seed."""
        for norm, part in zip(self.norms, self.parts, strict=True):
            normed = norm(x)
            if isinstance(part, BlockAttention):
                x = x + part(normed, next(contexts), 0)
            else:
                x = x + (part(normed, seed) if isinstance(part, MambaMixer) else part(normed))
        return x

    def silence(self) -> None:
        """Zero the output projections, so that the layer passes its input through."""
        for part in self.parts:
            last = (
                part.o_proj if isinstance(part, BlockAttention) else getattr(part, "down_proj", None) or part.out_proj
            )
            nn.init.zeros_(last.weight)  # type: ignore[arg-type,union-attr]


def _new_part(kind: str, config: HSpecConfig) -> nn.Module:
    dim, eps = config.hidden_size, config.rms_norm_eps
    if kind == "mlp":
        return MLP(dim, config.intermediate_size)
    if kind == "attention":
        return BlockAttention(
            dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=eps,
            bias=config.attention_bias,
        )
    return MambaMixer(
        dim,
        num_heads=config.mamba_heads,
        head_dim=config.mamba_head_dim,
        state_dim=config.mamba_state,
        groups=config.mamba_groups,
        kernel=config.mamba_conv,
        eps=eps,
    )


class DrafterImpl(SharedKVDrafter):
    """Block drafter of Mamba-2 and attention sublayers over the target's keys and values; no cache of its own."""

    Config: ClassVar[type[DrafterConfig]] = HSpecConfig
    source: ClassVar[str] = "H-Spec"
    config: HSpecConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        cfg = self.config
        self.seed: nn.Linear | None = None
        if cfg.use_seed:
            size = cfg.mamba_heads * cfg.mamba_head_dim * cfg.mamba_state
            self.seed = init_linear(nn.Linear(cfg.hidden_size, size, bias=False))

    def _new_layers(self) -> list[nn.Module]:
        layers = [HSpecLayer(kinds, self.config) for kinds in self.config.sublayers]
        if self.config.start == "ridge":
            for layer in layers:
                layer.silence()
        return list(layers)

    def _seed(self, last: Tensor) -> Tensor | None:
        """States (B, A, H, P, N) that the mixers start from, of the last token's taps (B, A, C, D)."""
        if self.seed is None:
            return None
        cfg = self.config
        states: Tensor = self.seed(self.context_features(last)).unflatten(
            -1, (cfg.mamba_heads, cfg.mamba_head_dim, cfg.mamba_state)
        )
        return states

    def cost(self, context_tokens: int) -> DraftCost:
        """As for every drafter over the target's keys and values, and the seed of a block."""
        base = super().cost(context_tokens)
        seed = 0 if self.seed is None else 2 * self.seed.weight.numel()
        return replace(base, propose_flops=base.propose_flops + seed)

    def blocks(self, x: Tensor, contexts: list[LayerContext], last: Tensor) -> Tensor:
        """Hidden states (B, A, L, D) of slot inputs x (B, A, S, D)."""
        seed, given = self._seed(last), iter(contexts)
        for layer in self.layers:
            x = layer(x, given, seed)
        x = x[:, :, self.config.first_slot :]
        return x if self.norm is None else self.norm(x)
