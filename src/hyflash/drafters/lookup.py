"""Prompt lookup: copies what followed the last n tokens the last time they occurred. No weights, no features.

In: committed tokens. Out: the continuation after the most recent earlier occurrence of the longest matching suffix
(the anchor is its last token; matches of `max_ngram` tokens are tried first, of `min_ngram` last). The copy extends
itself: with the match d tokens before the end, draft i is the token d places before it, where drafts already made
count as text. So a text that has begun to repeat with period d is drafted to any length.

The idea is prompt lookup decoding (Saxena 2023). Here an index from every committed n-gram to its last position makes
a proposal cost `max_ngram` look-ups at any context, and each row learns how often matches of each length are right.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Proposal, TargetHooks
from hyflash.drafters.base import Drafter, DrafterConfig, State

NAME = "lookup"
TOKEN_BYTES = 8
ENTRY_BYTES = 128
"""An index entry in CPython: key and position objects and a share of a hash table; up to 112 measured, rounded up."""
PRIOR_RATES = (0.25, 0.55, 0.75)
"""Acceptance rate before evidence by match length 1, 2, 3 or more: below, at and above what a small drafter reaches."""
PRIOR_TRIALS = 4.0
FORGET = 0.9
"""Weight of the evidence so far when a round brings new: the last ten rounds count most."""


class LookupConfig(DrafterConfig):
    """Options of prompt lookup."""

    max_ngram: int = Field(3, ge=1, le=16, description="Longest suffix looked for.")
    min_ngram: int = Field(1, ge=1, le=16, description="Shortest suffix that may propose.")
    max_draft_tokens: int = Field(10, ge=1, le=1024, description="Most draft tokens in a round.")

    @model_validator(mode="after")
    def _ordered(self) -> LookupConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")
        return self


class _Row:
    """Tokens of one sequence, where each of their n-grams last ended, and how matches of each length fared."""

    def __init__(self, config: LookupConfig) -> None:
        self._least, self._most = config.min_ngram, config.max_ngram
        self.tokens = array("q")
        self._indexes: list[dict[int, int]] = [{} for _ in range(self._least, self._most + 1)]  # n-gram -> its end
        self.accepted = [0.0] * config.max_ngram  # by match length - 1
        self.tried = [0.0] * config.max_ngram

    def append(self, tokens: Sequence[int]) -> None:
        """Take in tokens; the n-grams that end in them become the most recent of their kind."""
        for token in tokens:
            packed = self._suffixes(token)
            self.tokens.append(token)
            end = len(self.tokens)
            for index, key in zip(self._indexes, packed, strict=False):
                index[key] = end

    def match(self, anchor: int) -> tuple[int, int]:
        """Length of the longest suffix, anchor included, that occurred before, and where that ended; (0, 0) if none."""
        packed = self._suffixes(anchor)
        for i in range(len(packed) - 1, -1, -1):
            end = self._indexes[i].get(packed[i])
            if end is not None:
                return self._least + i, end
        return 0, 0

    def _suffixes(self, token: int) -> list[int]:
        """N-grams of the indexed sizes that end in a token after the text, the shortest first, as far as there is text.

        One integer for a few token ids below 2**32 is smaller than a tuple, and never equal for two of one size.
        """
        packed, key, shift = [], token, 32
        if self._least == 1:
            packed.append(key)
        for n in range(2, min(self._most, len(self.tokens) + 1) + 1):
            key |= self.tokens[1 - n] << shift
            shift += 32
            if n >= self._least:
                packed.append(key)
        return packed

    def copy_after(self, end: int, *, anchor: int, count: int) -> list[int]:
        """The `count` tokens that follow position `end` in the committed tokens and the anchor, repeated forever."""
        period = self.tokens[end : end + count]
        period.append(anchor)  # only reached where the tokens run out before `count`
        return [period[i % len(period)] for i in range(count)]

    def learn(self, length: int, *, num_accepted: int, num_drafted: int) -> None:
        """Count a round whose drafts came from a match of this length; draft i rests on a match i tokens longer."""
        self.accepted = [x * FORGET for x in self.accepted]
        self.tried = [x * FORGET for x in self.tried]
        for i in range(min(num_accepted + 1, num_drafted)):
            bucket = min(length + i, len(self.tried)) - 1
            self.tried[bucket] += 1.0
            self.accepted[bucket] += float(i < num_accepted)

    def rate(self, length: int) -> float:
        """Estimated acceptance rate of the token after a match of this length."""
        bucket = min(length, len(self.tried)) - 1
        prior = PRIOR_RATES[min(bucket, len(PRIOR_RATES) - 1)]
        return (PRIOR_TRIALS * prior + self.accepted[bucket]) / (PRIOR_TRIALS + self.tried[bucket])


class LookupState(State):
    """Rows of committed tokens, each with its index."""

    def __init__(self, num_rows: int, config: LookupConfig) -> None:
        self.config = config
        self.rows = [_Row(config) for _ in range(num_rows)]

    def reset(self, row: int) -> None:
        """Empty one row."""
        self.rows[row] = _Row(self.config)

    def nbytes(self, row: int) -> int:
        """Bytes of the row, each token charged with an entry for every n-gram size, whether or not that was new."""
        return _fixed_bytes(self.config) + len(self.rows[row].tokens) * _bytes_per_token(self.config)

    def snapshot(self, row: int) -> dict[str, Any]:
        """Tokens and evidence; the index follows from the tokens."""
        kept = self.rows[row]
        return {"tokens": kept.tokens.tolist(), "accepted": list(kept.accepted), "tried": list(kept.tried)}

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        """Put a snapshot back and index its tokens anew."""
        self.reset(row)
        self.rows[row].append(saved["tokens"])
        self.rows[row].accepted, self.rows[row].tried = list(saved["accepted"]), list(saved["tried"])


class DrafterImpl(Drafter):
    """Proposes copies from the text so far."""

    Config = LookupConfig
    trainable: ClassVar[bool] = False
    cheap: ClassVar[bool] = True
    source: ClassVar[str] = "prompt lookup decoding (Saxena 2023)"
    config: LookupConfig

    def __init__(self, config: LookupConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        self.max_draft_tokens = config.max_draft_tokens

    def new_state(self, num_rows: int) -> LookupState:
        """Empty rows."""
        return LookupState(num_rows, self.config)

    def commit(self, state: State, new: Commit) -> None:
        """Append tokens; a verdict on a lookup proposal first counts for its match length."""
        assert isinstance(state, LookupState)
        for b, (row, tokens) in enumerate(zip(new.rows, new.tokens, strict=True)):
            kept = state.rows[row]
            if new.verdict is not None and tokens:
                draft = new.verdict.drafts[b]
                if draft.kind and draft.tokens:
                    kept.learn(draft.kind, num_accepted=new.verdict.num_accepted[b], num_drafted=len(draft.tokens))
            kept.append(tokens)

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Copies after each row's longest match; no tokens for a row without one."""
        assert isinstance(state, LookupState)
        drafts = []
        for row, anchor, wanted in zip(request.rows, request.anchors, request.num_tokens, strict=True):
            kept = state.rows[row]
            length, end = kept.match(anchor)
            count = min(wanted, self.max_draft_tokens) if length else 0
            copy = kept.copy_after(end, anchor=anchor, count=count)
            drafts.append(Draft(copy, [kept.rate(length + i) for i in range(count)], NAME, length))
        return Proposal(drafts)

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `nbytes` charges them; look-ups do no floating-point work."""
        return DraftCost(
            state_bytes=_fixed_bytes(self.config),
            kv_bytes_per_token=_bytes_per_token(self.config),
            weight_bytes=0,
            propose_flops=0,
            commit_flops_per_token=0,
        )


def _bytes_per_token(config: LookupConfig) -> int:
    return TOKEN_BYTES + ENTRY_BYTES * (config.max_ngram - config.min_ngram + 1)


def _fixed_bytes(config: LookupConfig) -> int:
    return 2 * 8 * config.max_ngram
