"""Composition: each row takes the part expected to have most accepted, and its own rounds move that expectation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from drafting import drafts, judged
from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Prices, Proposal, TargetHooks, TargetInfo, Verdict
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.drafters.compose import FORGET, TRIED, ComposedState, Composite
from hyflash.drafters.evidence import Evidence
from hyflash.drafters.late import LATE_PIECES
from hyflash.drafters.lookup import DrafterImpl as Lookup
from hyflash.drafters.lookup import LookupConfig
from hyflash.errors import UserError


def hooks() -> TargetHooks:
    info = TargetInfo(
        name="toy", fingerprint="0", family="toy", vocab_size=100, hidden_size=8, intermediate_size=8, num_layers=9,
        num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4, rms_norm_eps=1e-5, max_context=4096,
        eos_token_ids=(0,), dtype="float32",
    )  # fmt: skip

    def none(ids: Tensor) -> Tensor:
        raise AssertionError("not for these drafters")

    return TargetHooks(info=info, embed=none, head=none, head_rows=none)


class FakeState(State):
    def __init__(self, num_rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.features: list[list[list[float]]] = [[] for _ in range(num_rows)]

    def reset(self, row: int) -> None:
        self.tokens[row], self.features[row] = [], []

    def nbytes(self, row: int) -> int:
        return 8 * len(self.tokens[row]) + 100

    def snapshot(self, row: int) -> dict[str, Any]:
        return {"tokens": list(self.tokens[row]), "features": list(self.features[row])}

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        self.tokens[row], self.features[row] = list(saved["tokens"]), list(saved["features"])


class Fake(Drafter):
    """Drafts `token` over and over with one confidence; notes what it was called with."""

    Config = DrafterConfig

    def __init__(
        self,
        *,
        token: int = 1,
        taps: tuple[int, ...] = (),
        confidence: float | None = None,
        limit: int = 5,
        kind: int = 0,
        vocab: int = 0,
        positions: int | None = None,
        cheap: bool | None = None,
    ) -> None:
        super().__init__(DrafterConfig(), hooks())
        self.cheap = not taps if cheap is None else cheap
        self.token, self.confidence, self.kind, self.vocab = token, confidence, kind, vocab
        self.target_layer_ids, self.max_draft_tokens, self.max_positions = taps, limit, positions
        self.asked: list[tuple[int, ...]] = []
        self.verdicts: list[Verdict | None] = []
        self.empty_rows: set[int] = set()

    def new_state(self, num_rows: int) -> FakeState:
        return FakeState(num_rows)

    def commit(self, state: State, new: Commit) -> None:
        assert isinstance(state, FakeState)
        self.verdicts.append(new.verdict)
        for b, (row, tokens) in enumerate(zip(new.rows, new.tokens, strict=True)):
            state.tokens[row] += tokens
            if new.features is not None:
                state.features[row] += new.features[b, : len(tokens), :, 0].tolist()

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        self.asked.append(tuple(request.rows))
        lengths = [0 if row in self.empty_rows else n for row, n in zip(request.rows, request.num_tokens, strict=True)]
        stated = [] if self.confidence is None else [self.confidence]
        made = [Draft([self.token] * n, stated * n, kind=self.kind) for n in lengths]
        probs = None
        if self.vocab:
            probs = torch.full((len(lengths), max(lengths, default=0), self.vocab), 1 / self.vocab)
        return Proposal(made, probs, num_nonfinite=len(self.empty_rows.intersection(request.rows)))

    def cost(self, context_tokens: int) -> DraftCost:
        return DraftCost(
            state_bytes=100, kv_bytes_per_token=8, weight_bytes=7, propose_flops=5, commit_flops_per_token=3
        )


def lookup() -> Lookup:
    return Lookup(LookupConfig(), hooks())


def feed(
    drafter: Drafter,
    state: State,
    *texts: list[int],
    rows: tuple[int, ...] | None = None,
    verdict: Verdict | None = None,
) -> None:
    width, taps = max(len(text) for text in texts), len(drafter.target_layer_ids)
    layers = torch.tensor(drafter.target_layer_ids, dtype=torch.float32)  # a feature's value is its layer's number
    features = layers[None, None, :, None].expand(len(texts), width, taps, 2) if taps else None
    rows = tuple(range(len(texts))) if rows is None else rows
    drafter.commit(state, Commit(rows=rows, tokens=texts, features=features, verdict=verdict))


def ask(drafter: Drafter, state: State, *anchors: int, rows: tuple[int, ...] | None = None, count: int = 5) -> Proposal:
    rows = tuple(range(len(anchors))) if rows is None else rows
    return drafter.propose(state, DraftRequest(rows=rows, anchors=anchors, num_tokens=(count,) * len(rows)))


def sources(proposal: Proposal) -> list[str]:
    """The part that each row's draft is from."""
    return [draft.source for draft in proposal.drafts]


def evidence(state: ComposedState, part: int, kind: int = 0) -> tuple[float, float]:
    """Accepted and expected tokens that row 0 holds of a part."""
    accepted, expected = state.rows[0].saved()
    return accepted[part][kind], expected[part][kind]


def play(
    drafter: Composite, state: ComposedState, anchor: int, accepted: int, *, rounds: int, row: int = 0
) -> list[str]:
    """Rounds in which the target accepts `accepted` drafts; returns their sources."""
    seen = []
    for _ in range(rounds):
        proposal = ask(drafter, state, anchor, rows=(row,))
        seen += sources(proposal)
        run = proposal.drafts[0].tokens[:accepted]
        feed(drafter, state, [anchor, *run], rows=(row,), verdict=judged(proposal, accepted))
    return seen


def test_without_evidence_a_match_of_two_beats_the_block_drafter_and_a_match_of_one_does_not() -> None:
    block = Fake(token=50, taps=(1,), confidence=0.6)
    drafter = Composite([("lookup", lookup()), ("./block", block)])
    for count in (1, 2, 5, 10):
        state = drafter.new_state(4)
        feed(drafter, state, [1, 2, 3, 4], [1, 2, 3, 1], [1, 2, 3, 1, 2], [9])
        proposal = ask(drafter, state, 1, 2, 3, 8, count=count)
        assert sources(proposal) == ["./block", "lookup", "lookup", "./block"]
        first, second, third, fourth = drafts(proposal)
        assert first == fourth == [50] * min(count, 5)
        assert (second[0], third[0]) == (3, 1)
        assert len(second) == len(third) == count


def test_the_block_drafter_runs_only_for_the_rows_it_may_win() -> None:
    block = Fake(taps=(1,))
    drafter = Composite([("lookup", lookup()), ("block", block)])
    state = drafter.new_state(3)
    feed(drafter, state, [1, 2, 1], [5], [3, 3, 3])
    ask(drafter, state, 2, 6, 3)
    assert block.asked == [(1,)]
    ask(drafter, state, 2, 3, rows=(0, 2))
    assert block.asked == [(1,)]


def test_the_more_confident_part_wins_once_both_have_drafted() -> None:
    cheap = Fake(token=7, confidence=0.3)
    for confidence, winner in ((0.1, "cheap"), (0.9, "block"), (None, "block")):
        drafter = Composite([("cheap", cheap), ("block", Fake(token=8, taps=(0,), confidence=confidence))])
        proposal = ask(drafter, drafter.new_state(1), 1)
        assert sources(proposal) == [winner]
        assert drafts(proposal) == [[7 if winner == "cheap" else 8] * 5]


def test_rejections_move_the_choice_away_and_only_in_that_row() -> None:
    drafter = Composite([("cheap", Fake(token=7, confidence=0.8)), ("block", Fake(token=8, taps=(0,)))])
    state = drafter.new_state(2)
    seen = []
    for _ in range(20):  # the target takes 2 tokens of the block drafter and none of the cheap one
        proposal = ask(drafter, state, 3)
        accepted = 2 if sources(proposal) == ["block"] else 0
        feed(drafter, state, [3, *[8] * accepted], verdict=judged(proposal, accepted))
        seen += sources(proposal)
    change = seen.index("block")
    assert 1 <= change <= 8
    assert seen == ["cheap"] * change + ["block"] * (20 - change)
    assert sources(ask(drafter, state, 3, rows=(1,))) == ["cheap"]


def test_acceptance_moves_the_choice_back() -> None:
    drafter = Composite([("cheap", Fake(token=7, confidence=0.8)), ("block", Fake(token=8, taps=(0,)))])
    state = drafter.new_state(1)
    play(drafter, state, 3, 0, rounds=12)
    for _ in range(30):  # now the cheap one is right, and the block drafter is not
        proposal = ask(drafter, state, 3)
        accepted = 5 if sources(proposal) == ["cheap"] else 0
        feed(drafter, state, [3, *[7] * accepted], verdict=judged(proposal, accepted))
    assert sources(proposal) == ["cheap"]


def test_a_block_drafter_that_always_wins_is_run_even_where_lookup_matches() -> None:
    drafter = Composite([("lookup", lookup()), ("block", Fake(token=50, taps=(0,), confidence=0.9))])
    state = drafter.new_state(1)
    for step in range(12):  # new anchors: lookup has no match, the block drafter is right throughout
        proposal = ask(drafter, state, 60 + step)
        feed(drafter, state, [60 + step, *[50] * 5], verdict=judged(proposal, 5))
    feed(drafter, state, [1, 2, 3, 1])
    assert sources(ask(drafter, state, 2)) == ["block"]


def test_evidence_is_kept_apart_by_kind() -> None:
    cheap = Fake(token=7, confidence=0.8, kind=2)
    drafter = Composite([("cheap", cheap), ("block", Fake(token=8, taps=(0,)))])
    state = drafter.new_state(1)
    for _ in range(20):  # the target takes 2 tokens of the block drafter and none of the cheap one
        proposal = ask(drafter, state, 3)
        accepted = 2 if sources(proposal) == ["block"] else 0
        feed(drafter, state, [3, *[8] * accepted], verdict=judged(proposal, accepted))
    assert sources(ask(drafter, state, 3)) == ["block"]
    cheap.kind = 3
    assert sources(ask(drafter, state, 3)) == ["cheap"]
    cheap.kind = 10**6  # beyond the table: the last kind
    assert sources(ask(drafter, state, 3)) == ["cheap"]


def test_a_cheap_part_is_scored_on_rounds_that_another_part_drafted() -> None:
    cheap, block = Fake(token=7, confidence=0.2), Fake(token=7, taps=(0,), confidence=0.9)
    drafter = Composite([("cheap", cheap), ("block", block)])
    state = drafter.new_state(1)
    right = ask(drafter, state, 3)
    assert sources(right) == ["block"]
    feed(drafter, state, [3, 7, 7, 7], verdict=judged(right, 3))
    assert evidence(state, 0) == pytest.approx((3, 4 * 0.2))  # past what the target said is unknown
    assert evidence(state, 1) == pytest.approx((3, 4 * 0.45))
    cheap.token = 6
    wrong = ask(drafter, state, 3)
    assert sources(wrong) == ["block"]
    feed(drafter, state, [3, 7, 7, 7], verdict=judged(wrong, 3))
    assert evidence(state, 0) == pytest.approx((2.7, 0.9 * 4 * 0.2 + 0.2))
    last = ask(drafter, state, 3)
    feed(drafter, state, [3], verdict=Verdict(last.drafts, [0], [6]))
    assert evidence(state, 0) == pytest.approx((0.9 * 2.7 + 1, 0.9 * (0.9 * 4 * 0.2 + 0.2) + 0.2)), (
        "what the target said instead of a rejected draft was the other part's"
    )
    feed(drafter, state, [3], verdict=Verdict(ask(drafter, state, 3).drafts, [0], [None]))
    assert evidence(state, 0) == pytest.approx((0.9 * 2.7 + 1, 0.9 * (0.9 * 4 * 0.2 + 0.2) + 0.2)), (
        "a text that ended says nothing of what would have come"
    )


def test_rounds_without_a_draft_teach_too_so_that_a_part_that_turns_right_is_chosen_again() -> None:
    cheap = Fake(token=7, confidence=0.6)
    drafter = Composite([("cheap", cheap), ("other", Fake(confidence=0.0))])
    state = drafter.new_state(1)
    for _ in range(20):  # always wrong: soon it is not taken any more
        proposal = priced(drafter, state, 3, STEEP)
        feed(drafter, state, [3], verdict=judged(proposal, 0))
    assert sources(priced(drafter, state, 3, STEEP)) == [""]
    for _ in range(20):
        proposal = priced(drafter, state, 3, STEEP)
        if proposal.drafts[0].tokens:
            break
        feed(drafter, state, [3], verdict=Verdict(proposal.drafts, [0], [7]))
    assert sources(proposal) == ["cheap"]


def test_a_verdict_is_learnt_by_what_was_drafted_then_whatever_has_been_proposed_since() -> None:
    cheap, block = Fake(token=7, confidence=0.2, kind=1), Fake(token=7, taps=(0,), confidence=0.9)
    drafter = Composite([("cheap", cheap), ("block", block)])
    state, apart = drafter.new_state(2), drafter.new_state(2)
    first = ask(drafter, state, 3, 3)
    kept = copy.deepcopy(first)
    cheap.token, cheap.confidence, cheap.kind, block.empty_rows = 6, 0.4, 5, {0, 1}
    later = ask(drafter, state, 4, 4)
    assert (sources(first), sources(later)) == (["block"] * 2, ["cheap"] * 2)
    assert first == kept, "a proposal stays as it was made"
    assert state.rows[0].saved() == apart.rows[0].saved()
    feed(drafter, state, [3, 7, 7, 7], rows=(0,), verdict=Verdict(first.drafts[:1], [3], [5]))
    assert evidence(state, 0, kind=1) == pytest.approx((3, 4 * 0.2))
    assert evidence(state, 0, kind=5) == (0, 0)
    assert evidence(state, 1) == pytest.approx((3, 4 * 0.45))
    feed(drafter, apart, [3, 7, 7, 7], rows=(0,), verdict=Verdict(kept.drafts[:1], [3], [5]))
    assert state.rows[0].saved() == apart.rows[0].saved(), "as if there had been no other"
    assert state.rows[1].saved() == apart.rows[1].saved(), "the other row is not concerned"
    feed(drafter, state, [4, 6], rows=(0,), verdict=Verdict(later.drafts[:1], [1], [5]))
    assert evidence(state, 0, kind=5) == pytest.approx((1, 2 * 0.4))


def test_each_part_sees_the_verdicts_on_its_own_drafts_only() -> None:
    cheap, block = Fake(token=7, confidence=0.9), Fake(token=8, taps=(0,))
    drafter = Composite([("cheap", cheap), ("block", block)])
    state = drafter.new_state(2)
    cheap.empty_rows = {1}
    proposal = ask(drafter, state, 3, 3)
    assert sources(proposal) == ["cheap", "block"]
    feed(drafter, state, [3, 7], [3, 8, 8], verdict=judged(proposal, 1, 2))
    assert cheap.verdicts[-1] == Verdict([Draft([7] * 5, [0.9] * 5), Draft()], [1, 0])
    assert block.verdicts[-1] == Verdict([Draft(), Draft([8] * 5, [])], [0, 2])
    proposal = ask(drafter, state, 3, 3)
    assert proposal.drafts[0].confidence[0] < 0.9, "the composition states what the evidence makes of it"
    feed(drafter, state, [3, 7], [3, 8], verdict=judged(proposal, 1, 1, verified=2))
    assert cheap.verdicts[-1] == Verdict([Draft([7] * 2, [0.9] * 2), Draft()], [1, 0]), "a part hears what it stated"
    assert block.verdicts[-1] == Verdict([Draft(), Draft([8] * 2, [])], [0, 1])


def test_each_part_hears_what_the_target_said_after_the_drafts_of_all() -> None:
    cheap, block = Fake(token=7, confidence=0.9), Fake(token=8, taps=(0,))
    cheap.recycles = True
    drafter = Composite([("cheap", cheap), ("block", block)])
    assert drafter.recycles
    assert not Composite([("block", block), ("same", Fake())]).recycles
    state = drafter.new_state(2)
    cheap.empty_rows = {1}
    verdict = judged(ask(drafter, state, 3, 3), 1, 2)._replace(replies=[[(7, 5)], [(8, 6)]])
    feed(drafter, state, [3, 7], [3, 8, 8], verdict=verdict)
    assert [part.verdicts[-1].replies for part in (cheap, block)] == [[[(7, 5)], [(8, 6)]]] * 2


def test_lookup_inside_learns_from_its_own_verdicts_only() -> None:
    drafter = Composite([("lookup", lookup()), ("block", Fake(token=50, taps=(0,), confidence=0.9))])
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2, 3, 1])
    proposal = ask(drafter, state, 2)
    assert sources(proposal) == ["lookup"]
    feed(drafter, state, [2], verdict=judged(proposal, 0))
    assert state.parts[0].rows[0].tried == [0, 1, 0]
    feed(drafter, state, [9])
    proposal = ask(drafter, state, 1)
    assert sources(proposal) == ["block"]
    feed(drafter, state, [1], verdict=judged(proposal, 0))
    assert state.parts[0].rows[0].tried == [0, 1, 0]


def test_taps_are_the_sorted_union_and_each_part_gets_its_own_in_its_order() -> None:
    parts = [Fake(taps=(5, 2)), Fake(), Fake(taps=(2, 8, 4))]
    drafter = Composite([("a", parts[0]), ("b", parts[1]), ("c", parts[2])])
    assert drafter.target_layer_ids == (2, 4, 5, 8)
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2])
    assert [part.features[0] for part in state.parts] == [[[5.0, 2.0]] * 2, [], [[2.0, 8.0, 4.0]] * 2]
    assert Composite([("a", Fake()), ("b", lookup())]).target_layer_ids == ()


def test_propose_leaves_the_state_unchanged() -> None:
    drafter = Composite([("lookup", lookup()), ("block", Fake(taps=(0,)))])
    state = drafter.new_state(2)
    feed(drafter, state, [1, 2, 1], [4])
    play(drafter, state, 2, 1, rounds=3)
    before = [copy.deepcopy(state.snapshot(row)) for row in range(2)]
    first, second = ask(drafter, state, 2, 9), ask(drafter, state, 2, 9)
    assert_same([state.snapshot(row) for row in range(2)], before)
    assert first == second


def assert_same(a: Any, b: Any) -> None:
    """Equality through dicts, lists and tensors."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_commit_in_pieces_is_commit_in_one() -> None:
    drafter = Composite([("lookup", lookup()), ("block", Fake(taps=(0, 3)))])
    text = [1, 2, 3, 1, 2, 3, 4, 1, 2]
    whole, pieces = drafter.new_state(1), drafter.new_state(1)
    feed(drafter, whole, text)
    for start, stop in ((0, 1), (1, 1), (1, 6), (6, 9)):
        feed(drafter, pieces, text[start:stop])
    assert_same(whole.snapshot(0), pieces.snapshot(0))
    proposal = ask(drafter, whole, 3)
    run = list(proposal.drafts[0].tokens[:3])
    feed(drafter, whole, [3, *run], verdict=judged(proposal, 3))
    feed(drafter, pieces, [3, *run[:1]], verdict=judged(proposal, 3))
    feed(drafter, pieces, run[1:])
    assert_same(whole.snapshot(0), pieces.snapshot(0))


def test_a_row_in_a_ragged_batch_is_the_row_alone() -> None:
    texts, anchors = ([1, 2, 1], [], [7] * 6, [5, 6]), (2, 3, 7, 9)
    drafter = Composite([("lookup", lookup()), ("block", Fake(token=50, taps=(0,), limit=3))])
    batch = drafter.new_state(4)
    feed(drafter, batch, *texts)
    proposal = ask(drafter, batch, *anchors)
    seen = judged(proposal, *(min(2, len(tokens)) for tokens in drafts(proposal)))
    committed = [[a, *seen.drafts[b].tokens[: seen.num_accepted[b]]] for b, a in enumerate(anchors)]
    feed(drafter, batch, *committed, verdict=seen)
    for b, anchor in enumerate(anchors):
        alone = drafter.new_state(1)
        feed(drafter, alone, texts[b])
        single = ask(drafter, alone, anchor)
        assert single.drafts == [proposal.drafts[b]]
        feed(drafter, alone, committed[b], verdict=judged(single, seen.num_accepted[b]))
        assert_same(alone.snapshot(0), batch.snapshot(b))


def test_reset_and_restore_reach_every_part_and_the_evidence() -> None:
    drafter = Composite([("lookup", lookup()), ("block", Fake(taps=(0,)))])
    state = drafter.new_state(2)
    fresh = copy.deepcopy(state.snapshot(0))
    feed(drafter, state, [1, 2, 1], [4])
    play(drafter, state, 2, 1, rounds=2)
    saved = state.snapshot(0)
    kept = copy.deepcopy(saved)
    play(drafter, state, 2, 0, rounds=2)
    assert_same(saved, kept)
    state.restore(1, saved)
    play(drafter, state, 2, 0, rounds=2, row=1)
    state.restore(0, saved)
    assert_same(state.snapshot(0), kept)
    state.reset(0)
    assert_same(state.snapshot(0), fresh)


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_cost_is_the_sum_of_the_parts_and_equals_the_reported_bytes(tokens: int) -> None:
    drafter = Composite([("lookup", lookup()), ("block", Fake(taps=(0,)))])
    state = drafter.new_state(1)
    feed(drafter, state, [i % 5 for i in range(tokens)])
    cost = drafter.cost(tokens)
    assert cost.total_bytes(tokens) == state.nbytes(0)
    assert (cost.weight_bytes, cost.propose_flops, cost.commit_flops_per_token) == (7, 5, 3)


def test_a_part_that_fails_falls_back_to_a_weaker_cheap_draft_or_to_none() -> None:
    block = Fake(token=8, taps=(0,))
    block.empty_rows = {0, 1}
    drafter = Composite([("lookup", lookup()), ("block", block)])
    state = drafter.new_state(3)
    feed(drafter, state, [1, 2], [4], [4])
    proposal = ask(drafter, state, 1, 5, 5)
    assert sources(proposal) == ["lookup", "", "block"]
    assert [len(tokens) for tokens in drafts(proposal)] == [5, 0, 5]
    assert proposal.num_nonfinite == 2
    feed(drafter, state, [1], [5], [5], verdict=judged(proposal, 0, 0, 0))
    assert state.rows[1].saved() == Evidence(2, FORGET).saved() != state.rows[0].saved()


def test_no_proposal_at_all_is_an_empty_draft_for_each_row() -> None:
    drafter = Composite([("lookup", lookup()), ("again", lookup())])
    state = drafter.new_state(2)
    empty = ask(drafter, state, 3, 4)
    assert [draft._replace(notes=None) for draft in empty.drafts] == [Draft(), Draft()]
    assert ask(drafter, state) == Proposal([])


def test_point_masses_become_one_hot_beside_a_part_with_probabilities() -> None:
    drafter = Composite(
        [("cheap", Fake(token=2, confidence=0.9)), ("block", Fake(token=3, taps=(0,), limit=2, vocab=4))]
    )
    state = drafter.new_state(2)
    drafter.parts[0].empty_rows = {1}
    proposal = ask(drafter, state, 1, 1, count=3)
    assert sources(proposal) == ["cheap", "block"]
    assert proposal.probs.shape == (2, 3, 4)
    assert proposal.probs[0].tolist() == [[0, 0, 1, 0]] * 3
    assert proposal.probs[1].tolist() == [[0.25] * 4] * 2 + [[0] * 4]


def test_the_better_of_two_block_drafters_is_run_alone() -> None:
    short, long = Fake(taps=(0,), limit=2), Fake(taps=(1,), limit=4)
    drafter = Composite([("short", short), ("long", long)])
    assert sources(ask(drafter, drafter.new_state(1), 1)) == ["long"]
    assert (short.asked, long.asked) == ([], [(0,)])
    assert sources(ask(drafter, drafter.new_state(1), 1, count=1)) == ["short"]  # a tie goes to the earlier


def test_limits_come_from_the_parts() -> None:
    drafter = Composite([("a", Fake(limit=3, positions=90)), ("b", Fake(limit=7)), ("c", Fake(positions=70))])
    assert (drafter.max_draft_tokens, drafter.max_positions) == (7, None)
    assert Composite([("a", Fake()), ("b", lookup())]).max_positions is None


@pytest.mark.parametrize("given", [[], ["a"], ["a", "a"]])
def test_composing_needs_two_names(given: list[str]) -> None:
    with pytest.raises(UserError, match="at least two"):
        Composite([(name, Fake()) for name in given])


# --------------------------------------------------------------------------------------------- prices


def rising(slope: float, one_sec: float = 1e9) -> Prices:
    """Each draft token, of at most five, costs this much of a forward; drafting takes no share of so slow a one."""
    return Prices(forward=[1.0 + slope * k for k in range(6)], one_sec=one_sec)


FLAT, STEEP = rising(0.01), rising(0.5)
"""Rows that cost next to nothing, and half a forward each."""
DEAR = rising(0.5, one_sec=1e-9)
"""Beside so fast a forward any draft pass takes forever."""


def priced(
    drafter: Drafter, state: State, anchor: int, prices: Prices | None, *, row: int = 0, count: int = 5
) -> Proposal:
    return drafter.propose(state, DraftRequest(rows=[row], anchors=[anchor], num_tokens=[count], prices=prices))


@pytest.mark.parametrize(("rate", "length"), [(0.0, 0), (0.3, 0), (0.55, 1), (0.8, 2), (1.0, 5)])
def test_drafts_are_cut_where_the_next_costs_more_than_it_promises(rate: float, length: int) -> None:
    # Half a forward a row: 1, (1 + r) / 1.5, (1 + r + r^2) / 2 ...
    rates = [sum(rate**i for i in range(n + 1)) / (1 + 0.5 * n) for n in range(6)]
    assert rates.index(max(rates)) == length
    drafter = Composite([("cheap", Fake(token=7, confidence=rate)), ("other", Fake(confidence=0.0))])
    proposal = priced(drafter, drafter.new_state(1), 3, STEEP)
    assert drafts(proposal) == [[7] * length]
    assert drafts(priced(drafter, drafter.new_state(1), 3, None)) == [[7] * 5]


def test_a_part_that_takes_too_long_runs_only_on_trial_and_its_draft_is_judged_then() -> None:
    block = Fake(token=8, taps=(0,))
    cheap = Fake(token=7)
    cheap.empty_rows = {0}
    drafter = Composite([("cheap", cheap), ("block", block)])
    state = drafter.new_state(1)
    priced(drafter, state, 3, FLAT)  # how long it takes is known only now
    runs = []
    for i in range(200):
        before = len(block.asked)
        proposal = priced(drafter, state, 3, DEAR)
        if len(block.asked) > before:
            runs.append(i)
            assert (drafts(proposal), sources(proposal)) == ([[8] * TRIED], ["block"])
        else:
            assert drafts(proposal) == [[]]
        feed(drafter, state, [3], verdict=judged(proposal, 0))
    assert runs == [15, 15 + 32, 15 + 32 + 64], "pauses double"
    assert drafts(priced(drafter, state, 3, None)) == [[8] * 5], "without prices it drafts as ever"


def test_a_part_with_features_hears_late_of_what_it_did_not_draft() -> None:
    block, cheap = Fake(token=8, taps=(4,)), Fake(token=7, confidence=0.9)
    drafter = Composite([("cheap", cheap), ("block", block)])
    state = drafter.new_state(2)
    feed(drafter, state, [1, 2], [9])
    assert state.parts[1].tokens == [[1, 2], [9]]
    for row, anchor in ((0, 5), (1, 6), (0, 5)):
        proposal = priced(drafter, state, anchor, FLAT, row=row)
        assert sources(proposal) == ["cheap"]
        feed(drafter, state, [anchor, 7], rows=(row,), verdict=judged(proposal, 1))
    assert state.parts[0].tokens == [[1, 2, 5, 7, 5, 7], [9, 6, 7]]
    assert state.parts[1].tokens == [[1, 2], [9]], "not yet"
    saved, other = state.snapshot(0), drafter.new_state(1)
    cheap.empty_rows = {0}
    assert sources(priced(drafter, state, 5, FLAT)) == ["block"]
    assert state.parts[1].tokens == [[1, 2, 5, 7, 5, 7], [9]]
    assert state.parts[1].features[0] == [[4.0]] * 6, "features go with their tokens"
    other.restore(0, saved)
    assert sources(priced(drafter, other, 5, FLAT)) == ["block"]
    assert other.parts[1].tokens == [[1, 2, 5, 7, 5, 7]], "a snapshot has what waits"
    state.reset(1)
    cheap.empty_rows = {0, 1}
    priced(drafter, state, 5, FLAT, row=1)
    assert state.parts[1].tokens[1] == [], "a reset row forgets what waits"


def test_a_network_without_features_is_as_dear_as_one_with_them() -> None:
    model, block, cheap = Fake(token=8, cheap=False), Fake(token=9, taps=(4,)), Fake(token=7, confidence=0.9)
    drafter = Composite([("cheap", cheap), ("model", model), ("block", block)])
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2])
    assert state.parts[1].tokens == [[1, 2]]
    assert state.parts[1].features == [[]], "it reads none, whatever others read"
    proposal = priced(drafter, state, 5, FLAT)
    assert sources(proposal) == ["cheap"]
    assert model.asked == [], "it does not run where a cheap part promises more"
    feed(drafter, state, [5, 7], verdict=judged(proposal, 1))
    assert state.parts[1].tokens == [[1, 2]], "not yet"
    cheap.empty_rows = {0}
    assert sources(priced(drafter, state, 5, FLAT)) == ["model"]
    assert state.parts[1].tokens == [[1, 2, 5, 7]]
    assert state.parts[1].features == [[]]
    assert block.asked == []


def test_late_tokens_are_committed_when_there_are_many_and_before_a_prompt() -> None:
    block, cheap = Fake(token=8, taps=(4,)), Fake(token=7, confidence=0.9)
    drafter = Composite([("cheap", cheap), ("block", block)])
    state = drafter.new_state(1)
    for i in range(LATE_PIECES):
        assert state.parts[1].tokens[0] == []
        feed(drafter, state, [i], verdict=judged(priced(drafter, state, i, FLAT), 5))
    assert state.parts[1].tokens[0] == list(range(LATE_PIECES))
    feed(drafter, state, [1], verdict=judged(priced(drafter, state, 1, FLAT), 0))
    feed(drafter, state, [2] * LATE_PIECES)
    assert state.parts[1].tokens[0] == [*range(LATE_PIECES), 1, *[2] * LATE_PIECES]


def test_verdicts_without_prices_reach_the_parts_at_once() -> None:
    block, cheap = Fake(token=8, taps=(4,)), Fake(token=7, confidence=0.9)
    drafter = Composite([("cheap", cheap), ("block", block)])
    state = drafter.new_state(1)
    feed(drafter, state, [3], verdict=judged(priced(drafter, state, 3, FLAT), 0))
    assert state.parts[1].tokens[0] == []
    feed(drafter, state, [4], verdict=judged(priced(drafter, state, 4, None), 0))
    assert state.parts[1].tokens[0] == [3, 4]


def test_with_prices_a_part_that_was_always_wrong_is_not_tried_anew_in_the_next_row() -> None:
    prices = rising(0.1)
    cheap, other = Fake(token=7, confidence=0.5), Fake(token=8, confidence=0.0)
    drafter = Composite([("cheap", cheap), ("other", other)])
    state = drafter.new_state(2)
    tries = []
    for kind in (0, 1, 2, 3):
        cheap.kind = kind
        tries.append(0)
        for _ in range(30):
            proposal = priced(drafter, state, 3, prices)
            if proposal.drafts[0].tokens:
                tries[-1] += 1
                feed(drafter, state, [3], verdict=judged(proposal, 0))
    assert tries[0] > tries[1] > tries[2] >= tries[3] > 0, "other kinds know of the first"
    dearer = rising(0.2)
    assert drafts(priced(drafter, state, 3, dearer, row=1)) == [[]], "and so does a new row"
    fresh = Composite([("cheap", cheap), ("other", other)])
    assert drafts(priced(fresh, fresh.new_state(2), 3, dearer, row=1)) > [[]]
    assert drafts(priced(drafter, state, 3, None, row=1)) == [[7] * 5], "without prices a row starts afresh"
