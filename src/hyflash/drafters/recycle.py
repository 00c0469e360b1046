"""Token recycling: what the target said after rejected drafts is not thrown away but drafted when it fits again.

In: committed tokens, and with each verdict the pairs (draft token, what the target would have said after it), rejected
drafts included. Out: a chain that follows, from the last two tokens or else from the last one, the token that came
after them most recently, in the text or in the target's mind. A bounded table per row; no weights, no features.

After Token Recycling (Luo et al., arXiv 2408.08696), which keeps the target's best k tokens after each token in a
matrix and verifies a tree of them. One chain, contexts of two tokens and a table that forgets the oldest are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Proposal, TargetHooks
from hyflash.drafters.base import Drafter, DrafterConfig, State

ENTRY_BYTES = 128
"""A table entry in CPython: a key, a share of a hash table, a token."""
FIXED_BYTES = 64
"""The last tokens and the evidence."""
PRIOR_RATES = (0.25, 0.5)
"""Acceptance rate before evidence after a context of one and of two tokens."""
PRIOR_TRIALS = 4.0
FORGET = 0.9
"""Weight of the evidence so far when a round brings new."""


class RecycleConfig(DrafterConfig):
    """Options of token recycling."""

    max_entries: int = Field(8192, ge=2, le=1 << 20, description="Contexts kept per row; the oldest are forgotten.")
    max_draft_tokens: int = Field(5, ge=1, le=64, description="Most draft tokens in a round.")


class _Row:
    """What came last after contexts of one and two tokens, the last two committed tokens, and how chains fared."""

    def __init__(self, max_entries: int) -> None:
        self._most = max_entries
        self.after: dict[int, int] = {}  # context -> token, the longest unheard of first
        self.last: list[int] = []
        self.accepted, self.tried = [0.0, 0.0], [0.0, 0.0]  # by size of context - 1

    def commit(self, tokens: Sequence[int], replies: Sequence[tuple[int, int]]) -> None:
        """Take in committed tokens, of which the first is the anchor that the drafts with these replies came after."""
        before = tokens[0]
        for token, reply in replies:
            self._learn(before, token, reply)
            before = token
        text = [*self.last, *tokens]
        for i in range(max(1, len(self.last)), len(text)):  # the text has the last word
            self._learn(text[i - 2] if i > 1 else -1, text[i - 1], text[i])
        self.last = text[-2:]
        while len(self.after) > self._most:
            del self.after[next(iter(self.after))]

    def _learn(self, before: int, token: int, reply: int) -> None:
        for key in (token, _pair(before, token)) if before >= 0 else (token,):
            self.after.pop(key, None)
            self.after[key] = reply

    def chain(self, anchor: int, count: int) -> tuple[list[int], list[int]]:
        """Up to `count` tokens after the anchor, and the size of the context that gave each."""
        before, token = self.last[-1] if self.last else -1, anchor
        tokens: list[int] = []
        sizes: list[int] = []
        while len(tokens) < count:
            reply, size = self.after.get(_pair(before, token)), 2
            if reply is None:
                reply, size = self.after.get(token), 1
            if reply is None:
                break
            tokens.append(reply)
            sizes.append(size)
            before, token = token, reply
        return tokens, sizes

    def score(self, sizes: Sequence[int], num_accepted: int) -> None:
        """Count a round whose verified drafts came after contexts of these sizes."""
        self.accepted, self.tried = [x * FORGET for x in self.accepted], [x * FORGET for x in self.tried]
        for i, size in enumerate(sizes[: num_accepted + 1]):
            self.tried[size - 1] += 1.0
            self.accepted[size - 1] += float(i < num_accepted)

    def rate(self, size: int) -> float:
        """Estimated acceptance rate of a token after a context of this size."""
        accepted = PRIOR_TRIALS * PRIOR_RATES[size - 1] + self.accepted[size - 1]
        return accepted / (PRIOR_TRIALS + self.tried[size - 1])


class RecycleState(State):
    """A table for each row."""

    def __init__(self, num_rows: int, max_entries: int) -> None:
        self.max_entries = max_entries
        self.rows = [_Row(max_entries) for _ in range(num_rows)]

    def reset(self, row: int) -> None:
        """Empty one row."""
        self.rows[row] = _Row(self.max_entries)

    def nbytes(self, row: int) -> int:
        """Bytes of the row, charged with a full table."""
        return FIXED_BYTES + self.max_entries * ENTRY_BYTES

    def snapshot(self, row: int) -> dict[str, Any]:
        """Copies of the table, its order included, the last tokens and the evidence."""
        kept = self.rows[row]
        return {
            "contexts": list(kept.after),
            "tokens": list(kept.after.values()),
            "last": list(kept.last),
            "accepted": list(kept.accepted),
            "tried": list(kept.tried),
        }

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        """Put a snapshot back."""
        self.reset(row)
        kept = self.rows[row]
        kept.after = dict(zip(saved["contexts"], saved["tokens"], strict=True))
        kept.last = list(saved["last"])
        kept.accepted, kept.tried = list(saved["accepted"]), list(saved["tried"])


class DrafterImpl(Drafter):
    """Proposes what came after the last tokens, in the text or after a rejected draft."""

    Config = RecycleConfig
    trainable: ClassVar[bool] = False
    cheap: ClassVar[bool] = True
    source: ClassVar[str] = "Token Recycling (arXiv 2408.08696); one chain, ours"
    recycles = True
    config: RecycleConfig

    def __init__(self, config: RecycleConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        self.max_draft_tokens = config.max_draft_tokens

    def new_state(self, num_rows: int) -> RecycleState:
        """Empty tables."""
        return RecycleState(num_rows, self.config.max_entries)

    def commit(self, state: State, new: Commit) -> None:
        """Learn tokens and replies; a verdict on a chain of ours counts for the contexts that gave it."""
        assert isinstance(state, RecycleState)
        verdict = new.verdict
        for b, (row, tokens) in enumerate(zip(new.rows, new.tokens, strict=True)):
            if not tokens:
                continue
            if verdict is not None and isinstance(sizes := verdict.drafts[b].notes, tuple):
                state.rows[row].score(sizes[: len(verdict.drafts[b].tokens)], verdict.num_accepted[b])
            state.rows[row].commit(tokens, verdict.replies[b] if verdict is not None and verdict.replies else ())

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Chains after each row's anchor, of which kind is the size of the first token's context; none where it was
        never seen."""
        assert isinstance(state, RecycleState)
        drafts = []
        for row, anchor, wanted in zip(request.rows, request.anchors, request.num_tokens, strict=True):
            kept = state.rows[row]
            tokens, sizes = kept.chain(anchor, min(wanted, self.max_draft_tokens))
            kind = sizes[0] if sizes else 0
            drafts.append(Draft(tokens, [kept.rate(size) for size in sizes], kind=kind, notes=tuple(sizes)))
        return Proposal(drafts)

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `nbytes` charges them; look-ups do no floating-point work."""
        return DraftCost(
            state_bytes=FIXED_BYTES + self.config.max_entries * ENTRY_BYTES,
            kv_bytes_per_token=0,
            weight_bytes=0,
            propose_flops=0,
            commit_flops_per_token=0,
        )


def _pair(before: int, token: int) -> int:
    """One integer for a context of two tokens, -1 for a token that is not there; never equal to a token."""
    return (before + 2) << 32 | token
