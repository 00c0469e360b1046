"""Options of the block drafters, and how what they leave open is filled in from the target.

In: options with zeros and None where the target decides. Out: options with every value explicit.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field

from hyflash.core import TargetHooks
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.errors import UserError


class DFlashConfig(FeatureConfig):
    """Options of `dflash`."""

    num_layers: int = Field(default=2, ge=1, description="draft layers")
    num_draft_tokens: int = Field(
        default=5, ge=1, le=64, description="draft tokens per block (slots without the anchor)"
    )
    window: int = Field(
        default=0, ge=0, description="committed tokens a block attends to, the same for each slot; 0 all"
    )
    sample_from_anchor: bool = Field(
        default=False, description="the anchor's slot drafts the first token: one slot fewer for as many drafts"
    )
    causal_block: bool = Field(default=False, description="slots see no later slot (not in full_layers)")
    full_layers: tuple[int, ...] = Field(default=(), description="layers that ignore the window and causal_block")
    mask_token_id: int | None = Field(default=None, ge=0, description="token of the empty slots; default: unused one")
    final_norm: bool | None = Field(default=None, description="norm before the head; default: on without a start")
    correction: Literal["none", "markov", "gru"] = Field(default="none", description="in-block dependence")
    correction_width: int = Field(default=256, ge=1, description="state width of the gru correction")
    correction_rank: int = Field(default=384, ge=1, description="rank of the correction's output")
    start: Literal["none", "ridge"] = Field(default="none", description="closed-form slot inputs")
    start_taps: tuple[int, ...] | None = Field(
        default=None, description="layers the start reads; default: third and last ordinary tap and the final one"
    )
    start_rank: int = Field(default=0, ge=0, description="rank of the start; 0 full")
    start_lambda: float = Field(default=1e-2, gt=0, description="ridge penalty relative to the mean of diag(X'X)")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_layers=1, num_draft_tokens=3, num_taps=2)

    @property
    def first_slot(self) -> int:
        """The slot that drafts the token after the anchor; slot 0 is the anchor's."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_slots(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.num_draft_tokens + self.first_slot

    def _filled(self, hooks: TargetHooks) -> dict[str, Any]:
        filled = super()._filled(hooks)
        return {
            **filled,
            "start_taps": self._start_taps(filled["target_layer_ids"], hooks.info.num_layers),
            "final_norm": self.start == "none" if self.final_norm is None else self.final_norm,
            "mask_token_id": unused_token(hooks) if self.mask_token_id is None else self.mask_token_id,
        }

    def _needs_final_tap(self) -> bool:
        return self.start != "none" or super()._needs_final_tap()

    def _final_tap_is_for(self) -> str:
        return f"start={self.start} and loss={self.loss} need"

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
        super()._check(hooks)
        info = hooks.info
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
        if self.start == "ridge" and self.final_norm:
            raise UserError("final_norm must be off with start=ridge: the start already predicts the head's input.")
        most = self.hidden_size * min(len(self.start_taps or ()) + 1, self.num_draft_tokens)
        if self.start_rank > most:
            raise UserError(
                f"start_rank is {self.start_rank}; expected at most {most}, where the start has full rank, or 0."
            )


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
