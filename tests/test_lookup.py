"""Prompt lookup: the longest most recent match is copied, the copy extends itself, and evidence moves confidence."""

from __future__ import annotations

import copy
import random
import tracemalloc

import pytest

from drafting import judged
from hyflash.core import Commit, Draft, DraftRequest, Proposal, Verdict
from hyflash.drafters import load_class, names, summary
from hyflash.drafters.lookup import PRIOR_RATES, DrafterImpl, LookupConfig, LookupState
from hyflash.errors import UserError
from toys import weightless_hooks


def make(**options: int) -> DrafterImpl:
    return DrafterImpl(LookupConfig.parse(options, where="test"), weightless_hooks())


def feed(drafter: DrafterImpl, state: LookupState, *texts: list[int], verdict: Verdict | None = None) -> None:
    drafter.commit(state, Commit(rows=range(len(texts)), tokens=texts, features=None, verdict=verdict))


def ask(drafter: DrafterImpl, state: LookupState, *anchors: int, count: int = 4) -> Proposal:
    request = DraftRequest(rows=range(len(anchors)), anchors=anchors, num_tokens=[count] * len(anchors))
    return drafter.propose(state, request)


def draft(text: list[int], *, count: int = 4, **options: int) -> Draft:
    """What is drafted after `text`, whose last token is the anchor."""
    drafter = make(**options)
    state = drafter.new_state(1)
    feed(drafter, state, text[:-1])
    return ask(drafter, state, text[-1], count=count).drafts[0]


def drafts(text: list[int], *, count: int = 4, **options: int) -> list[int]:
    """Its tokens."""
    return list(draft(text, count=count, **options).tokens)


def by_search(text: list[int], count: int, *, max_ngram: int = 3, min_ngram: int = 1) -> list[int]:
    """The same by plain search, token after token."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if n <= len(text) and text[end - n : end] == text[-n:]:
                grown = list(text)
                for i in range(count):
                    grown.append(grown[end + i])
                return grown[len(text) :]
    return []


def test_it_is_found_by_name_and_describes_itself() -> None:
    assert "lookup" in names()
    assert "compose" not in names()
    assert load_class("lookup") is DrafterImpl
    assert "lookup" in summary("lookup").lower()


def test_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    assert drafts([1, 2, 3, 7, 8, 3, 9, 9, 1, 2, 3], count=2) == [7, 8]


def test_most_recent_of_equal_matches_wins() -> None:
    assert drafts([5, 1, 5, 2, 5], count=1) == [2]


@pytest.mark.parametrize(
    ("text", "length"), [([1, 2], 0), ([1, 2, 1], 1), ([2, 1, 2, 1], 2), ([5, 1, 2, 3, 5, 1, 2, 3], 3)]
)
def test_the_kind_of_a_draft_is_the_length_of_its_match(text: list[int], length: int) -> None:
    found = draft(text)
    assert (found.kind, found.source) == (length, "lookup")
    assert bool(found.tokens) == bool(length)


def test_min_ngram_refuses_shorter_matches() -> None:
    text = [1, 2, 3, 9, 8, 3]
    assert drafts(text, count=2) == [9, 8]
    assert drafts(text, count=2, min_ngram=2) == []


def test_copy_past_the_end_repeats_the_period() -> None:
    assert drafts([4, 4], count=5) == [4] * 5
    assert drafts([9, 1, 2, 3, 1, 2, 3], count=7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafts([1, 2, 1], count=3) == [2, 1, 2]


@pytest.mark.parametrize("text", [[3], [3, 4], [1, 2, 3, 4]])
def test_text_without_repeats_drafts_nothing(text: list[int]) -> None:
    assert drafts(text) == []


def test_width_is_capped_by_the_option_and_the_request() -> None:
    assert len(drafts([4, 4], count=99)) == 10
    assert len(drafts([4, 4], count=99, max_draft_tokens=3)) == 3
    assert len(drafts([4, 4], count=1)) == 1


@pytest.mark.parametrize("options", [{}, {"min_ngram": 2}, {"max_ngram": 5}, {"max_ngram": 1}])
def test_proposals_equal_a_plain_search_on_random_texts(options: dict[str, int]) -> None:
    rng = random.Random(3)
    for _ in range(150):
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        assert drafts(text, count=6, **options) == by_search(text, 6, **options)


def test_large_token_ids_and_leading_zeros_are_told_apart() -> None:
    big = 2**32 - 1
    assert drafts([0, big, 7, big, 8, 0, big], count=1) == [7]
    assert drafts([0, 5, 1, 5, 2, 0, 5], count=1) == [1]


def test_propose_leaves_the_state_unchanged() -> None:
    drafter = make()
    state = drafter.new_state(2)
    feed(drafter, state, [1, 2, 1, 2], [5])
    before = copy.deepcopy([vars(row) for row in state.rows])
    first, second = (ask(drafter, state, 1, 5) for _ in range(2))
    assert [vars(row) for row in state.rows] == before
    assert first == second


def test_commit_in_pieces_is_commit_in_one() -> None:
    drafter, text = make(), [random.Random(1).randrange(5) for _ in range(60)]
    whole, pieces = drafter.new_state(1), drafter.new_state(1)
    feed(drafter, whole, text)
    start = 0
    for size in (1, 0, 7, 2, 30, 20):
        feed(drafter, pieces, text[start : start + size])
        start += size
    assert vars(whole.rows[0]) == vars(pieces.rows[0])


def test_a_row_in_a_ragged_batch_is_the_row_alone() -> None:
    drafter, texts = make(), [[1, 2, 1], [], [7, 7, 7, 8, 7]]
    batch = drafter.new_state(3)
    feed(drafter, batch, *texts)
    together = ask(drafter, batch, 2, 4, 7)
    assert [d.source for d in together.drafts] == ["lookup"] * 3
    assert [len(d.tokens) for d in together.drafts] == [4, 0, 4]
    for row, (text, anchor) in enumerate(zip(texts, (2, 4, 7), strict=True)):
        alone = drafter.new_state(1)
        feed(drafter, alone, text)
        assert ask(drafter, alone, anchor).drafts == [together.drafts[row]]


def test_no_match_anywhere_gives_empty_drafts_and_no_rows_none() -> None:
    drafter = make()
    state = drafter.new_state(2)
    assert ask(drafter, state, 3, 4).drafts == [Draft([], [], "lookup"), Draft([], [], "lookup")]
    assert ask(drafter, state).drafts == []


def test_reset_and_snapshots_are_exact_and_independent_of_later_commits() -> None:
    drafter = make()
    state = drafter.new_state(2)
    feed(drafter, state, [1, 2, 3], [4])
    feed(drafter, state, [1, 2], [], verdict=judged(ask(drafter, state, 1, 5, count=2), 1, 0))
    assert sum(state.rows[0].tried) == 2
    saved, before = state.snapshot(0), copy.deepcopy(vars(state.rows[0]))
    feed(drafter, state, [9, 9], [4])
    state.restore(0, saved)
    assert vars(state.rows[0]) == before
    feed(drafter, state, [9], [])
    state.restore(1, saved)
    assert vars(state.rows[1]) == before
    state.reset(0)
    assert vars(state.rows[0]) == vars(drafter.new_state(1).rows[0])


def test_confidence_starts_at_the_prior_and_grows_along_the_draft() -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2, 3])
    one, two, three = PRIOR_RATES
    assert ask(drafter, state, 1).drafts[0].confidence == [one, two, three, three]


def test_verdicts_on_its_own_proposals_move_the_confidence_of_that_match_length() -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2, 3, 4, 5, 6])
    prior = ask(drafter, state, 2).drafts[0].confidence
    for i in range(6):
        proposal = ask(drafter, state, 2, count=3)
        assert proposal.drafts[0].kind == 1
        assert proposal.drafts[0].tokens[0] == 3
        feed(drafter, state, [2, 3], verdict=judged(proposal, 1))  # the first draft was right, the second wrong
        feed(drafter, state, [50 + i])  # so that the next match is one of 1 again
    kept = state.rows[0]
    assert kept.rate(1) > prior[0]
    assert kept.rate(2) < prior[1]
    assert kept.rate(3) == kept.rate(9) == prior[2]
    assert all(0 < kept.rate(n) < 1 for n in (1, 2))


def test_a_draft_that_was_cut_counts_as_far_as_it_was_verified() -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2, 3, 4])
    proposal = ask(drafter, state, 1, count=3)
    feed(drafter, state, [1, 2], verdict=judged(proposal, 1, verified=1))
    assert state.rows[0].tried == [1, 0, 0]
    assert state.rows[0].accepted == [1, 0, 0]


@pytest.mark.parametrize(
    "seen", [None, Verdict([Draft()], [0]), Verdict([Draft(kind=1)], [0]), Verdict([Draft([2])], [1])]
)
def test_other_verdicts_change_nothing(seen: Verdict | None) -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2, 1, 2])
    feed(drafter, state, [1, 2], verdict=judged(ask(drafter, state, 1, count=2), 1))
    before = list(state.rows[0].tried), list(state.rows[0].accepted)
    assert sum(before[0]) == 2
    feed(drafter, state, [1], verdict=seen)
    assert (state.rows[0].tried, state.rows[0].accepted) == before


@pytest.mark.parametrize("tokens", [0, 1, 2, 1000])
@pytest.mark.parametrize("options", [{}, {"min_ngram": 3}, {"max_ngram": 1}])
def test_cost_is_the_bytes_a_row_reports(tokens: int, options: dict[str, int]) -> None:
    drafter = make(**options)
    state = drafter.new_state(1)
    feed(drafter, state, [i % 7 for i in range(tokens)])
    assert state.nbytes(0) == drafter.cost(tokens).total_bytes(tokens)


def test_reported_bytes_cover_what_the_interpreter_holds_for_unrepeated_text() -> None:
    drafter, rng = make(), random.Random(2)
    for tokens in (1000, 5500):  # 5500: hash tables that have just doubled
        text = [rng.randrange(49152) for _ in range(tokens)]
        state = drafter.new_state(1)
        tracemalloc.start()
        try:
            state.rows[0].append(text)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held <= state.nbytes(0) <= 2.5 * held


def test_bad_options_are_user_errors() -> None:
    for options in ({"min_ngram": 0}, {"min_ngram": 4}, {"max_ngram": 17}, {"max_draft_tokens": 0}, {"ngram": 2}):
        with pytest.raises(UserError, match=r"ngram|max_draft_tokens"):
            LookupConfig.parse(options, where="lookup")
