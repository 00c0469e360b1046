"""Several drafters as one (`lookup+./my-drafter`): each round, each row takes the part it expects most from.

In: named drafters. Out: a drafter whose commits go to every part and whose proposals come, row by row, from the part
with the highest expected accepted length: the sum over draft positions of P(all drafts so far accepted). Before
evidence that is what the part states (lookup: by match length) or what a small drafter typically reaches, which comes
to the fixed rule "lookup if at least two tokens match, else the block drafter". Then it is scaled by what the row's
own rounds accepted against what was expected, kept apart by part and `Draft.kind` (lookup: match length).

Parts that run no network are cheap (`Drafter.cheap`): they always propose, and every round scores what they drafted,
chosen or not. The others are dear: one runs only for the rows where its record promises more than every cheap part;
what it then states counts half beside the record, and may lose to a cheap part after all. Where it samples its drafts
the record alone counts: which of two sources drafts may hang on the past, never on what a sample turned out to be.

With prices (`DraftRequest.prices`) "more" means committed tokens per second: drafts are cut where the next one costs
more than it promises, also to none; the time of a dear part counts; and one that does not pay is tried again after
pauses that double. Dear parts hear of tokens only when they run, many at once. And a row's record then starts from what
all rows came to, so that a drafter that is always wrong is not tried anew with each request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Prices, Proposal, TargetKV, Verdict
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.drafters.evidence import BYTES_PER_PART, Evidence
from hyflash.drafters.late import LATE_PIECES, LateCommits
from hyflash.errors import UserError
from hyflash.ops.kernels import Kernels

NOTHING = Draft()
PRIOR_RATE = 0.45
"""Acceptance rate of a part that has neither stated a confidence nor been tried: a small block drafter's first slot."""
FORGET = 0.9
"""Weight of the evidence so far when a round brings new to the same part and bucket."""
RECORD_FORGET = 0.98
"""The same for what is known of all rows."""
FIRST_PAUSE, LAST_PAUSE = 16, 256
"""Proposals without a dear part that does not pay, before it is tried again."""
TRIED = 2
"""Draft tokens that a trial lets be verified, whatever they promise: without a verdict nothing is learnt."""


class ComposedState(State):
    """The parts' states side by side, and per row how each part and kind of draft fared."""

    def __init__(self, parts: Sequence[State], num_rows: int) -> None:
        self.parts = tuple(parts)
        self.rows = [Evidence(len(parts), FORGET) for _ in range(num_rows)]
        self.late = [LateCommits() for _ in parts]
        self.lazy = False
        """Whether dear parts hear late of tokens that they did not draft: since a proposal with prices."""

    def reset(self, row: int) -> None:
        """Empty one row in every part."""
        for part, late in zip(self.parts, self.late, strict=True):
            part.reset(row)
            late.put_back(row, [])
        self.rows[row] = Evidence(len(self.parts), FORGET)

    def nbytes(self, row: int) -> int:
        """Bytes of the row in all parts and of its evidence."""
        return sum(part.nbytes(row) for part in self.parts) + len(self.parts) * BYTES_PER_PART

    def snapshot(self, row: int) -> dict[str, Any]:
        """Snapshots of all parts, what waits for them, and the evidence."""
        return {
            "parts": [part.snapshot(row) for part in self.parts],
            "late": [late.waiting(row) for late in self.late],
            "evidence": self.rows[row].saved(),
        }

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        """Put a snapshot back into every part."""
        for part, kept, late, pieces in zip(self.parts, saved["parts"], self.late, saved["late"], strict=True):
            part.restore(row, kept)
            late.put_back(row, pieces)
        self.rows[row].put_back(saved["evidence"])


class _Choice(NamedTuple):
    """The best part known so far for one row, and what it drafts."""

    part: int
    value: float  # expected accepted length; with prices, committed tokens per cost
    draft: Draft
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
        self._cheap = [p for p, drafter in enumerate(self._drafters) if drafter.cheap]
        self._dear = [p for p in range(len(drafters)) if p not in self._cheap]
        self.target_layer_ids = tuple(sorted({tap for d in self._drafters for tap in d.target_layer_ids}))
        self.target_kv_layers = tuple(sorted({layer for d in self._drafters for layer in d.target_kv_layers}))
        self._picks = [[self.target_layer_ids.index(tap) for tap in d.target_layer_ids] for d in self._drafters]
        self.max_draft_tokens = max(d.max_draft_tokens for d in self._drafters)
        self.samples = any(d.samples for d in self._drafters)
        self.recycles = any(d.recycles for d in self._drafters)
        self._record = Evidence(len(names), RECORD_FORGET)  # of all rows so far
        self._idle, self._pauses = [0] * len(names), [FIRST_PAUSE] * len(names)
        self._draft_sec, self._commit_sec = [0.0] * len(names), [0.0] * len(names)  # of a round, of dear parts
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
            if not drafter.cheap:
                self._commit_dear(state, new, p)
            else:
                drafter.commit(state.parts[p], replace(new, features=None, verdict=_own(new.verdict, p, name)))

    def _commit_dear(self, state: ComposedState, new: Commit, p: int) -> None:
        """Tokens of rows that the part has drafted go to it, with the verdict; with prices, those of others wait."""
        name, drafter, verdict = self.names[p], self._drafters[p], new.verdict
        features = new.features if self._picks[p] else None
        if features is not None and len(self._picks[p]) < features.shape[2]:
            features = features[:, :, self._picks[p]]
        mine = list(range(len(new.rows)))
        if state.lazy:  # long commits are prompts
            drafted = [verdict is not None and _is_from(verdict.drafts[b], name) for b in mine]
            mine = [b for b in mine if drafted[b] or len(new.tokens[b]) >= LATE_PIECES]
        began, full = time.perf_counter(), []
        for b, (row, tokens) in enumerate(zip(new.rows, new.tokens, strict=True)):
            if b not in mine and tokens:
                part = None if features is None else features[b, : len(tokens)]
                if state.late[p].add(row, tokens, part):
                    full.append(row)
        if mine or full:
            self._catch_up(state, [*(new.rows[b] for b in mine), *full], p, new.kv)
        if mine:
            own = replace(new, features=features, verdict=_own(verdict, p, name))
            drafter.commit(state.parts[p], _members(own, mine))
            if verdict is not None:
                self._commit_sec[p] = _follow(self._commit_sec[p], time.perf_counter() - began)

    def _catch_up(self, state: ComposedState, rows: Sequence[int], p: int, kv: TargetKV | None) -> None:
        late = state.late[p].take(rows, kv)
        if late is not None:
            self._drafters[p].commit(state.parts[p], late)

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Cheap parts draft for every row; the best other part drafts where it is expected to beat them."""
        assert isinstance(state, ComposedState)
        everyone = range(len(request.rows))
        choices: list[_Choice | None] = [None] * len(everyone)
        drafts: list[list[Draft | None]] = [[None] * len(self.names) for _ in everyone]  # of each row, by part
        num_nonfinite, state.lazy = 0, request.prices is not None

        def run(p: int, members: Sequence[int], at_least: int = 0) -> None:
            nonlocal num_nonfinite
            num_nonfinite += self._run(
                state, request=request, p=p, members=members, choices=choices, drafts=drafts, at_least=at_least
            )

        for p in self._cheap:
            run(p, everyone)
        chosen = self._choose_dear(state, request=request, choices=choices)
        trial = self._trial(request, choices, chosen)
        for p, members in chosen.items():
            run(p, members)
        if trial is not None:
            run(trial[0], [trial[1]], at_least=TRIED)
        return self._merge(choices, drafts, num_nonfinite=num_nonfinite)

    def use_kernels(self, kernels: Kernels | None) -> bool:
        """Each part that can."""
        served = [drafter.use_kernels(kernels) for drafter in self._drafters]
        return any(served)

    def cost(self, context_tokens: int) -> DraftCost:
        """Sum of the parts, and the evidence."""
        costs = [d.cost(context_tokens) for d in self._drafters]
        return DraftCost(
            state_bytes=sum(c.state_bytes for c in costs) + len(costs) * BYTES_PER_PART,
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
        drafts: list[list[Draft | None]],
        at_least: int,
    ) -> int:
        """Let part p draft for some rows of the request; keep it where it is the best so far. Returns NaN count."""
        part, prices, is_dear = self._drafters[p], request.prices, p not in self._cheap
        asked = _subset(request, members=members, part=part)  # drafts are cut here, for all alike
        if is_dear:
            self._catch_up(state, asked.rows, p, request.kv)
        began = time.perf_counter()
        proposal = part.propose(state.parts[p], asked)
        if is_dear:
            self._draft_sec[p] = _follow(self._draft_sec[p], time.perf_counter() - began)
        for i, b in enumerate(members):
            draft = drafts[b][p] = proposal.drafts[i]
            if not draft.tokens:
                continue
            scale = self._scale(state, row=request.rows[b], p=p, kind=draft.kind)
            if asked.draws and asked.draws[i]:  # by the past alone: samples may not be chosen by what they are
                rates = [min(1.0, PRIOR_RATE * scale)] * asked.num_tokens[i]
            elif is_dear:  # its record is in units of PRIOR_RATE, so it cannot scale what the part states
                record = min(1.0, PRIOR_RATE * scale)
                rates = [(rate + record) / 2 for rate in _stated(draft)]
            else:
                rates = [min(1.0, rate * scale) for rate in _stated(draft)]
            best_length, value = _best_length(rates, prices)
            length, best = min(max(best_length, at_least), len(draft.tokens)), choices[b]
            if length and (best is None or value > best.value):
                probs = None if proposal.probs is None else proposal.probs[i, :length]
                cut = Draft(draft.tokens[:length], rates[:length], self.names[p], draft.kind)
                choices[b] = _Choice(p, value, cut, probs)
        return proposal.num_nonfinite

    def _choose_dear(
        self, state: ComposedState, *, request: DraftRequest, choices: Sequence[_Choice | None]
    ) -> dict[int, list[int]]:
        """Dear part -> rows of the request where its record promises more than every other part."""
        prices, chosen = request.prices, dict[int, list[int]]()
        nothing = 1.0 / prices.forward[0] if prices else 0.0
        for b, choice in enumerate(choices):
            best, which = choice.value if choice else nothing, -1
            for p in self._dear:
                record = min(1.0, PRIOR_RATE * self._scale(state, row=request.rows[b], p=p, kind=0))
                most = min(request.num_tokens[b], self._drafters[p].max_draft_tokens)
                _, value = _best_length([record] * most, prices, self._draft_sec[p] + self._commit_sec[p])
                if value > best:  # the earlier one on a tie
                    best, which = value, p
            if which >= 0:
                chosen.setdefault(which, []).append(b)
        return chosen

    def _trial(
        self, request: DraftRequest, choices: Sequence[_Choice | None], chosen: dict[int, list[int]]
    ) -> tuple[int, int] | None:
        """With prices: a part that has not paid for long, and a row without any draft for it to be tried in."""
        if request.prices is None:
            return None
        for p in self._dear:
            if p in chosen:
                self._idle[p], self._pauses[p] = 0, FIRST_PAUSE
            else:
                self._idle[p] += 1
                free = next((b for b, choice in enumerate(choices) if choice is None), None)
                if self._idle[p] >= self._pauses[p] and not chosen and free is not None:
                    self._idle[p], self._pauses[p] = 0, min(2 * self._pauses[p], LAST_PAUSE)
                    return p, free
        return None

    def _scale(self, state: ComposedState, *, row: int, p: int, kind: int) -> float:
        """Tokens accepted over tokens expected, by the row's evidence for this part and kind. Before evidence 1, or
        with prices what all rows so far came to with this kind, and before that with all kinds of the part."""
        prior = self._record.scale(p, kind, self._record.scale_of_part(p)) if state.lazy else 1.0
        return state.rows[row].scale(p, kind, prior)

    def _learn(self, state: ComposedState, new: Commit, verdict: Verdict) -> None:
        """Score what each part drafted, chosen or not, also where nothing was chosen, by what the target said."""
        for b, (row, draft) in enumerate(zip(new.rows, verdict.drafts, strict=True)):
            if not new.tokens[b] or draft.notes is None:
                continue
            said = list(draft.tokens[: verdict.num_accepted[b]])
            if verdict.followers and (follower := verdict.followers[b]) is not None:
                said.append(follower)
            for p, own in enumerate(_notes(draft)):
                hits, tries = _agreement(own.tokens, said) if own is not None else (0, 0)
                if own is not None and tries:
                    expected = tries * PRIOR_RATE if p in self._dear else sum(_stated(own)[:tries])
                    state.rows[row].learn(p, own.kind, hits, expected)
                    self._record.learn(p, own.kind, hits, expected)

    def _merge(
        self, choices: Sequence[_Choice | None], drafts: Sequence[Sequence[Draft | None]], *, num_nonfinite: int
    ) -> Proposal:
        """One proposal from the rows' choices; point masses become one-hot where another row has probabilities."""
        spread = next((choice.probs for choice in choices if choice and choice.probs is not None), None)
        probs = None
        if spread is not None:
            width = max(len(choice.draft.tokens) for choice in choices if choice)
            probs = spread.new_zeros(len(choices), width, spread.shape[-1])
            for b, choice in enumerate(choices):
                if choice and choice.probs is not None:
                    probs[b, : len(choice.probs)] = choice.probs
                elif choice:
                    probs[b, range(len(choice.draft.tokens)), list(choice.draft.tokens)] = 1.0
        merged = [
            choice.draft._replace(notes=own) if choice else Draft(notes=own)
            for choice, own in zip(choices, drafts, strict=True)
        ]
        return Proposal(merged, probs, num_nonfinite)


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
    costs, drafting = prices.forward, draft_sec / prices.one_sec
    length, best, total, run = 0, 1.0 / costs[0], 1.0, 1.0
    for n, rate in enumerate(rates, start=1):
        run *= rate
        total += run
        value = total / (costs[n] + drafting)
        if value > best:
            length, best = n, value
    return length, best


def _follow(so_far: float, new: float) -> float:
    """A running mean of seconds, quick to fall: what happens once, or other work, only ever adds to them."""
    return so_far + (0.5 if new < so_far else 0.1) * (new - so_far) if so_far else new


def _members(new: Commit, members: Sequence[int]) -> Commit:
    """The commit of some of its rows."""
    if len(members) == len(new.rows):
        return new
    at, verdict = list(members), new.verdict
    if verdict is not None:
        verdict = Verdict(  # as parts hear it
            [verdict.drafts[b] for b in at],
            [verdict.num_accepted[b] for b in at],
            replies=[verdict.replies[b] for b in at] if verdict.replies else (),
        )
    tokens = [new.tokens[b] for b in at]
    features = None if new.features is None else new.features[at, : max(map(len, tokens))]
    return replace(new, rows=[new.rows[b] for b in at], tokens=tokens, features=features, verdict=verdict)


def _stated(draft: Draft) -> Sequence[float]:
    """Confidence of the drafts, PRIOR_RATE where the part states none."""
    return draft.confidence or [PRIOR_RATE] * len(draft.tokens)


def _notes(draft: Draft) -> list[Draft | None]:
    """What each part drafted in the round of a draft of ours."""
    assert isinstance(draft.notes, list)
    return draft.notes


def _is_from(draft: Draft, name: str) -> bool:
    return draft.source == name and len(draft.tokens) > 0


def _agreement(own: Sequence[int], said: Sequence[int]) -> tuple[int, int]:
    """Hits and tries of drafts against what the target said; what it would have said after that is not known."""
    hits, most = 0, min(len(own), len(said))
    while hits < most and own[hits] == said[hits]:
        hits += 1
    return hits, min(hits + 1, most)


def _subset(request: DraftRequest, *, members: Sequence[int], part: Drafter) -> DraftRequest:
    """The request to a part for some of its rows, as many tokens as it can, whatever they cost."""
    draws = [request.draws[b] for b in members] if request.draws and part.samples else []
    return DraftRequest(
        rows=[request.rows[b] for b in members],
        anchors=[request.anchors[b] for b in members],
        num_tokens=[min(request.num_tokens[b], part.max_draft_tokens) for b in members],
        draws=draws if any(draws) else None,
        kv=request.kv,
    )


def _own(verdict: Verdict | None, p: int, name: str) -> Verdict | None:
    """The verdict as one part sees it: nothing drafted in rows that another part drafted, but the target's replies."""
    if verdict is None:
        return None
    drafts = [_of_part(draft, p) if _is_from(draft, name) else NOTHING for draft in verdict.drafts]
    accepted = [n if draft.tokens else 0 for n, draft in zip(verdict.num_accepted, drafts, strict=True)]
    return Verdict(drafts, accepted, replies=verdict.replies)


def _of_part(draft: Draft, p: int) -> Draft:
    """What a part drafted, cut to what was verified."""
    own, count = _notes(draft)[p], len(draft.tokens)
    assert own is not None
    return own._replace(tokens=own.tokens[:count], confidence=own.confidence[:count])
