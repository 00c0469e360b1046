"""Nightjar's bandit: its schedule, what it learns from rounds, and what it loses on small seeded traces."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from length_policies import SAMPLE_TOKENS, Measured, Phase, measure, policies
from length_traces import walk

from hyflash.core import Request, SamplingParams
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.engine.nightjar import Acceptance, BinGreedy, NightjarLength
from hyflash.engine.replay import record
from hyflash.engine.round_costs import RoundCosts
from hyflash.errors import UserError
from toys import ScriptDrafter, ToyTarget, oracle

COSTS = {1: 1.0, 2: 1.1, 5: 1.5, 9: 2.2}


def play(
    policy: NightjarLength,
    num_rounds: int,
    *,
    accepted: int = 0,
    num_rows: int = 1,
    context: int = 0,
    most: int = 8,
    draft_ms: float = 0.1,
    busy: float = 1.0,
) -> list[int]:
    """Lengths of some rounds with COSTS in milliseconds; every row accepts `accepted` of what was asked."""
    table, stats = RoundCosts(COSTS, max_draft_tokens=8), [policy.new_stats() for _ in range(num_rows)]
    lengths = []
    for _ in range(num_rounds):
        most_now = min(most, policy.begin_round(num_rows=num_rows, context_tokens=context))
        asked = [policy.choose(s, most=most_now, num_rows=num_rows) for s in stats]
        assert len(set(asked)) == 1, "one length for all rows"
        lengths.append(asked[0])
        for s in stats:
            if asked[0]:
                policy.hears(s, num_asked=asked[0], num_drafted=asked[0])
            s.observe(asked[0], min(asked[0], accepted))
        width = num_rows * (asked[0] + 1)
        policy.observe_times(
            draft_sec=draft_ms / 1e3 if asked[0] else 0.0,
            verify_sec=(1 + busy * (table.forward(width) - 1)) / 1e3,
            width=width,
            num_rows=num_rows,
        )
    return lengths


# ------------------------------------------------------------------------------------------- schedule


def schedule(num_rounds: int, *, most_rounds: int = 1 << 30, try_rounds: int = 1 << 30, seed: int = 0) -> list[str]:
    bins, rng = BinGreedy(most_rounds=most_rounds, try_rounds=try_rounds), random.Random(seed)
    return [bins.next(rng) for _ in range(num_rounds)]


def test_blocks_double_their_first_bin_explores_and_bins_are_as_long_as_the_root() -> None:
    words = schedule(1023)
    for j in range(1, 11):
        size = 2 ** (j - 1)
        block = words[size - 1 : 2 * size - 1]
        starts = [i for i, word in enumerate(block) if word != "keep"]
        assert block[0] == "explore"
        assert starts == list(range(0, size, math.isqrt(size - 1) + 1 if size > 1 else 1))


def test_a_bin_explores_with_a_probability_of_one_over_its_number() -> None:
    size, bins = 256, 16
    blocks = [schedule(2 * size - 1, seed=seed)[size - 1 :] for seed in range(400)]
    for b in (1, 2, 4, 16):
        share = sum(block[(b - 1) * bins] == "explore" for block in blocks) / len(blocks)
        assert share == pytest.approx(1 / b, abs=0.06)


def test_blocks_stop_growing_and_tries_are_cut_short() -> None:
    words = schedule(15 + 50 * 16, most_rounds=16, try_rounds=2)
    blocks = [words[at : at + 16] for at in range(15, len(words), 16)]
    assert all(block[0] == "explore" for block in blocks), "exploring never ends"
    for block in blocks:
        for i, word in enumerate(block):
            if word == "explore":
                assert block[i + 1 : i + 3] == ["keep", "exploit"], "greedy again after two rounds, inside the bin"


@pytest.mark.parametrize("most_rounds", [1, 2, 3])
def test_the_smallest_blocks_have_a_choice_in_every_round_or_two(most_rounds: int) -> None:
    words = schedule(40, most_rounds=most_rounds)
    assert words.count("keep") <= 20
    assert words[0] == "explore"


# ------------------------------------------------------------------------------------------- learning


def test_acceptance_knows_other_lengths_and_carries_on_the_last_known_rate() -> None:
    fresh = Acceptance(3).tokens()
    assert fresh == pytest.approx([1, 1.5, 1.75, 1.875])
    seen = Acceptance(4)
    for _ in range(400):
        seen.observe(2, 2)
        seen.fade()
    assert seen.tokens() == pytest.approx([1, 2, 3, 4, 5], rel=0.08), "as if later places were like the second"
    for _ in range(400):
        seen.observe(4, 1)  # also what was asked for and not made
        seen.fade()
    one, two, three = seen.tokens()[1:4]
    assert (one, two, three) == pytest.approx((2, 2, 2), abs=0.1)
    assert Acceptance(0).tokens() == [1.0]


def test_nothing_accepted_ends_in_no_drafts_and_everything_in_the_longest() -> None:
    rejected = play(NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3), 400, accepted=0)
    assert rejected[-100:].count(0) > 85
    accepted = play(NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3), 400, accepted=8)
    assert accepted[-100:].count(8) > 80


def test_it_finds_drafting_again_after_the_text_has_changed() -> None:
    policy = NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3)
    play(policy, 600, accepted=0)
    assert play(policy, 400, accepted=8)[-100:].count(8) > 80


def test_measured_times_overrule_the_table() -> None:
    policy = NightjarLength({1: 1.0, 9: 1.01}, max_draft_tokens=8, one_sec=1e-3)  # drafts look free
    assert play(policy, 600, accepted=1, busy=20.0)[-100:].count(0) > 80


def test_plain_rounds_come_in_between_where_all_drafts_are_right() -> None:
    lengths = play(NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3), 400, accepted=8)
    runs = [len(list(run)) for drafts, run in itertools.groupby(lengths, key=bool) if drafts]
    assert max(runs) <= RoundCosts.MOST_SINCE_PLAIN


@pytest.mark.parametrize("seed", range(4))
def test_a_table_from_a_slow_moment_does_not_make_drafts_look_free(seed: int) -> None:
    policy = NightjarLength(COSTS, max_draft_tokens=8, one_sec=4e-3, seed=seed)  # a token takes 1 ms
    assert play(policy, 400, accepted=0)[-100:].count(0) > 80


@pytest.mark.parametrize("first", [0, 40])
def test_slow_moments_do_not_end_drafting_for_good(first: int) -> None:
    policy = NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3)
    play(policy, first, accepted=4)
    for _ in range(3):
        play(policy, 3, accepted=4, draft_ms=2000.0)  # other work held it up
        policy.observe_times(draft_sec=0.0, verify_sec=1e-3, width=1, num_rows=1)
    assert play(policy, 1500, accepted=4)[-100:].count(0) < 30


def test_equal_seeds_and_rounds_give_equal_lengths() -> None:
    runs = [play(NightjarLength(COSTS, one_sec=1e-3, seed=seed), 300, accepted=2) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_contexts_learn_apart() -> None:
    policy = NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3)
    play(policy, 300, accepted=3, num_rows=1)
    seen = len(policy._contexts)
    play(policy, 1, num_rows=2)
    play(policy, 1, num_rows=3)  # as 2
    play(policy, 1, num_rows=1, context=511)  # as 0
    play(policy, 1, num_rows=1, context=1024)
    play(policy, 1, num_rows=1, context=2047)  # as 1024
    assert (seen, len(policy._contexts)) == (1, 3)
    dear = play(policy, 400, accepted=3, context=5000, busy=30.0)
    assert dear[-100:].count(0) > 80
    assert play(policy, 30, accepted=3).count(0) < 15, "the short context is as cheap as it was"


def test_bringing_the_state_up_is_a_loss_of_the_switch_alone() -> None:
    policy = NightjarLength(COSTS, max_draft_tokens=4, one_sec=1e-3)

    def end_round(draft_sec: float) -> None:
        policy.begin_round(num_rows=1, context_tokens=0)
        policy.observe_times(draft_sec=draft_sec, verify_sec=1e-3, width=2, num_rows=1)

    for i in range(120):  # some pauses, so that the switching cost is known
        end_round((1e-3, 0.0, 21e-3, 1e-3)[i % 4])
    for _ in range(30):
        end_round(1e-3)
    arms = policy._arms
    assert arms is not None
    before = policy.losses(arms, 1)
    end_round(0.0)
    end_round(21e-3)  # one of work, twenty of late commits
    assert policy.losses(arms, 1)[1:] == pytest.approx(before[1:], rel=0.1), "no pause now, no loss"
    end_round(0.0)
    extra = [late - now for late, now in zip(policy.losses(arms, 1), before, strict=True)]
    assert extra[0] == pytest.approx(0, abs=1e-3)
    assert extra[1:] == pytest.approx([20e-3, 10e-3, 20e-3 / 3, 5e-3], rel=0.2)


def test_rounds_whose_rows_had_no_room_do_not_count_for_the_arm() -> None:
    policy = NightjarLength(COSTS, max_draft_tokens=8, one_sec=1e-3)
    play(policy, 200, accepted=8)
    arms = policy._arms
    assert arms is not None
    before = list(arms._rounds)
    assert set(play(policy, 20, accepted=1, most=1)) <= {0, 1}
    assert sum(arms._rounds) <= sum(before) + 20 * 0.2, "only arms 0 and 1 had what they asked for"


@pytest.mark.parametrize("costs", [{2: 1.0}, {1: 1.0, 2: 0.0}, {1: math.nan}])
def test_costs_that_no_forward_can_have_are_refused(costs: dict[int, float]) -> None:
    with pytest.raises(UserError):
        NightjarLength(costs)


def test_what_a_slow_moment_made_of_wide_rounds_is_forgotten_in_rounds_without_drafts() -> None:
    costs = RoundCosts({1: 1.0, 4: 1.3}, max_draft_tokens=3, one_sec=1e-3)

    def observe(width: int, seconds: float) -> None:
        costs.observe(draft_sec=0.0, verify_sec=seconds, width=width, num_rows=1)

    observe(1, 1e-3)
    for _ in range(10):
        observe(4, 5e-3)
    assert costs.forward(4) > 2.0
    for _ in range(500):
        observe(1, 1e-3)
    assert costs.forward(4) == pytest.approx(1.3, abs=0.02)
    observe(4, 1.1e-3)
    cheap = costs.forward(4)
    observe(1, 1e-3)
    assert costs.forward(4) == pytest.approx(cheap), "what looks cheap is tried, and then seen"


def test_cheap_rows_do_not_bend_what_is_known_of_dear_ones() -> None:
    costs = RoundCosts({1: 1.0, 2: 1.05, 9: 3.0}, max_draft_tokens=8, one_sec=1e-3, steadiness=0.25)
    costs.observe(draft_sec=0.0, verify_sec=1e-3, width=1, num_rows=1)
    for _ in range(200):
        costs.observe(draft_sec=1e-4, verify_sec=1.001e-3, width=2, num_rows=1)  # where 1.05 was expected
    assert costs.forward(9) == pytest.approx(3.0, rel=0.1)
    for _ in range(80):
        costs.observe(draft_sec=1e-4, verify_sec=5e-3, width=9, num_rows=1)
    assert costs.forward(9) == pytest.approx(5.0, rel=0.1)


# ---------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_the_text_is_that_of_plain_decoding(seed: int, wrong_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("hyflash.engine.decode.time.perf_counter", lambda: next(clock) / 1000)
    table = torch.randn(24, 24, generator=torch.Generator().manual_seed(seed)) * 2
    params = [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3}]
    requests = [
        Request(prompt_ids=(3, 4 + i), params=SamplingParams(max_tokens=80 - 9 * i, ignore_eos=True, **p))  # type: ignore[arg-type]
        for i, p in enumerate(params)
    ]
    plain = Engine(ToyTarget(table))
    want = [plain.generate([r])[0].token_ids for r in requests]
    target = ToyTarget(table)
    policy = NightjarLength(COSTS, max_draft_tokens=8, seed=seed)
    engine = Engine(target, ScriptDrafter(oracle(target, wrong_at=wrong_at), target.info), policy=policy)
    assert [r.token_ids for r in engine.generate(requests)] == want
    lengths = {r.num_drafted for result in [engine.generate([q])[0] for q in requests] for r in result.rounds}
    assert len(lengths) > 1, "several lengths were tried"
    assert max(lengths) <= 8


# ----------------------------------------------------------------------------------------------- traces


def texts(rate: float, num_arms: int = 6) -> list[list[int]]:
    """Accepted drafts at the places of some texts, each draft with the same chance."""
    rng = random.Random(0)
    return [
        [next((i for i in range(num_arms) if rng.random() >= rate), num_arms) for _ in range(150)] for _ in range(20)
    ]


def test_what_is_recorded_of_a_text_is_what_rounds_accept() -> None:
    target = ToyTarget(torch.randn(24, 24, generator=torch.Generator().manual_seed(4)), eos=())
    drafter = ScriptDrafter(lambda text, n: oracle(target, wrong_at=len(text) % 5)(text, n), target.info)
    request = Request(prompt_ids=(3, 4), params=SamplingParams(max_tokens=60))
    result = Engine(target, drafter, policy=FixedLength(3)).generate([request])[0]
    places = walk(drafter, record(target, (0,), result.prompt_ids, result.token_ids), 8)
    assert len(places) == 60
    at = 0
    for trace in result.rounds:
        assert trace.num_accepted == min(3, places[at])
        at += trace.num_committed
    assert at == 60


@pytest.fixture(scope="module")
def small() -> Measured:
    """Numbers of the size of measured ones; what real ones give is in docs/length.md."""
    return Measured(
        target="toy",
        drafter="toy",
        accepted={"prose": texts(0.4), "code": texts(0.9)},
        num_arms=6,
        forward_ms={
            128: {1: 7.0, 2: 7.5, 4: 8.9, 8: 11.7, 16: 16.7, 32: 31.0, 64: 61.0, 112: 110.0},
            8192: {1: 27.0, 8: 80.0, 32: 264.0},
        },
        noise=0.07,
        draft_ms=2.0,
        catch_up_ms=1.7,
    )


def shares(measured: Measured, phases: Sequence[Phase]) -> float:
    """Tokens per second of the bandit over the best fixed length's."""
    make = {"nightjar": policies(measured)["nightjar"]}
    known = {  # what the best of each phase would be is not asked here
        Phase(**{**_fields(p), "num_tokens": SAMPLE_TOKENS * p.num_rows}): 1.0 for p in phases
    }
    return float(measure(phases, measured, make, [0], known)["policies"]["nightjar"]["over_best_fixed"])


def _fields(phase: Phase) -> dict[str, object]:
    return {name: getattr(phase, name) for name in ("domain", "context", "num_rows", "busy")}


@pytest.mark.parametrize(
    "phase",
    [
        Phase(domain="prose", context=128, num_tokens=8000),
        Phase(domain="code", context=128, num_tokens=4000),
        Phase(domain="code", context=8192, num_tokens=2000),
        Phase(domain="prose", context=128, num_tokens=8000, num_rows=16),
    ],
    ids=["prose", "code", "long-context", "large-batch"],
)
def test_where_nothing_changes_it_is_within_three_per_cent_of_the_best_fixed_length(
    small: Measured, phase: Phase
) -> None:
    assert shares(small, [phase]) > 0.97


def test_where_domains_and_batches_change_it_is_above_every_fixed_length(small: Measured) -> None:
    domains = [Phase(domain=("prose", "code")[i % 2], context=128, num_tokens=1200) for i in range(6)]
    assert shares(small, domains) > 1.0
    rows = [Phase(domain="code", context=128, num_tokens=800 * n, num_rows=n) for n in (1, 16, 1, 16, 1, 16)]
    assert shares(small, rows) > 1.0
