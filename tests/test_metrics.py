"""Acceptance numbers against sums done by hand."""

from __future__ import annotations

import pytest

from hyflash.core import Result, RoundTrace
from hyflash.errors import UserError
from hyflash.metrics import bootstrap_interval, difference_interval, in_loop, quantile, summarize


def make_result(rounds: list[tuple[int, int, int]], token_ids: list[int] | None = None, prompt: int = 1) -> Result:
    """A result from (drafted, accepted, committed) triples; tokens count up unless given."""
    total = sum(committed for _, _, committed in rounds)
    ids = tuple(token_ids if token_ids is not None else range(100, 100 + total))
    assert len(ids) == total
    return Result(
        request_id=0,
        prompt_ids=(prompt,),
        token_ids=ids,
        text="",
        finish_reason="length",
        rounds=tuple(RoundTrace(num_drafted=d, num_accepted=a, num_committed=c) for d, a, c in rounds),
        ttft_sec=0.0,
        decode_sec=1.0,
        draft_state_bytes=0,
    )


# ---------------------------------------------------------------------------------------------- loops


def test_loop_of_one_token_counts_from_twelve_tokens_on() -> None:
    assert in_loop([7] * 12) == [True] * 12
    assert in_loop([7] * 11) == [False] * 11


def test_loop_of_four_tokens_needs_three_whole_periods() -> None:
    assert in_loop([1, 2, 3, 4] * 3) == [True] * 12
    assert in_loop([1, 2, 3, 4] * 2 + [1, 2, 3]) == [False] * 11


def test_loop_of_ten_tokens_needs_thirty() -> None:
    period = list(range(10))
    assert in_loop(period * 3) == [True] * 30
    assert in_loop((period * 3)[:29]) == [False] * 29


def test_period_of_48_is_a_loop_and_of_49_is_not() -> None:
    assert all(in_loop(list(range(48)) * 3))
    assert not any(in_loop(list(range(49)) * 3))


def test_only_the_repeating_run_is_marked() -> None:
    marks = in_loop([90, 91] + [5, 6] * 6 + [92, 93, 94])
    assert marks == [False] * 2 + [True] * 12 + [False] * 3


def test_two_loops_in_one_text_are_both_marked() -> None:
    marks = in_loop([1] * 12 + [50, 51, 52] + [8, 9] * 6)
    assert marks == [True] * 12 + [False] * 3 + [True] * 12


def test_empty_and_short_texts_have_no_loop() -> None:
    assert in_loop([]) == []
    assert in_loop([3]) == [False]
    assert in_loop([3, 3]) == [False, False]


# ----------------------------------------------------------------------------------------- acceptance


def test_pooled_tau_and_mean_of_requests_differ_as_they_must() -> None:
    long = make_result([(5, 3, 4)] * 3)  # 12 tokens in 3 rounds: 4.0
    short = make_result([(5, 0, 1)])  # 1 token in 1 round: 1.0
    got = summarize([long, short])
    assert got.tau == pytest.approx(13 / 4)
    assert got.tau_mean_of_requests == pytest.approx(2.5)
    assert (got.num_rounds, got.num_tokens, got.num_drafted, got.num_accepted) == (4, 13, 20, 9)


def test_stop_token_inside_a_block_counts_what_was_committed() -> None:
    # Five drafts, the fourth is the stop token: 4 accepted and 4 committed, no bonus token.
    got = summarize([make_result([(5, 4, 4)])])
    assert got.tau == 4.0
    # The fifth draft was never judged, so it is no rejection.
    assert got.acceptance_by_position == (1.0, 1.0, 1.0, 1.0)
    assert got.num_judged_by_position == (1, 1, 1, 1)


def test_stop_token_as_bonus_token_is_a_rejection_of_the_next_draft() -> None:
    got = summarize([make_result([(5, 2, 3)])])
    assert got.acceptance_by_position == (1.0, 1.0, 0.0)


def test_accepted_drafts_beyond_the_commit_do_not_count() -> None:
    got = summarize([make_result([(5, 5, 3)])])
    assert got.num_accepted == 3
    assert got.num_judged_by_position == (1, 1, 1)


def test_acceptance_is_conditional_on_everything_before() -> None:
    rounds = [(3, 3, 4), (3, 1, 2), (3, 0, 1), (2, 2, 3)]
    got = summarize([make_result(rounds)])
    assert got.num_judged_by_position == (4, 3, 1)
    assert got.acceptance_by_position == pytest.approx((3 / 4, 2 / 3, 1.0))


def test_rounds_without_drafts_count_as_rounds_but_judge_nothing() -> None:
    got = summarize([make_result([(0, 0, 1), (0, 0, 1)])])
    assert got.tau == 1.0
    assert got.acceptance_by_position == ()


def test_loop_free_tau_leaves_out_rounds_that_start_in_a_loop() -> None:
    ids = [1, 2, 3] + [9] * 12
    # Rounds start at tokens 0 (free), 3 (loop) and 9 (loop).
    got = summarize([make_result([(5, 2, 3), (5, 5, 6), (5, 5, 6)], ids)])
    assert got.tau == pytest.approx(15 / 3)
    assert got.tau_loop_free == pytest.approx(3.0)
    assert got.num_loop_free_rounds == 1
    assert got.loop_share == pytest.approx(2 / 3)


def test_loop_free_tau_is_none_when_all_is_loop() -> None:
    assert summarize([make_result([(5, 5, 6), (5, 5, 6)], [4] * 12)]).tau_loop_free is None


def test_no_results_and_no_rounds_give_zero() -> None:
    for results in ([], [make_result([])]):
        got = summarize(results)
        assert (got.tau, got.tau_mean_of_requests, got.num_rounds) == (0.0, 0.0, 0)
        assert got.tau_loop_free is None
        assert got.loop_share == 0.0


# ------------------------------------------------------------------------------------------ intervals


def test_interval_of_equal_prompts_has_no_width() -> None:
    got = bootstrap_interval([make_result([(2, 1, 2)])] * 5)
    assert (got.value, got.low, got.high) == (2.0, 2.0, 2.0)


def test_interval_holds_its_value_and_repeats_by_seed() -> None:
    results = [make_result([(4, i % 4, i % 4 + 1)] * (1 + i)) for i in range(12)]
    got = bootstrap_interval(results, seed=3)
    assert got.low < got.value < got.high
    assert got == bootstrap_interval(results, seed=3)
    assert got != bootstrap_interval(results, seed=4)


def test_difference_of_a_drafter_with_itself_is_zero() -> None:
    results = [make_result([(4, i % 4, i % 4 + 1)] * (1 + i), prompt=i) for i in range(6)]
    got = difference_interval(results, results)
    assert (got.value, got.low, got.high) == (0.0, 0.0, 0.0)


def test_difference_is_paired_by_prompt() -> None:
    a = [make_result([(4, i % 3 + 1, i % 3 + 2)] * 4, prompt=i) for i in range(9)]
    b = [make_result([(4, i % 3, i % 3 + 1)] * 4, prompt=i) for i in range(9)]
    got = difference_interval(a, b)
    assert (got.value, got.low, got.high) == pytest.approx((1.0, 1.0, 1.0))


def test_difference_of_other_prompts_is_refused() -> None:
    with pytest.raises(UserError, match="same prompts"):
        difference_interval([make_result([(1, 0, 1)], prompt=1)], [make_result([(1, 0, 1)], prompt=2)])


def test_interval_without_results_is_refused() -> None:
    with pytest.raises(UserError, match="at least one prompt"):
        bootstrap_interval([])


def test_quantile_interpolates() -> None:
    assert quantile([1.0], 0.9) == 1.0
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == pytest.approx(2.5)
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
