"""What drafters that read the target's features share: features made fit, a draft vocabulary, the end of a proposal.

In: features of committed tokens, hidden states before the target's head. Out: what a network can read, a head of all
tokens or of a few, drafts with their confidence. What was made from the weights is dropped whenever they may change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from hyflash.core import Commit, DraftOutput, DraftRequest, Proposal, TargetHooks, TrainBatch
from hyflash.drafters.base import Drafter, pick_tokens, to_proposal
from hyflash.drafters.context import BlockState
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.drafters.objective import Reduced, at_positions
from hyflash.drafters.picking import Picker
from hyflash.drafters.vocab import WORDS, HeadRows, ReducedHead, ServingHead, full_head, use_words
from hyflash.errors import HyflashError, UserError

FEATURE_LIMIT = 65504.0


class FeatureDrafter(Drafter):
    """A drafter with resolved `FeatureConfig` options; `fc` fuses the taps."""

    config: FeatureConfig
    fc: nn.Linear
    draft_ids: Tensor | None

    def __init__(self, config: FeatureConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        self.target_layer_ids = config.taps
        self.max_draft_tokens = config.num_draft_tokens
        # The first ids are the most frequent merges of a BPE vocabulary: a fair list until a counted one is set.
        static = torch.arange(config.draft_vocab_size) if config.draft_vocab_size > 0 else None
        self.register_buffer("draft_ids", static)
        self._rows = HeadRows(hooks) if config.draft_vocab_size > 0 else None
        self._head: ReducedHead | None = None
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------- what is made from weights

    def forget(self) -> None:
        """Drop what was made from the weights, because they change: here the rows of the reduced head."""
        self._head = None

    def train(self, mode: bool = True) -> Self:
        """As usual."""
        if mode:
            self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    # ----------------------------------------------------------------------------------------------- inputs

    def _clean(self, features: Tensor | None) -> Tensor:
        """Features (B, T, C, D), clamped and in the weights' dtype."""
        if features is None or features.shape[2] != len(self.target_layer_ids):
            found = "none" if features is None else f"{features.shape[2]} taps"
            raise HyflashError(f"drafter needs features of layers {self.target_layer_ids}; found {found}.")
        return features.float().clamp(-FEATURE_LIMIT, FEATURE_LIMIT).to(self.fc.weight.dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.hooks.embed(tokens).detach().to(self.fc.weight.dtype)

    def _anchors(self, request: DraftRequest) -> Tensor:
        """Anchors (B,) of a request, where the weights are."""
        return torch.tensor(request.anchors, device=self.fc.weight.device)

    def _target_hidden(self, batch: TrainBatch) -> Tensor:
        """Final-normed hidden (B, A, L, D) of the target, whose head predicts each draft position."""
        final = self._clean(batch.features)[:, :, self.target_layer_ids.index(self.hooks.info.num_layers)]
        ahead = batch.anchors[..., None] + torch.arange(self.config.num_draft_tokens, device=batch.anchors.device)
        return at_positions(final, ahead.clamp(0, batch.tokens.shape[1] - 1))

    # ------------------------------------------------------------------------------------------- vocabulary

    def set_draft_vocab(self, ids: Tensor) -> None:
        """Set the static draft vocabulary: (draft_vocab_size,) distinct token ids. Raises UserError."""
        if self.draft_ids is None:
            raise UserError("this drafter uses the full vocabulary; build it with draft_vocab_size above 0.")
        size, vocab = len(self.draft_ids), self.hooks.info.vocab_size
        if ids.shape != (size,) or len(torch.unique(ids)) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise UserError(f"draft vocabulary must be {size} distinct token ids below {vocab}; found {len(ids)} ids.")
        self.draft_ids.copy_(ids)
        self.forget()

    def logits(self, out: DraftOutput) -> Tensor:
        """Logits (B, A, L, V) of a training forward, in the head's dtype."""
        return full_head(self.hooks, out.hidden)

    def _reduced(self) -> Reduced | None:
        """The static draft vocabulary and where its rows come from; None without one."""
        return None if self.draft_ids is None or self._rows is None else (self._rows, self.draft_ids)

    def _logit_table(self) -> Tensor | None:
        """Rows (V, R) of a low-rank addition to the logits; None where there is none."""
        return None

    def _reduced_head(self) -> ReducedHead:
        if self.draft_ids is None or self._rows is None:
            raise HyflashError("this drafter uses the full vocabulary.")
        if self._head is None:
            self._head = ReducedHead(self._rows, self.draft_ids, self._logit_table())
        return self._head

    @property
    def _head_size(self) -> int:
        """Most tokens that a context's logits are of."""
        vocab, cfg = self.hooks.info.vocab_size, self.config
        return min(vocab, cfg.draft_vocab_size + cfg.context_vocab_size) if cfg.draft_vocab_size else vocab

    def _serving_head(self, state: BlockState, request: DraftRequest) -> ServingHead:
        if self.draft_ids is None:
            table = self._logit_table()
            tables = () if table is None else (table,)
            return ServingHead(hooks=self.hooks, ids=None, parts=(), allowed=None, tables=tables)
        words = state.fixed[WORDS]
        return self._reduced_head().serving([words[row] for row in request.rows], request.anchors)

    def _words(self, num_rows: int) -> dict[str, Tensor]:
        """The state's entry for the words of the context, (num_rows, N), where the vocabulary is reduced."""
        if self.draft_ids is None:
            return {}
        most = min(self.config.context_vocab_size, self.hooks.info.vocab_size - len(self.draft_ids))
        return {WORDS: torch.zeros(num_rows, most, dtype=torch.int32)}

    def _count(self, state: BlockState, new: Commit) -> None:
        """Add committed tokens to the rows' lengths, and to their words."""
        for row, tokens in zip(new.rows, new.tokens, strict=True):
            state.lengths[row] += len(tokens)
            if WORDS in state.fixed:
                use_words(state.fixed[WORDS][row], tokens, self._reduced_head().outside)

    # --------------------------------------------------------------------------------------------- proposal

    def _room(self, state: BlockState, row: int, asked: int) -> int:
        """Tokens that may be drafted for a row: no more than asked, than a round has, than positions are left."""
        most = min(asked, self.max_draft_tokens)
        return most if self.max_positions is None else max(0, min(most, self.max_positions - 1 - state.lengths[row]))

    def _wanted(self, state: BlockState, request: DraftRequest) -> tuple[int, ...]:
        """Tokens to draft for each row of a request."""
        return tuple(self._room(state, row, n) for row, n in zip(request.rows, request.num_tokens, strict=True))

    def _proposal(
        self, head: ServingHead, picker: Picker, logits: Tensor, stated: Tensor | None, wanted: tuple[int, ...]
    ) -> Proposal:
        """Tokens of logits (B, L, M), cut as `pick_tokens` does, with the confidence (B, L) stated where one is."""
        greedy, lengths, probs, cut = pick_tokens(logits, wanted)
        tokens = head.token_ids(picker.columns(greedy))
        proposal = to_proposal(tokens, lengths, probs if stated is None else stated, cut)
        vocab = self.hooks.info.vocab_size
        return picker.finish(proposal, head.all_ids(logits), vocab, stated=stated is not None)


def _forget(drafter: FeatureDrafter, _keys: Any) -> None:
    drafter.forget()
