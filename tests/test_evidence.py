"""The evidence of a composition: a prior first, then what was accepted over what was expected, older rounds less."""

from __future__ import annotations

import pytest

from hyflash.drafters.evidence import BYTES_PER_PART, NUM_KINDS, PRIOR_TOKENS, Evidence


@pytest.mark.parametrize("prior", [0.0, 0.3, 1.0, 1.7])
def test_before_evidence_there_is_the_prior(prior: float) -> None:
    fresh = Evidence(2, 0.9)
    assert [fresh.scale(1, kind, prior) for kind in (0, NUM_KINDS - 1, 10**6)] == pytest.approx([prior] * 3)
    assert fresh.scale(0, 0) == fresh.scale_of_part(0) == 1


def test_a_round_moves_its_own_part_and_kind_from_the_prior_towards_what_it_came_to() -> None:
    seen = Evidence(2, 0.9)
    seen.learn(1, 3, accepted=2, expected=6.5)
    assert seen.scale(1, 3) == pytest.approx((PRIOR_TOKENS + 2) / (PRIOR_TOKENS + 6.5))
    assert seen.scale(1, 3, 0.5) == pytest.approx((PRIOR_TOKENS * 0.5 + 2) / (PRIOR_TOKENS + 6.5))
    assert [seen.scale(part, kind) for part, kind in ((0, 3), (1, 2), (1, 4))] == [1, 1, 1]
    assert (seen.scale_of_part(0), seen.scale_of_part(1)) == (1, pytest.approx(seen.scale(1, 3)))


def test_all_kinds_of_a_part_together_are_its_sums() -> None:
    seen = Evidence(2, 0.9)
    for kind, accepted in ((0, 1), (5, 4), (NUM_KINDS + 1, 2)):
        seen.learn(0, kind, accepted=accepted, expected=3)
    assert seen.scale_of_part(0) == pytest.approx((PRIOR_TOKENS + 7) / (PRIOR_TOKENS + 9))


def test_older_rounds_of_the_same_kind_count_less_and_other_kinds_forget_nothing() -> None:
    seen = Evidence(1, 0.5)
    for accepted, kind in ((8, 0), (4, 1), (2, 0), (1, 0)):
        seen.learn(0, kind, accepted=accepted, expected=10)
    accepted, expected = seen.saved()
    assert accepted[0][:2] == [8 / 4 + 2 / 2 + 1, 4]
    assert expected[0][:2] == [10 / 4 + 10 / 2 + 10, 10]
    for _ in range(100):
        seen.learn(0, 0, accepted=0, expected=10)
    assert seen.scale(0, 0) == pytest.approx(PRIOR_TOKENS / (PRIOR_TOKENS + 20)), "the first rounds are forgotten"


def test_the_last_kind_takes_higher_ones() -> None:
    high, last = Evidence(1, 0.9), Evidence(1, 0.9)
    for kind in (NUM_KINDS - 1, NUM_KINDS, 10**6):
        high.learn(0, kind, accepted=1, expected=3)
        last.learn(0, NUM_KINDS - 1, accepted=1, expected=3)
    assert high.saved() == last.saved()
    assert high.scale(0, 10**6) == high.scale(0, NUM_KINDS) == high.scale(0, NUM_KINDS - 1) < 1
    assert high.scale(0, NUM_KINDS - 2) == 1


def test_a_snapshot_is_a_copy_in_both_directions() -> None:
    seen = Evidence(2, 0.9)
    seen.learn(0, 1, accepted=1, expected=2)
    saved, then = seen.saved(), seen.scale(0, 1)
    seen.learn(0, 1, accepted=0, expected=9)
    later = seen.saved()
    assert seen.scale(0, 1) < then
    one, two = Evidence(2, 0.9), Evidence(2, 0.9)
    one.put_back(saved)
    two.put_back(saved)
    assert one.saved() == two.saved() == saved
    one.learn(0, 1, accepted=0, expected=9)
    assert one.saved() == later, "it goes on as the one it was taken from"
    assert two.scale(0, 1) == then, "and reaches neither the snapshot nor another that was put back from it"


def test_a_part_takes_the_bytes_it_is_charged_with() -> None:
    assert 8 * sum(len(counts[0]) for counts in Evidence(1, 0.9).saved()) == BYTES_PER_PART
