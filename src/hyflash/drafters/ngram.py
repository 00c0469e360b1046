"""N-gram table: what the target most often said after the last tokens, counted from its own answers. No features.

In: committed tokens. Out: a chain of the most frequent next tokens, each after the longest context that is in the
table, with the share it had as confidence. A draft takes microseconds, so it pays where a block drafter's pass does
not; it knows nothing of this context, which is what `lookup` is for: compose them.

N-gram drafters are old (REST, arXiv 2311.08252, searches a datastore; llama.cpp keeps counts). Counting the table from
the target's own answers (`hyflash data ngrams`), and thinning it to where a longer context tells more, is ours.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Proposal, TargetHooks
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.errors import UserError

TOKEN_BITS = 21
"""Bits of a token in a key; three tokens fill a positive int64."""
SHRINK = 0.5
"""Taken from the hits and added to the trials: what was seen twice is not certain."""
LEAST_RUN = 0.04
"""A chain ends where it is right with no more than this chance: no forward verifies a row so cheaply."""
ALIKE = 0.1
"""A longer context is left out where the shorter one says the same with a confidence this near."""


class NgramConfig(DrafterConfig):
    """Options of `ngram`."""

    max_context: int = Field(3, ge=1, le=3, description="Most tokens of context in the table.")
    num_entries: int = Field(0, ge=0, description="Rows of the table; set when it is counted.")
    max_draft_tokens: int = Field(5, ge=1, le=64, description="Most draft tokens in a round.")


class NgramState(State):
    """The last committed tokens of each row."""

    def __init__(self, num_rows: int, size: int) -> None:
        self.size = size
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]

    def reset(self, row: int) -> None:
        """Empty one row."""
        self.rows[row] = []

    def nbytes(self, row: int) -> int:
        """Bytes of the row: 8 a token of context, whether there yet or not."""
        return 8 * self.size

    def snapshot(self, row: int) -> dict[str, Any]:
        """The tokens."""
        return {"tokens": list(self.rows[row])}

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        """Put a snapshot back."""
        self.rows[row] = list(saved["tokens"])


class DrafterImpl(Drafter):
    """Proposes the most frequent continuations."""

    Config = NgramConfig
    trainable: ClassVar[bool] = False
    cheap: ClassVar[bool] = True
    source: ClassVar[str] = "n-gram counts of the target's answers; ours"
    config: NgramConfig
    keys: Tensor
    tokens: Tensor
    shares: Tensor

    def __init__(self, config: NgramConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        if hooks.info.vocab_size >= 1 << TOKEN_BITS:
            raise UserError(f"ngram takes vocabularies below {1 << TOKEN_BITS} tokens; found {hooks.info.vocab_size}.")
        self.max_draft_tokens = config.max_draft_tokens
        self.register_buffer("keys", torch.zeros(config.num_entries, dtype=torch.int64))  # ascending
        self.register_buffer("tokens", torch.zeros(config.num_entries, dtype=torch.int32))
        self.register_buffer("shares", torch.zeros(config.num_entries, dtype=torch.uint8))  # of 255
        self._table: tuple[array[int], array[int], bytes] | None = None
        self.register_load_state_dict_post_hook(DrafterImpl._forget)  # type: ignore[no-untyped-call]

    def _forget(self, _incompatible: object) -> None:
        """The table that was read is not the one that has just been loaded."""
        self._table = None

    def new_state(self, num_rows: int) -> NgramState:
        """Empty rows."""
        return NgramState(num_rows, self.config.max_context)

    def commit(self, state: State, new: Commit) -> None:
        """Keep the last tokens."""
        assert isinstance(state, NgramState)
        for row, tokens in zip(new.rows, new.tokens, strict=True):
            state.rows[row] = [*state.rows[row], *tokens][-state.size :]

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Chains after each row's context; none where even its anchor is not in the table. Their kind is the eighth
        of the first token's share."""
        assert isinstance(state, NgramState)
        drafts = []
        for row, anchor, wanted in zip(request.rows, request.anchors, request.num_tokens, strict=True):
            tokens, shares = self._chain([*state.rows[row], anchor], min(wanted, self.max_draft_tokens))
            drafts.append(Draft(tokens, shares, kind=int(8 * shares[0]) if shares else 0))
        return Proposal(drafts)

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `nbytes` has them; look-ups do no floating-point work."""
        return DraftCost(
            state_bytes=8 * self.config.max_context,
            kv_bytes_per_token=0,
            weight_bytes=sum(t.nbytes for t in (self.keys, self.tokens, self.shares)),
            propose_flops=0,
            commit_flops_per_token=0,
        )

    def _chain(self, text: list[int], count: int) -> tuple[list[int], list[float]]:
        """Up to `count` tokens after a text, and their shares."""
        keys, tokens, shares = self._arrays()
        chain: list[int] = []
        confidence: list[float] = []
        most = self.config.max_context
        context = text[-most:]
        run = 1.0  # chance that all drafts so far are right
        while len(chain) < count and run > LEAST_RUN:
            found = self._find(keys, context)
            if found < 0:
                break
            chain.append(tokens[found])
            confidence.append(shares[found] / 255)
            run *= confidence[-1]
            context = [*context, chain[-1]][-most:]
        return chain, confidence

    @staticmethod
    def _find(keys: array[int], context: list[int]) -> int:
        """Place in the table of the longest end of a context that is there, -1 if none."""
        for first in range(len(context)):
            key = pack(context[first:])
            at = bisect_left(keys, key)
            if at < len(keys) and keys[at] == key:
                return at
        return -1

    def _arrays(self) -> tuple[array[int], array[int], bytes]:
        """The table in plain memory: a look-up is a few steps of bisection, less than a call of a tensor library."""
        if self._table is None:
            self._table = (
                array("q", self.keys.cpu().numpy().tobytes()),
                array("i", self.tokens.cpu().numpy().tobytes()),
                self.shares.cpu().numpy().tobytes(),
            )
        return self._table


def pack(context: Sequence[int]) -> int:
    """One positive integer for one to three token ids, never equal for two contexts."""
    key = 0
    for token in context:
        key = key << TOKEN_BITS | (token + 1)
    return key


def count(texts: Iterable[tuple[Sequence[int], Sequence[int]]], config: NgramConfig, hooks: TargetHooks) -> DrafterImpl:
    """A drafter with the table of (prompt, answer) texts: the contexts before each answer token, prompt included.

    A context of two or three tokens must have come twice. Raises UserError where there is no token to count.
    """
    found: dict[int, tuple[int, float]] = {}
    pairs = [_contexts(prompt, answer, config.max_context) for prompt, answer in texts]
    if not any(len(after) for _, after in pairs):
        raise UserError("there is no answer token to count n-grams of.")
    after = np.concatenate([tokens for _, tokens in pairs])
    for size in range(1, config.max_context + 1):
        keys = np.concatenate([contexts[size - 1] for contexts, _ in pairs])
        for key, token, share in _most_frequent(keys[keys > 0], after[keys > 0], least=1 if size == 1 else 2):
            shorter = _without_first(found, key, size)
            if shorter is None or shorter[0] != token or abs(shorter[1] - share) > ALIKE:
                found[key] = (token, share)
    drafter = DrafterImpl(config.model_copy(update={"num_entries": len(found)}), hooks)
    order = sorted(found)
    drafter.keys.copy_(torch.tensor(order))
    drafter.tokens.copy_(torch.tensor([found[key][0] for key in order]))
    drafter.shares.copy_(torch.tensor([round(255 * found[key][1]) for key in order]))
    return drafter


def _without_first(found: Mapping[int, tuple[int, float]], key: int, size: int) -> tuple[int, float] | None:
    """What the longest known part of a context of `size` tokens says that ends as it does."""
    parts = (key & ((1 << TOKEN_BITS * fewer) - 1) for fewer in range(size - 1, 0, -1))
    return next((found[part] for part in parts if part in found), None)


def _contexts(
    prompt: Sequence[int], answer: Sequence[int], most: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Keys of 1 to `most` tokens before each answer token, 0 where the text is shorter; and the answer."""
    text = np.array([*prompt[-most:], *answer], dtype=np.int64) + 1
    first = len(text) - len(answer)
    keys, key = [], np.zeros(len(answer), dtype=np.int64)
    for size in range(1, most + 1):
        own = np.arange(first - size, len(text) - size)
        key = np.where(own >= 0, key | text[own.clip(0)] << (TOKEN_BITS * (size - 1)), 0)
        keys.append(np.where(own >= 0, key, 0))
    return keys, text[first:] - 1


def _most_frequent(
    keys: NDArray[np.int64], after: NDArray[np.int64], *, least: int
) -> Iterable[tuple[int, int, float]]:
    """Of each context seen `least` times: its most frequent next token, the lower id among equals, and its share."""
    pairs, hits = np.unique(np.stack((keys, after), 1), axis=0, return_counts=True)
    contexts, starts, sizes = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    for key, start, size in zip(contexts.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        own = hits[start : start + size]
        total, best = int(own.sum()), int(own.argmax())
        if total >= least:
            yield key, int(pairs[start + best, 1]), (int(own[best]) - SHRINK) / (total + SHRINK)
