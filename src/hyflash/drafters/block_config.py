"""Options of the block drafters, and how what they leave open is filled in from the target.

In: options with zeros and None where the target decides. Out: options with every value explicit.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
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


class DFlashConfig(DrafterConfig):
    """Options of `dflash`."""

    num_layers: int = Field(default=2, ge=1, description="draft layers")
    num_draft_tokens: int = Field(
        default=5, ge=1, le=64, description="draft tokens per block (slots without the anchor)"
    )
    window: int = Field(
        default=0, ge=0, description="committed tokens a block attends to, the same for each slot; 0 all"
    )
    window_counts_slots: bool = Field(
        default=False, description="imported checkpoints: slot k sees anchor + k - window < t < anchor instead"
    )
    sample_from_anchor: bool = Field(
        default=False, description="the anchor's slot drafts the first token: one slot fewer for as many drafts"
    )
    causal_block: bool = Field(default=False, description="slots see no later slot (not in full_layers)")
    full_layers: tuple[int, ...] = Field(default=(), description="layers that ignore the window and causal_block")
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
    mask_token_id: int | None = Field(default=None, ge=0, description="token of the empty slots; default: unused one")
    final_norm: bool | None = Field(default=None, description="norm before the head; default: on without a start")
    rope_theta: float = Field(default=0.0, ge=0, description="rotary base; 0 as the target")
    rms_norm_eps: float = Field(default=0.0, ge=0, description="epsilon of the norms; 0 as the target")
    max_positions: int = Field(default=0, ge=0, description="longest context without window; 0 as the target")
    draft_vocab_size: int = Field(default=0, ge=0, description="draft vocabulary, widened by context; 0 all tokens")
    correction: Literal["none", "markov", "gru"] = Field(default="none", description="in-block dependence")
    correction_width: int = Field(default=256, ge=1, description="state width of the gru correction")
    correction_rank: int = Field(default=384, ge=1, description="rank of the correction's output")
    start: Literal["none", "ridge"] = Field(default="none", description="closed-form slot inputs")
    start_taps: tuple[int, ...] | None = Field(
        default=None, description="layers the start reads; default: third and last ordinary tap and the final one"
    )
    start_rank: int = Field(default=0, ge=0, description="rank of the start; 0 full")
    start_lambda: float = Field(default=1e-2, gt=0, description="ridge penalty relative to the mean of diag(X'X)")
    loss: LossKind = Field(default="ce", description="ce, ce_tv (0.1 ce + 0.9 total variation to the target) or kl")
    gamma: float = Field(default=4.0, ge=0, description="decay of the loss weights exp(-(k-1)/gamma); 0 none")
    dpace: bool = Field(default=False, description="weigh positions by worth (D-PACE), not by gamma")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2)

    @property
    def taps(self) -> tuple[int, ...]:
        """Resolved target_layer_ids."""
        return self.target_layer_ids or ()

    @property
    def first_slot(self) -> int:
        """The slot that drafts the token after the anchor; slot 0 is the anchor's."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_slots(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.num_draft_tokens + self.first_slot

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
        taps = self._taps(info.num_layers)
        filled = self.model_copy(
            update={
                "hidden_size": info.hidden_size,
                "intermediate_size": self.intermediate_size or info.intermediate_size,
                "num_heads": self.num_heads or info.num_heads,
                "num_kv_heads": self.num_kv_heads or info.num_kv_heads,
                "head_dim": self.head_dim or info.head_dim,
                "rope_theta": self.rope_theta or info.rope_theta,
                "rms_norm_eps": self.rms_norm_eps or info.rms_norm_eps,
                "max_positions": self.max_positions or info.max_context,
                "target_layer_ids": taps,
                "start_taps": self._start_taps(taps, info.num_layers),
                "final_norm": self.start == "none" if self.final_norm is None else self.final_norm,
                "mask_token_id": unused_token(hooks) if self.mask_token_id is None else self.mask_token_id,
            }
        )
        filled._check(hooks)
        return filled

    def _taps(self, num_layers: int) -> tuple[int, ...]:
        needs_final = self.start != "none" or self.needs_final_tap_for_loss
        if self.target_layer_ids is None:
            ordinary = tap_rule(num_layers, self.num_taps)
            return (*ordinary, num_layers) if needs_final else ordinary
        taps = self.target_layer_ids
        if not taps or len(set(taps)) != len(taps) or any(not 0 <= tap <= num_layers for tap in taps):
            raise UserError(f"target_layer_ids is {list(taps)}; expected distinct layers from 0 to {num_layers}.")
        if needs_final and num_layers not in taps:
            raise UserError(
                f"target_layer_ids is {list(taps)}; start={self.start} and loss={self.loss} need {num_layers} "
                "(the state after the final norm) among them."
            )
        return taps

    def _start_taps(self, taps: tuple[int, ...], num_layers: int) -> tuple[int, ...] | None:
        if self.start == "none":
            if self.start_taps is not None or self.start_rank > 0:
                raise UserError("start_taps and start_rank need start=ridge; set it or leave them out.")
            return None
        if self.start_taps is None:
            ordinary = [tap for tap in taps if tap != num_layers]
            chosen = {*ordinary[2:3], *ordinary[-1:], num_layers}
            return tuple(tap for tap in taps if tap in chosen)
        if not self.start_taps or not set(self.start_taps) <= set(taps):
            raise UserError(f"start_taps is {list(self.start_taps)}; expected some of target_layer_ids {list(taps)}.")
        return self.start_taps

    def _check(self, hooks: TargetHooks) -> None:
        info = hooks.info
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads is {self.num_heads}; expected a multiple of num_kv_heads {self.num_kv_heads}.")
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; expected an even number (rotary embedding).")
        if self.draft_vocab_size > info.vocab_size:
            raise UserError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {info.vocab_size} tokens.")
        mask = self.mask_token_id
        if mask is None or mask >= info.vocab_size or mask in info.eos_token_ids:
            raise UserError(
                f"mask_token_id is {mask}; expected a reserved token below {info.vocab_size} that does not end texts "
                f"(end tokens: {list(info.eos_token_ids)})."
            )
        if any(not 0 <= i < self.num_layers for i in self.full_layers):
            raise UserError(f"full_layers is {list(self.full_layers)}; expected layers below {self.num_layers}.")
        if self.full_layers and not self.window:
            raise UserError("full_layers needs a window; without one every layer is full.")
        if self.window_counts_slots and 0 < self.window <= self.num_draft_tokens:
            raise UserError(f"window is {self.window}; with window_counts_slots expected more than num_draft_tokens.")
        if self.window_counts_slots and not self.window:
            raise UserError("window_counts_slots needs a window.")
        if self.start == "ridge" and self.final_norm:
            raise UserError("final_norm must be off with start=ridge: the start already predicts the head's input.")


def unused_token(hooks: TargetHooks) -> int:
    """The highest token id that ends no text and has an embedding of its own.

    Reserved and padding entries sit at the end of most vocabularies; where none does, the last merge is the rarest.
    A zero row would make every slot blind, so it is passed over.
    """
    info = hooks.info
    for token in reversed(range(info.vocab_size)):
        if token not in info.eos_token_ids and bool(hooks.embed(torch.tensor([token], device=info.device)).any()):
            return token
    raise UserError(f"target {info.name!r} has no token to use as mask; set mask_token_id.")
