"""Options of drafters that read the target's features, and how what they leave open is filled in from the target.

In: options with zeros and None where the target decides. Out: options with every value explicit.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from hyflash.core import TargetHooks
from hyflash.drafters.base import DrafterConfig
from hyflash.errors import UserError
from hyflash.ops.losses import LossKind


def tap_rule(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spread decoder layers from 1 to N - 3, z-lab's rule (Python's rounding); clamped for tiny targets."""
    if num_taps == 1:
        return (num_layers // 2,)
    spread = (round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    return tuple(sorted({min(max(tap, 0), num_layers - 1) for tap in spread}))


class FeatureConfig(DrafterConfig):
    """Options that all drafters with features have."""

    num_draft_tokens: int = Field(default=5, ge=1, le=64, description="draft tokens of a round")
    window: int = Field(default=0, ge=0, description="committed tokens a draft attends to; 0 all")
    window_counts_slots: bool = Field(
        default=False, description="imported checkpoints: slot k sees anchor + k - window < t < anchor instead"
    )
    hidden_size: int = Field(default=0, ge=0, description="width; the target's (0), which owns embedding and head")
    intermediate_size: int = Field(default=0, ge=0, description="MLP width; 0 as the target")
    num_heads: int = Field(default=0, ge=0, description="query heads; 0 as the target")
    num_kv_heads: int = Field(default=0, ge=0, description="key and value heads; 0 as the target")
    head_dim: int = Field(default=0, ge=0, description="head width; 0 as the target")
    attention_bias: bool = Field(default=False, description="bias on the attention projections")
    target_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="layers whose outputs are read, N = after the final norm; default: spread evenly",
    )
    num_taps: int = Field(default=5, ge=1, description="how many layers the default target_layer_ids spreads over")
    tap_norm: bool = Field(default=True, description="norm each tapped layer on its own before they are fused")
    rope_theta: float = Field(default=0.0, ge=0, description="rotary base; 0 as the target")
    rms_norm_eps: float = Field(default=0.0, ge=0, description="epsilon of the norms; 0 as the target")
    max_positions: int = Field(default=0, ge=0, description="longest context without window; 0 as the target")
    draft_vocab_size: int = Field(default=0, ge=0, description="draft vocabulary, widened by context; 0 all tokens")
    context_vocab_size: int = Field(
        default=256, ge=1, description="other tokens that may be drafted: so many different ones, the context's last"
    )
    loss: LossKind = Field(default="ce", description="ce, ce_tv (0.1 ce + 0.9 total variation to the target) or kl")
    gamma: float = Field(default=4.0, ge=0, description="decay of the loss weights exp(-(k-1)/gamma); 0 none")
    dpace: bool = Field(default=False, description="weigh positions by worth (D-PACE), not by gamma")

    @property
    def taps(self) -> tuple[int, ...]:
        """Resolved target_layer_ids."""
        return self.target_layer_ids or ()

    @property
    def num_slots(self) -> int:
        """Positions that a round computes, from the anchor's on."""
        return self.num_draft_tokens

    @property
    def needs_final_tap_for_loss(self) -> bool:
        """The loss compares with the target's distribution."""
        return self.loss != "ce"

    def resolved(self, hooks: TargetHooks) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        info = hooks.info
        if self.hidden_size not in (0, info.hidden_size):
            raise UserError(
                f"hidden_size is {self.hidden_size}; expected {info.hidden_size}, the width of target {info.name!r}, "
                "whose embedding and head the drafter shares."
            )
        filled = self.model_copy(update=self._filled(hooks))
        filled._check(hooks)
        return filled

    def _filled(self, hooks: TargetHooks) -> dict[str, Any]:
        """What the target decides, by name."""
        info = hooks.info
        return {
            "hidden_size": info.hidden_size,
            "intermediate_size": self.intermediate_size or info.intermediate_size,
            "num_heads": self.num_heads or info.num_heads,
            "num_kv_heads": self.num_kv_heads or info.num_kv_heads,
            "head_dim": self.head_dim or info.head_dim,
            "rope_theta": self.rope_theta or info.rope_theta,
            "rms_norm_eps": self.rms_norm_eps or info.rms_norm_eps,
            "max_positions": self.max_positions or info.max_context,
            "target_layer_ids": self._taps(info.num_layers),
        }

    def _needs_final_tap(self) -> bool:
        return self.needs_final_tap_for_loss

    def _final_tap_is_for(self) -> str:
        return f"loss={self.loss} needs"

    def _taps(self, num_layers: int) -> tuple[int, ...]:
        needs_final = self._needs_final_tap()
        if self.target_layer_ids is None:
            ordinary = tap_rule(num_layers, self.num_taps)
            return (*ordinary, num_layers) if needs_final else ordinary
        taps = self.target_layer_ids
        if not taps or len(set(taps)) != len(taps) or any(not 0 <= tap <= num_layers for tap in taps):
            raise UserError(f"target_layer_ids is {list(taps)}; expected distinct layers from 0 to {num_layers}.")
        if needs_final and num_layers not in taps:
            raise UserError(
                f"target_layer_ids is {list(taps)}; {self._final_tap_is_for()} {num_layers} "
                "(the state after the final norm) among them."
            )
        return taps

    def _check(self, hooks: TargetHooks) -> None:
        info = hooks.info
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads is {self.num_heads}; expected a multiple of num_kv_heads {self.num_kv_heads}.")
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; expected an even number (rotary embedding).")
        if self.draft_vocab_size > info.vocab_size:
            raise UserError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {info.vocab_size} tokens.")
        if self.window_counts_slots and 0 < self.window <= self.num_draft_tokens:
            raise UserError(f"window is {self.window}; with window_counts_slots expected more than num_draft_tokens.")
        if self.window_counts_slots and not self.window:
            raise UserError("window_counts_slots needs a window.")
