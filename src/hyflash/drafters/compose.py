"""Several drafters as one (`lookup+./my-drafter`): each round, each row takes the part it expects most from.

In: named drafters. Out: a drafter whose commits go to every part and whose proposals come, row by row, from the part
with the highest expected accepted length: the sum over draft positions of P(all drafts so far accepted). Before
evidence that is what the part states (lookup: by match length) or what a small drafter typically reaches, which comes
to the fixed rule "lookup if at least two tokens match, else the block drafter". Then it is scaled by what the row's
own rounds accepted against what was expected, kept apart by part and `Drafter.buckets` (lookup: match length).

Parts that read no features are cheap: they always propose, and every verdict scores what they would have drafted.
A part with features runs only for the rows where its record promises more than every cheap part; what it then states
counts half beside the record, and may lose to a cheap part after all.

With prices (`DraftRequest.prices`) "more" means committed tokens per second: drafts are cut where the next one costs
more than it promises, also to none; the time of a part with features counts; and one that does not pay is tried again
after pauses that double. Such parts hear of tokens only when they run, many at once. And a row's record then starts
from what all rows came to, so that a drafter that is always wrong is not tried anew with each request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyflash.core import Commit, DraftCost, DraftRequest, Prices, Proposal, Verdict
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.drafters.late import LATE_PIECES, LateCommits
from hyflash.errors import UserError
from hyflash.ops.kernels import Kernels

NUM_BUCKETS = 8
PRIOR_RATE = 0.45
"""Acceptance rate of a part that has neither stated a confidence nor been tried: a small block drafter's first slot."""
PRIOR_TOKENS = 4.0
"""Accepted tokens, as expected, that the evidence of a row starts from."""
FORGET = 0.9
"""Weight of the evidence so far when a round brings new to the same part and bucket."""
RECORD_FORGET = 0.98
"""The same for what is known of all rows."""
FIRST_PAUSE, LAST_PAUSE = 16, 256
"""Proposals without a part with features that does not pay, before it is tried again."""
TRIED = 2
"""Draft tokens that a trial lets be verified, whatever they promise: without a verdict nothing is learnt."""


class ComposedState(State):
    """The parts' states side by side, and per row how each part and bucket fared."""

    def __init__(self, parts: Sequence[State], num_rows: int) -> None:
        self.parts = tuple(parts)
        self.rows = [self._no_evidence() for _ in range(num_rows)]  # (2, parts, buckets): tokens accepted, expected
        self.late = [LateCommits() for _ in parts]
        self.lazy = False
        """Whether parts with features hear late of tokens that they did not draft: since a proposal with prices."""

    def _no_evidence(self) -> NDArray[np.float64]:
        return np.zeros((2, len(self.parts), NUM_BUCKETS))

    def reset(self, row: int) -> None:
        """Empty one row in every part."""
        for part, late in zip(self.parts, self.late, strict=True):
            part.reset(row)
            late.put_back(row, [])
        self.rows[row] = self._no_evidence()

    def nbytes(self, row: int) -> int:
        """Bytes of the row in all parts and of its evidence."""
        return sum(part.nbytes(row) for part in self.parts) + self.rows[row].nbytes

    def snapshot(self, row: int) -> dict[str, Any]:
        """Snapshots of all parts, what waits for them, and the evidence."""
        return {
            "parts": [part.snapshot(row) for part in self.parts],
            "late": [late.waiting(row) for late in self.late],
            "evidence": self.rows[row].tolist(),
        }

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        """Put a snapshot back into every part."""
        for part, kept, late, pieces in zip(self.parts, saved["parts"], self.late, saved["late"], strict=True):
            part.restore(row, kept)
            late.put_back(row, pieces)
        self.rows[row] = np.array(saved["evidence"])


@dataclass(slots=True)
class _Choice:
    """The best part known so far for one row: where it came from and what it drafts."""

    part: int
    value: float  # expected accepted length; with prices, committed tokens per cost
    tokens: list[int]
    rates: list[float]
    probs: Tensor | None  # (L, V)


class Composite(Drafter):
    """Chooses among `drafters`, (name, drafter) pairs in order of preference where expectations tie.

    Raises UserError for fewer than two drafters and for two of one name.
    """

    Config = DrafterConfig
    trainable: ClassVar[bool] = False
    weighs_prices: ClassVar[bool] = True

    def __init__(self, drafters: list[tuple[str, Drafter]]) -> None:
        names = [name for name, _ in drafters]
        if len(names) < 2 or len(set(names)) < len(names):
            raise UserError(
                f"drafters to compose are {names}; expected at least two of different names, as in 'lookup+CHECKPOINT'."
            )
        super().__init__(DrafterConfig(), drafters[0][1].hooks)
        self.names = tuple(names)
        self.parts = nn.ModuleList(drafter for _, drafter in drafters)
        self._drafters = tuple(drafter for _, drafter in drafters)  # the same modules, typed
        self.target_layer_ids = tuple(sorted({tap for d in self._drafters for tap in d.target_layer_ids}))
        self._picks = [[self.target_layer_ids.index(tap) for tap in d.target_layer_ids] for d in self._drafters]
        self.max_draft_tokens = max(d.max_draft_tokens for d in self._drafters)
        self._record = np.zeros((2, len(names), NUM_BUCKETS))  # evidence of all rows so far, as ComposedState.rows
        self._idle, self._pauses = [0] * len(names), [FIRST_PAUSE] * len(names)
        self._draft_sec, self._commit_sec = [0.0] * len(names), [0.0] * len(names)  # of a round, of parts with features
        # A part past its own limit proposes nothing, so the others may go on.
        limits = [d.max_positions for d in self._drafters]
        self.max_positions = None if None in limits else max(n for n in limits if n is not None)

    def new_state(self, num_rows: int) -> ComposedState:
        """Empty rows in every part."""
        return ComposedState([d.new_state(num_rows) for d in self._drafters], num_rows)

    def commit(self, state: State, new: Commit) -> None:
        """Learn from the verdict, then hand the tokens to every part, with the taps it reads and its own verdicts."""
        assert isinstance(state, ComposedState)
        if new.verdict is not None:
            self._learn(state, new, new.verdict)
        for p, (name, drafter) in enumerate(zip(self.names, self._drafters, strict=True)):
            if drafter.target_layer_ids:
                self._commit_dear(state, new, p)
            else:
                drafter.commit(state.parts[p], replace(new, features=None, verdict=_own(new.verdict, name)))

    def _commit_dear(self, state: ComposedState, new: Commit, p: int) -> None:
        """Tokens of rows that the part has drafted go to it, with the verdict; with prices, those of others wait."""
        name, drafter, verdict = self.names[p], self._drafters[p], new.verdict
        features = new.features
        if features is not None and len(self._picks[p]) < features.shape[2]:
            features = features[:, :, self._picks[p]]
        mine = list(range(len(new.rows)))
        if state.lazy:  # long commits are prompts
            drafted = [verdict is not None and verdict.sources[b] == name and verdict.num_drafted[b] > 0 for b in mine]
            mine = [b for b in mine if drafted[b] or new.lengths[b] >= LATE_PIECES]
        began, full = time.perf_counter(), []
        for b, (row, length) in enumerate(zip(new.rows, new.lengths, strict=True)):
            if b not in mine and length:
                part = None if features is None else features[b, :length]
                if state.late[p].add(row, new.tokens[b, :length].tolist(), part):
                    full.append(row)
        self._catch_up(state, [*(new.rows[b] for b in mine), *full], p)
        if mine:
            own = replace(new, features=features, verdict=_own(verdict, name))
            drafter.commit(state.parts[p], _members(own, mine))
        if mine and verdict is not None:
            self._commit_sec[p] = _follow(self._commit_sec[p], time.perf_counter() - began)

    def _catch_up(self, state: ComposedState, rows: Sequence[int], p: int) -> None:
        late = state.late[p].take(rows)
        if late is not None:
            self._drafters[p].commit(state.parts[p], late)

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Cheap parts draft for every row; the best other part drafts where it is expected to beat them."""
        assert isinstance(state, ComposedState)
        choices: list[_Choice | None] = [None] * len(request.rows)
        num_nonfinite, state.lazy = 0, request.prices is not None
        for p, drafter in enumerate(self._drafters):
            if not drafter.target_layer_ids:
                num_nonfinite += self._run(
                    state, request=request, p=p, members=range(len(request.rows)), choices=choices
                )
        chosen = self._dear(state, request=request, choices=choices)
        trial = self._trial(request, choices, chosen)
        for p, members in chosen.items():
            num_nonfinite += self._run(state, request=request, p=p, members=members, choices=choices)
        if trial is not None:
            p, b = trial
            num_nonfinite += self._run(state, request=request, p=p, members=[b], choices=choices, at_least=TRIED)
        return self._merge(choices, device=request.anchors.device, num_nonfinite=num_nonfinite)

    def use_kernels(self, kernels: Kernels | None) -> bool:
        """Each part that can."""
        served = [drafter.use_kernels(kernels) for drafter in self._drafters]
        return any(served)

    def cost(self, context_tokens: int) -> DraftCost:
        """Sum of the parts, and the evidence."""
        costs = [d.cost(context_tokens) for d in self._drafters]
        return DraftCost(
            state_bytes=sum(c.state_bytes for c in costs) + 2 * len(costs) * NUM_BUCKETS * 8,
            kv_bytes_per_token=sum(c.kv_bytes_per_token for c in costs),
            weight_bytes=sum(c.weight_bytes for c in costs),
            propose_flops=sum(c.propose_flops for c in costs),
            commit_flops_per_token=sum(c.commit_flops_per_token for c in costs),
        )

    def _run(
        self,
        state: ComposedState,
        *,
        request: DraftRequest,
        p: int,
        members: Sequence[int],
        choices: list[_Choice | None],
        at_least: int = 0,
    ) -> int:
        """Let part p draft for some rows of the request; keep it where it is the best so far. Returns NaN count."""
        part, prices = self._drafters[p], request.prices
        asked = _subset(request, members=members, limit=part.max_draft_tokens)
        self._catch_up(state, asked.rows, p)
        asked = replace(asked, prices=None)  # drafts are cut here, for all parts alike
        began = time.perf_counter()
        proposal, buckets = part.propose(state.parts[p], asked), part.buckets(state.parts[p], asked)
        if part.target_layer_ids:
            self._draft_sec[p] = _follow(self._draft_sec[p], time.perf_counter() - began)
        tokens = proposal.tokens.tolist()
        priors = _stated(proposal)
        for i, b in enumerate(members):
            length, scale = proposal.lengths[i], self._scale(state, row=request.rows[b], p=p, bucket=buckets[i])
            rates = [min(1.0, rate * scale) for rate in priors[i]]
            if part.target_layer_ids:  # its record is in units of PRIOR_RATE, so it cannot scale what the part states
                record = min(1.0, PRIOR_RATE * scale)
                rates = [(rate + record) / 2 for rate in priors[i]]
            best_length, value = _best_length(rates[:length], prices)
            length, best = max(best_length, min(length, at_least)), choices[b]
            if length and (best is None or value > best.value):
                probs = None if proposal.probs is None else proposal.probs[i, :length]
                choices[b] = _Choice(p, value, tokens[i][:length], rates[:length], probs)
        return proposal.num_nonfinite

    def _dear(
        self, state: ComposedState, *, request: DraftRequest, choices: Sequence[_Choice | None]
    ) -> dict[int, list[int]]:
        """Part with features -> rows of the request where its record promises more than every other part."""
        prices = request.prices
        nothing = prices.rate(0.0, 0) if prices else 0.0
        best = [(choice.value if choice else nothing, -1) for choice in choices]
        for p, drafter in enumerate(self._drafters):
            if drafter.target_layer_ids:
                asked = _subset(request, members=range(len(best)), limit=drafter.max_draft_tokens)
                for b, bucket in enumerate(drafter.buckets(state.parts[p], asked)):
                    record = min(1.0, PRIOR_RATE * self._scale(state, row=request.rows[b], p=p, bucket=bucket))
                    seconds = self._draft_sec[p] + self._commit_sec[p]
                    _, value = _best_length([record] * asked.num_tokens[b], prices, seconds)
                    if value > best[b][0]:  # the earlier one on a tie
                        best[b] = (value, p)
        chosen: dict[int, list[int]] = {}
        for b, (_, p) in enumerate(best):
            if p >= 0:
                chosen.setdefault(p, []).append(b)
        return chosen

    def _trial(
        self, request: DraftRequest, choices: Sequence[_Choice | None], chosen: dict[int, list[int]]
    ) -> tuple[int, int] | None:
        """With prices: a part that has not paid for long, and a row without any draft for it to be tried in."""
        if request.prices is None:
            return None
        for p, drafter in enumerate(self._drafters):
            if p in chosen:
                self._idle[p], self._pauses[p] = 0, FIRST_PAUSE
            elif drafter.target_layer_ids:
                self._idle[p] += 1
                free = next((b for b, choice in enumerate(choices) if choice is None), None)
                if self._idle[p] >= self._pauses[p] and not chosen and free is not None:
                    self._idle[p], self._pauses[p] = 0, min(2 * self._pauses[p], LAST_PAUSE)
                    return p, free
        return None

    def _scale(self, state: ComposedState, *, row: int, p: int, bucket: int) -> float:
        """Tokens accepted over tokens expected, by the row's evidence for this part and bucket. Before evidence 1, or
        with prices what all rows so far came to in this bucket, and before that in all buckets of the part."""
        at, prior = min(bucket, NUM_BUCKETS - 1), 1.0
        if state.lazy:
            hits, tries = self._record[:, p].tolist()
            for some_hits, some_tries in ((sum(hits), sum(tries)), (hits[at], tries[at])):
                prior = (PRIOR_TOKENS * prior + some_hits) / (PRIOR_TOKENS + some_tries)
        accepted, expected = state.rows[row][:, p, at].tolist()
        return float((PRIOR_TOKENS * prior + accepted) / (PRIOR_TOKENS + expected))

    def _learn(self, state: ComposedState, new: Commit, verdict: Verdict) -> None:
        """Score the part that drafted by the verdict, and the other cheap parts by the accepted run.

        The states still are as they were at the proposal, and a commit's first token is the proposal's anchor.
        """
        members = [b for b, length in enumerate(new.lengths) if length and verdict.num_drafted[b]]
        if not members:
            return
        judged = DraftRequest(rows=new.rows, anchors=new.tokens[:, 0], num_tokens=verdict.num_drafted)
        for p, (name, drafter) in enumerate(zip(self.names, self._drafters, strict=True)):
            asked = _subset(judged, members=members, limit=drafter.max_draft_tokens)
            buckets = drafter.buckets(state.parts[p], asked)
            drafts = None if drafter.target_layer_ids else drafter.propose(state.parts[p], asked)
            priors = _stated(drafts) if drafts else [[PRIOR_RATE] * verdict.num_drafted[b] for b in members]
            for i, b in enumerate(members):
                hits = verdict.num_accepted[b]
                if verdict.sources[b] == name:
                    tries = min(hits + 1, verdict.num_drafted[b])
                elif drafts is not None:
                    own = drafts.tokens[i, : drafts.lengths[i]].tolist()
                    hits, tries = _agreement(own, verdict.proposed[b, :hits].tolist())
                else:
                    continue
                if tries:
                    for kept, share in ((state.rows[new.rows[b]], FORGET), (self._record, RECORD_FORGET)):
                        evidence = kept[:, p, min(buckets[i], NUM_BUCKETS - 1)]
                        evidence[:] = share * evidence + (hits, sum(priors[i][:tries]))

    def _merge(self, choices: Sequence[_Choice | None], *, device: torch.device, num_nonfinite: int) -> Proposal:
        """One proposal from the rows' choices; point masses become one-hot where another row has probabilities."""
        width = max((len(choice.tokens) for choice in choices if choice), default=0)
        tokens = torch.zeros(len(choices), width, dtype=torch.int64)
        confidence = torch.zeros(len(choices), width)
        spread = [choice.probs for choice in choices if choice and choice.probs is not None]
        probs = torch.zeros(len(choices), width, spread[0].shape[-1], device=device) if spread else None
        for b, choice in enumerate(choices):
            if choice is None:
                continue
            length = len(choice.tokens)
            tokens[b, :length] = torch.tensor(choice.tokens)
            confidence[b, :length] = torch.tensor(choice.rates)
            if probs is not None and choice.probs is not None:
                probs[b, :length] = choice.probs
            elif probs is not None:
                probs[b, range(length), choice.tokens] = 1.0
        return Proposal(
            tokens=tokens.to(device),
            lengths=tuple(len(choice.tokens) if choice else 0 for choice in choices),
            probs=probs,
            confidence=confidence.to(device),
            sources=tuple(self.names[choice.part] if choice else "" for choice in choices),
            num_nonfinite=num_nonfinite,
        )


def _expected(rates: Sequence[float]) -> float:
    """Expected accepted length: the sum over positions of the product of the rates so far."""
    total, run = 0.0, 1.0
    for rate in rates:
        run *= rate
        total += run
    return total


def _best_length(rates: Sequence[float], prices: Prices | None, draft_sec: float = 0.0) -> tuple[int, float]:
    """How many of the drafts to take, and what they are worth: all and the expected accepted length without prices;
    else the number with most committed tokens per cost, 0 where none pays."""
    if prices is None:
        return len(rates), _expected(rates)
    best, total, run = (0, prices.rate(0.0, 0)), 0.0, 1.0
    for n, rate in enumerate(rates, start=1):
        run *= rate
        total += run
        best = max(best, (n, prices.rate(total, n, draft_sec)), key=lambda known: known[1])
    return best


def _follow(so_far: float, new: float) -> float:
    """A running mean of seconds, quick to fall: what happens once, or other work, only ever adds to them."""
    return so_far + (0.5 if new < so_far else 0.1) * (new - so_far) if so_far else new


def _members(new: Commit, members: Sequence[int]) -> Commit:
    """The commit of some of its rows."""
    if len(members) == len(new.rows):
        return new
    at, verdict = list(members), new.verdict
    if verdict is not None:
        verdict = Verdict(
            proposed=verdict.proposed[at],
            num_drafted=tuple(verdict.num_drafted[b] for b in at),
            num_accepted=tuple(verdict.num_accepted[b] for b in at),
            sources=tuple(verdict.sources[b] for b in at),
        )
    return Commit(
        rows=tuple(new.rows[b] for b in at),
        tokens=new.tokens[at],
        features=None if new.features is None else new.features[at],
        lengths=tuple(new.lengths[b] for b in at),
        verdict=verdict,
    )


def _stated(proposal: Proposal) -> list[list[float]]:
    """Confidence of each row's drafts, PRIOR_RATE where the part states none."""
    if proposal.confidence is None:
        return [[PRIOR_RATE] * length for length in proposal.lengths]
    return [row[:length] for row, length in zip(proposal.confidence.tolist(), proposal.lengths, strict=True)]


def _agreement(own: list[int], run: list[int]) -> tuple[int, int]:
    """Hits and tries of drafts against an accepted run; what would have come after the run is not known."""
    hits = 0
    while hits < min(len(own), len(run)) and own[hits] == run[hits]:
        hits += 1
    return hits, min(hits + 1, len(own), len(run))


def _subset(request: DraftRequest, *, members: Sequence[int], limit: int) -> DraftRequest:
    """The request for some of its rows, asking for at most `limit` tokens."""
    if len(members) == len(request.rows) and max(request.num_tokens, default=0) <= limit:
        return request
    return DraftRequest(
        rows=tuple(request.rows[b] for b in members),
        anchors=request.anchors[list(members)],
        num_tokens=tuple(min(request.num_tokens[b], limit) for b in members),
        prices=request.prices,
    )


def _own(verdict: Verdict | None, name: str) -> Verdict | None:
    """The verdict as one part sees it: nothing drafted in rows that another part drafted."""
    if verdict is None:
        return None
    mine = [source == name for source in verdict.sources]
    return replace(
        verdict,
        num_drafted=tuple(n if m else 0 for n, m in zip(verdict.num_drafted, mine, strict=True)),
        num_accepted=tuple(n if m else 0 for n, m in zip(verdict.num_accepted, mine, strict=True)),
    )
