"""The engine over a toy target: commits, stops, budgets, batches, faults. Plain decoding is the reference."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Sequence

import pytest
import torch

from hyflash.core import Request, Result, Rows, SamplingParams, TargetOutput, Verdict
from hyflash.drafters.late import LATE_PIECES
from hyflash.engine.decode import Engine
from hyflash.engine.length import AdaptiveLength, FixedLength, LengthPolicy, RowStats
from hyflash.errors import UserError
from toys import ScriptDrafter, ToyTarget, oracle

CHAIN = [5, 6, 7, 2, 9, 10]


def run(target: ToyTarget, drafter: ScriptDrafter | None, prompt: list[int], k: int = 0, **params: object) -> Result:
    engine = Engine(target, drafter, policy=FixedLength(k))
    result = engine.generate([Request(prompt_ids=tuple(prompt), params=SamplingParams(**params))])[0]  # type: ignore[arg-type]
    assert not target.cached, "a finished request must free its sequence"
    return result


def random_table(seed: int, vocab: int = 24) -> torch.Tensor:
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_eos_inside_the_block_ends_the_text_and_counts_committed_tokens() -> None:
    target = ToyTarget.chain(CHAIN)
    drafter = ScriptDrafter(lambda text, n: [6, 7, 2, 9, 10], target.info)
    got = run(target, drafter, [1, 5], k=5, max_tokens=20)
    assert got.token_ids == (6, 7, 2)
    assert got.finish_reason == "stop"
    assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in got.rounds] == [(5, 3, 3)]
    assert got.acceptance_length == 3.0
    assert got.token_ids == run(ToyTarget.chain(CHAIN), None, [1, 5], max_tokens=20).token_ids


@pytest.mark.parametrize(
    ("script", "rounds"),
    [([6, 7], [(2, 2, 3)]), ([2, 9], [(2, 0, 1), (2, 0, 1), (2, 1, 1)]), ([], [(0, 0, 1)] * 3)],
    ids=["eos-is-the-bonus", "eos-first-in-block", "empty-proposal"],
)
def test_eos_at_every_place_gives_the_plain_text(script: list[int], rounds: list[tuple[int, int, int]]) -> None:
    target = ToyTarget.chain(CHAIN)
    got = run(target, ScriptDrafter(lambda text, n: script, target.info), [1, 5], k=5, max_tokens=20)
    assert got.token_ids == (6, 7, 2)
    assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in got.rounds] == rounds


@pytest.mark.parametrize("eos", [(7, 2, 30), (2,), (30, 2)])
def test_several_stop_ids_stop_at_the_first(eos: tuple[int, ...]) -> None:
    target = ToyTarget.chain(CHAIN, eos=eos)
    want = (6, 7) if 7 in eos else (6, 7, 2)
    assert run(target, ScriptDrafter(oracle(target), target.info), [5], k=7, max_tokens=9).token_ids == want


def test_ignore_eos_goes_on_past_it_in_a_block() -> None:
    target = ToyTarget.chain(CHAIN)
    got = run(target, ScriptDrafter(oracle(target), target.info), [5], k=5, max_tokens=6, ignore_eos=True)
    assert got.token_ids == (6, 7, 2, 9, 10, 11)
    assert got.finish_reason == "length"


def test_min_tokens_masks_stop_ids_until_then() -> None:
    plain = run(ToyTarget.chain(CHAIN), None, [5], max_tokens=12, min_tokens=6)
    target = ToyTarget.chain(CHAIN)
    got = run(target, ScriptDrafter(oracle(target), target.info), [5], k=5, max_tokens=12, min_tokens=6)
    assert got.token_ids == plain.token_ids
    assert len(plain.token_ids) >= 6
    assert 2 not in plain.token_ids[:5]


def test_any_token_as_stop_id_cuts_where_plain_decoding_meets_it_first() -> None:
    target = ToyTarget(random_table(3))
    plain = run(ToyTarget(random_table(3)), None, [4], max_tokens=24, ignore_eos=True).token_ids
    for at in (0, 5, 11):
        stop = plain[at]
        want = plain[: plain.index(stop) + 1]
        for k in (1, 3, 7, 15):
            drafter = ScriptDrafter(oracle(target, wrong_at=5), target.info)
            got = run(target, drafter, [4], k=k, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
            assert got.token_ids == want


class BestOnly(ToyTarget):
    """Tells the best logits where only they are wanted, and notes how many were."""

    asked: list[int]

    def forward(self, rows: Rows) -> TargetOutput:
        self.asked.append(rows.top)
        out = super().forward(rows)
        if not rows.top or out.logits is None:
            return out
        top = out.logits.topk(rows.top)
        return TargetOutput(
            logits=None, features=out.features, top_ids=top.indices.tolist(), top_values=top.values.tolist()
        )


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_best_logits_alone_decide_what_all_logits_would(wrong_at: int | None) -> None:
    params = [{}, {"ignore_eos": True}, {"stop_token_ids": (7,)}, {"temperature": 0.8, "seed": 3}, {"logprobs": 1}]
    for exact, epsilon, top in (("auto", 0.0, 1), ("recheck", 0.5, 2)):
        for chosen in (params[:3], params):
            requests = [
                Request(prompt_ids=(4, 5 + i), params=SamplingParams(max_tokens=30, **p))  # type: ignore[arg-type]
                for i, p in enumerate(chosen)
            ]
            texts = []
            for kind in (ToyTarget, BestOnly):
                target = kind(random_table(1))
                target.epsilon, target.asked = epsilon, []  # type: ignore[attr-defined]
                engine = Engine(
                    target,
                    ScriptDrafter(oracle(target, wrong_at=wrong_at), target.info),
                    policy=FixedLength(4),
                    exact=exact,  # type: ignore[arg-type]
                )
                texts.append([r.token_ids for r in engine.generate(requests)])
                counts = engine.counters
            assert texts[0] == texts[1]
            if len(chosen) == 3:  # nobody needs more
                assert top in target.asked  # type: ignore[attr-defined]
            assert set(target.asked) <= {0, top}  # type: ignore[attr-defined]
            if exact == "recheck":
                assert counts["near_ties"] > 0


def test_budget_is_met_exactly_and_the_last_block_is_clipped() -> None:
    for k in (1, 4, 7, 15):
        target = ToyTarget.chain([])
        drafter = ScriptDrafter(oracle(target), target.info)
        for budget in range(1, 41):
            got = run(target, drafter, [1, 2], k=k, max_tokens=budget, ignore_eos=True)
            assert len(got.token_ids) == budget
            assert got.finish_reason == "length"
            assert sum(r.num_committed for r in got.rounds) == budget
            assert all(r.num_committed <= r.num_drafted + 1 for r in got.rounds)
        assert max(n for lengths in target.forwards for n in lengths) <= k + 1


def test_stop_before_the_cap_wins_and_cap_before_the_stop_wins() -> None:
    chain = [10, 11, 12, 2, 20, 21, 22]
    target = ToyTarget.chain(chain)
    got = run(target, ScriptDrafter(oracle(target), target.info), [10], k=6, max_tokens=5)
    assert (got.token_ids, got.finish_reason) == ((11, 12, 2), "stop")
    got = run(target, ScriptDrafter(oracle(target), target.info), [10], k=6, max_tokens=2)
    assert (got.token_ids, got.finish_reason) == ((11, 12), "length")


def test_context_end_stops_with_length_and_never_overflows() -> None:
    target = ToyTarget.chain([], max_context=16, eos=())
    got = run(target, ScriptDrafter(oracle(target), target.info), list(range(13)), k=7, max_tokens=50)
    assert (len(got.token_ids), got.finish_reason) == (3, "length")


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 2, 3, 6])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.5}], ids=str)
def test_text_does_not_depend_on_draft_quality_or_length(wrong_at: int | None, params: dict[str, float]) -> None:
    want = run(ToyTarget(random_table(1)), None, [4, 5], max_tokens=60, **params).token_ids
    for k in (1, 2, 4, 8, 16):
        target = ToyTarget(random_table(1))
        got = run(
            target, ScriptDrafter(oracle(target, wrong_at=wrong_at), target.info), [4, 5], k=k, max_tokens=60, **params
        )
        assert got.token_ids == want


def test_a_batch_row_equals_the_row_alone_with_ragged_lengths_and_mixed_settings() -> None:
    rng = random.Random(0)
    requests = [
        Request(
            prompt_ids=tuple(rng.randrange(24) for _ in range(rng.randrange(1, 20))),
            params=SamplingParams(max_tokens=rng.randrange(1, 40), temperature=rng.choice([0.0, 1.0]), seed=i),
            num_draft_tokens=rng.choice([None, 0, 2]),
        )
        for i in range(12)
    ]
    target = ToyTarget(random_table(2))
    together = Engine(
        target,
        ScriptDrafter(oracle(target, wrong_at=2), target.info),
        policy=FixedLength(5),
        max_rows=4,
        prefill_chunk=3,
    ).generate(requests)
    for request, result in zip(requests, together, strict=True):
        assert result.token_ids == Engine(ToyTarget(random_table(2))).generate([request])[0].token_ids
        assert request.num_draft_tokens is None or all(r.num_drafted <= request.num_draft_tokens for r in result.rounds)


def test_the_drafter_gets_each_committed_token_once_with_its_own_features() -> None:
    target = ToyTarget(random_table(5))
    drafter = ScriptDrafter(oracle(target, wrong_at=3), target.info)
    prompt = [4, 5, 6, 7, 8]
    engine = Engine(target, drafter, policy=FixedLength(6), prefill_chunk=2)
    result = engine.generate(
        [Request(prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=30, ignore_eos=True))]
    )[0]
    seen = [t for c in drafter.commits for t in c.tokens[0]]
    assert seen == [*prompt, *result.token_ids][:-1]
    verdicts = [c.verdict for c in drafter.commits if c.verdict is not None]
    assert [v.num_accepted[0] for v in verdicts] == [r.num_accepted for r in result.rounds]
    assert [len(v.drafts[0].tokens) for v in verdicts] == [r.num_drafted for r in result.rounds]


def test_drafts_behind_a_recheck_count_neither_as_hits_nor_as_misses() -> None:
    """Every draft is right, and every margin so near a tie that a block ends with its first token."""
    target = ToyTarget(random_table(5))
    target.epsilon = 100.0
    drafter = ScriptDrafter(oracle(target), target.info)
    engine = Engine(target, drafter, policy=FixedLength(4), exact="recheck")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    request = engine.submit(Request(prompt_ids=(4, 5), params=params))
    for _ in range(8):
        engine.step()
    rates = engine._stats[request].rates()
    assert rates[0] > rates[1] == engine.policy.new_stats().rates()[1]  # of the second nothing is known
    verdicts = [c.verdict for c in drafter.commits if c.verdict is not None]
    assert len(verdicts) == engine.counters["rechecks"] > 4
    assert all(len(v.drafts[0].tokens) == v.num_accepted[0] == 1 for v in verdicts)


def test_a_verdict_brings_each_draft_back_as_it_was_made_and_cut_to_what_was_verified() -> None:
    target = ToyTarget.chain([], vocab_size=16, eos=())
    drafter = ScriptDrafter(lambda text, n: [(text[-1] + 1) % 16, 99 if text[-1] % 2 else 3, 4], target.info)
    requests = [
        Request(prompt_ids=(first,), params=SamplingParams(max_tokens=12), num_draft_tokens=num)
        for first, num in ((4, 3), (5, 0), (7, 2))
    ]
    results = Engine(target, drafter, policy=FixedLength(3)).generate(requests)
    lengths, next_anchors = set(), dict[int, int | None]()
    for commit in drafter.commits:
        drafts, accepted, followers, _ = commit.verdict or Verdict([], [])
        rows = zip(drafts, accepted, followers, commit.rows, commit.tokens, strict=commit.verdict is not None)
        for draft, hits, follower, row, tokens in rows:
            assert next_anchors.pop(row, tokens[0]) == tokens[0], "what follows is the next anchor"
            next_anchors[row] = follower
            made, num = draft.notes or (), len(draft.tokens)
            lengths.add((tokens[0] % 2, num))
            assert list(draft.tokens) == list(made[:num])  # type: ignore[index]
            assert list(draft.confidence) == [1 / 2, 1 / 3, 1 / 4][:num]
            assert list(tokens[1:]) == list(draft.tokens[:hits])
    assert lengths >= {(0, 3), (1, 1), (0, 0), (1, 0)}, "whole, cut, and none in the row without drafts"
    assert {t.source for t in results[0].rounds if t.num_drafted} == {"toys"}
    assert {t.source for t in results[1].rounds} == {""}


def test_near_ties_are_decided_at_width_one_when_rows_are_not_invariant() -> None:
    def noisy() -> ToyTarget:
        table = random_table(6)
        table[:, 0] = table.max(-1).values - 1e-4  # token 0 is a near tie everywhere
        target = ToyTarget(table, eos=())
        target.noise = lambda width, position: 3e-4 if width > 1 and position % 3 == 0 else 0.0
        target.exactness, target.epsilon = "recheck", 1e-3
        return target

    want = run(noisy(), None, [4], max_tokens=50).token_ids
    for k in (1, 3, 7):
        target = noisy()
        drafter = ScriptDrafter(oracle(target), target.info)
        engine = Engine(target, drafter, policy=FixedLength(k))
        request = Request(prompt_ids=(4,), params=SamplingParams(max_tokens=50))
        assert engine.generate([request])[0].token_ids == want
        assert engine.counters["rechecks"] > 0
        fast = Engine(noisy(), drafter, policy=FixedLength(k), exact="off")
        assert fast.generate([request])[0].token_ids != want
        assert fast.exactness == "off"
        assert fast.counters["near_ties"] > 0


class Remembering(ToyTarget):
    """Tokens that shared a forward leave keys and values that are off a little: all later rows feel it."""

    def forward(self, rows: Rows) -> TargetOutput:
        wide: dict[int, list[bool]] = self.__dict__.setdefault("wide", {})
        for seq, n in zip(rows.seqs, rows.lengths, strict=True):
            kept = wide.get(seq, [])[: len(self.cached[seq])]
            wide[seq] = kept + [len(rows.tokens) > 1] * n
        self.noise = lambda _width, _position: 2e-4 * any(any(wide[seq]) for seq in rows.seqs)
        return super().forward(rows)


def test_near_ties_are_decided_on_a_cache_that_was_filled_at_width_one() -> None:
    def target() -> Remembering:
        table = random_table(6)
        table[::2, 0] = table[::2].max(-1).values - 1e-4  # token 0 is a near tie after every other token
        made = Remembering(table, eos=())
        made.exactness, made.epsilon = "recheck", 1e-3
        return made

    requests = [Request(prompt_ids=(t,), params=SamplingParams(max_tokens=30)) for t in (4, 7, 9)]
    want = [Engine(target()).generate([r])[0].token_ids for r in requests]
    assert [r.token_ids for r in Engine(target()).generate(requests)] == want
    for k in (1, 3, 7):
        toy = target()
        engine = Engine(toy, ScriptDrafter(oracle(toy), toy.info), policy=FixedLength(k))
        assert [engine.generate([r])[0].token_ids for r in requests] == want
        assert [r.token_ids for r in engine.generate(requests)] == want
        assert 0 < engine.counters["rechecks"] < 150, "rows that are no near ties are taken from the block"


def test_costs_that_no_forward_can_have_are_refused() -> None:
    for cost in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="costs above 0"):
            AdaptiveLength({1: 1.0, 2: cost})
    with pytest.raises(UserError, match="no entry for width 1"):
        AdaptiveLength({2: 1.0})


def test_nan_from_the_target_fails_that_request_only() -> None:
    table = random_table(7)
    table[9] = float("nan")
    target = ToyTarget(table, eos=())
    engine = Engine(target, ScriptDrafter(oracle(target), target.info), policy=FixedLength(3))
    bad, good = engine.generate(
        [Request(prompt_ids=(9,)), Request(prompt_ids=(4,), params=SamplingParams(max_tokens=1))]
    )
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "non-finite" in bad.error
    assert bad.token_ids == ()
    assert good.finish_reason == "length"
    again = engine.generate([Request(prompt_ids=(4,), params=SamplingParams(max_tokens=1))])[0]
    assert again.token_ids == good.token_ids


def test_non_finite_drafts_are_counted_and_warned_about_once() -> None:
    target = ToyTarget(random_table(8), eos=())
    drafter = ScriptDrafter(oracle(target), target.info)
    drafter.num_nonfinite = 1
    engine = Engine(target, drafter, policy=FixedLength(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.generate([Request(prompt_ids=(4,), params=SamplingParams(max_tokens=12))])
    assert engine.counters["draft_nonfinite"] >= 3
    assert len(caught) == 1


def test_tokens_outside_the_target_vocabulary_end_a_proposal() -> None:
    target = ToyTarget.chain([])
    drafter = ScriptDrafter(lambda text, n: [text[-1] + 1, 99, text[-1] + 3], target.info)
    got = run(target, drafter, [4], k=3, max_tokens=8)
    assert got.token_ids == run(ToyTarget.chain([]), None, [4], max_tokens=8).token_ids
    assert all(r.num_drafted <= 1 for r in got.rounds)


def test_a_drafter_with_a_shorter_position_limit_stops_drafting_there() -> None:
    target = ToyTarget.chain([], eos=())
    drafter = ScriptDrafter(oracle(target), target.info)
    drafter.max_positions = 12
    got = run(target, drafter, list(range(8)), k=5, max_tokens=20)
    assert [r.num_drafted for r in got.rounds] == [4, *[0] * 15]


def test_cancel_during_prefill_and_decoding_keeps_what_was_committed() -> None:
    target = ToyTarget.chain([], eos=())
    engine = Engine(target, ScriptDrafter(oracle(target), target.info), policy=FixedLength(2), prefill_chunk=2)
    early = engine.submit(Request(prompt_ids=tuple(range(9)), params=SamplingParams(max_tokens=30)))
    late = engine.submit(Request(prompt_ids=(1, 2), params=SamplingParams(max_tokens=30)))
    engine.step()
    engine.cancel(early)
    events = engine.step()
    assert any(e.request_id == early and e.finish_reason == "cancelled" for e in events)
    engine.cancel(late)
    engine.step()
    assert engine.result(early).token_ids == ()
    assert len(engine.result(late).token_ids) >= 3
    assert not target.cached
    assert engine.num_unfinished == 0


def test_closing_a_stream_cancels_its_request() -> None:
    target = ToyTarget.chain([], eos=())
    engine = Engine(target)
    stream = engine.stream(Request(prompt_ids=(1,), params=SamplingParams(max_tokens=100)))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not target.cached
    assert engine.num_unfinished == 0


def test_prefill_in_any_chunks_gives_the_same_text_and_commits() -> None:
    prompt, texts = tuple(random.Random(1).randrange(24) for _ in range(70)), set()
    for chunk in (1, 7, 64, 512):
        target = ToyTarget(random_table(9))
        engine = Engine(target, ScriptDrafter(oracle(target), target.info), policy=FixedLength(3), prefill_chunk=chunk)
        texts.add(engine.generate([Request(prompt_ids=prompt, params=SamplingParams(max_tokens=9))])[0].token_ids)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ((), {}, "empty"),
        ((99,), {}, "vocabulary"),
        (tuple([1] * 512), {}, "512"),
        ((1,), {"stop": ("x",)}, "tokenizer"),
        ((1,), {"logit_bias": {77: 1.0}}, "77"),
        ((1,), {"stop_token_ids": (50,)}, "50"),
    ],
    ids=["empty", "outside-vocabulary", "too-long", "stop-without-tokenizer", "bias-outside", "stop-id-outside"],
)
def test_bad_requests_are_refused_with_a_reason(prompt: tuple[int, ...], params: dict[str, object], words: str) -> None:
    engine = Engine(ToyTarget.chain([]))
    with pytest.raises(UserError, match=words):
        engine.submit(Request(prompt_ids=prompt, params=SamplingParams(**params)))  # type: ignore[arg-type]
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": True}, {"min_tokens": 300}, {"temperature": -0.1},
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
        {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"presence_penalty": float("nan")}, {"logprobs": 21},
        {"seed": -1}, {"stop": ("",)}, {"logit_bias": {1: float("inf")}},
    ],
    ids=str,
)  # fmt: skip
def test_senseless_sampling_values_are_refused_by_name(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(values))):
        SamplingParams(**values)  # type: ignore[arg-type]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves one millisecond with every look at it: lengths must not depend on how busy the machine is."""
    clock = itertools.count()
    monkeypatch.setattr("hyflash.engine.decode.time.perf_counter", lambda: next(clock) / 1000)


@pytest.mark.usefixtures("ticks")
def test_adaptive_length_stops_drafting_when_drafts_never_pay_and_backs_off() -> None:
    target = ToyTarget.chain([], eos=())
    rubbish = ScriptDrafter(oracle(target, wrong_at=0), target.info)
    policy = AdaptiveLength({1: 1.0, 2: 1.6, 4: 2.5, 8: 4.0})
    engine = Engine(target, rubbish, policy=policy)
    got = engine.generate([Request(prompt_ids=(1,), params=SamplingParams(max_tokens=300))])[0]
    drafted = [r.num_drafted > 0 for r in got.rounds]
    assert sum(drafted[-200:]) <= 8


@pytest.mark.usefixtures("ticks")
def test_adaptive_length_grows_to_the_longest_block_when_everything_is_accepted() -> None:
    target = ToyTarget.chain([], eos=())
    policy = AdaptiveLength({1: 1.0, 8: 1.2, 16: 1.5}, max_draft_tokens=8)
    engine = Engine(target, ScriptDrafter(oracle(target), target.info), policy=policy)
    got = engine.generate([Request(prompt_ids=(1,), params=SamplingParams(max_tokens=200))])[0]
    assert [r.num_drafted for r in got.rounds][-3:-1] == [8, 8]


def test_measured_times_correct_a_table_from_a_busy_moment() -> None:
    policy = AdaptiveLength({1: 1.0, 5: 40.0, 9: 80.0}, max_draft_tokens=8)
    stats = RowStats(8)
    for _ in range(40):
        stats.observe(8, 8)
    assert policy.choose(stats, most=4, num_rows=1) == 2, "a try, before the pause"
    assert policy.choose(stats, most=4, num_rows=1) == 0
    for _ in range(60):
        policy.observe_times(draft_sec=0.0, verify_sec=0.003, width=1, num_rows=1)
        policy.observe_times(draft_sec=0.0006, verify_sec=0.0045, width=5, num_rows=1)
    assert policy.prices(1).forward[4] == pytest.approx(1.5, rel=0.1)
    stats.rounds_off = 0  # the pause is over
    assert policy.choose(stats, most=4, num_rows=1) == 4


def test_a_request_after_one_in_which_no_draft_was_right_tries_less_and_goes_on_at_the_first_success() -> None:
    policy = AdaptiveLength({1: 1.0, 5: 1.5}, max_draft_tokens=4)

    def tries(accepted: int, num_rounds: int = 200) -> int:
        stats, found = policy.new_stats(), 0
        for _ in range(num_rounds):
            length = policy.choose(stats, most=4, num_rows=1)
            stats.observe(length, min(length, accepted))
            policy.observe_times(draft_sec=0.0, verify_sec=1e-3, width=1 + length, num_rows=1)
            found += length > 0
        return found

    first, second = tries(0), tries(0)
    assert 0 < second < first
    assert tries(4) > 150
    assert tries(4, 20) >= 18, "nothing of the bad ones is left"


def test_a_slow_moment_does_not_make_drafts_look_free_for_ever() -> None:
    policy = AdaptiveLength({1: 1.0, 2: 1.1, 4: 1.4}, max_draft_tokens=3)
    policy.observe_times(draft_sec=0.0, verify_sec=0.010, width=1, num_rows=1)  # held up by other work
    wrong, widths = policy.new_stats(), []
    for _ in range(400):
        drafts = policy.choose(wrong, most=3, num_rows=1)
        widths.append(1 + drafts)
        wrong.observe(drafts, 0)
        verify = 0.004 * (1.0, 1.1, 1.25, 1.4)[drafts]
        policy.observe_times(draft_sec=0.0002 if drafts else 0.0, verify_sec=verify, width=1 + drafts, num_rows=1)
    assert sum(width > 1 for width in widths[-100:]) <= 5
    assert policy.prices(1) is not None
    assert policy.prices(1).one_sec == pytest.approx(0.004, rel=0.05)  # type: ignore[union-attr]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_plain_rounds_come_in_between_where_all_drafts_are_right(num_rows: int) -> None:
    policy = AdaptiveLength({1: 1.0, 16: 1.2}, max_draft_tokens=3)
    right, plain = [policy.new_stats() for _ in range(num_rows)], 0
    for _ in range(200):
        drafts = [policy.choose(stats, most=3, num_rows=num_rows) for stats in right]
        plain += not any(drafts)
        for stats, n in zip(right, drafts, strict=True):
            stats.observe(n, n)
        width = num_rows + sum(drafts)
        policy.observe_times(draft_sec=1e-4, verify_sec=4e-3 + 5e-5 * width, width=width, num_rows=num_rows)
    assert 2 <= plain <= 5


def test_a_drafter_that_has_had_nothing_for_long_is_asked_less_often() -> None:
    policy = AdaptiveLength({1: 1.0, 2: 1.1}, max_draft_tokens=1)
    stats, asked = policy.new_stats(), []
    for _ in range(100):
        asked.append(policy.asks(stats))
        if asked[-1]:
            policy.hears(stats, num_asked=1, num_drafted=0)
    assert all(asked[:8])
    assert sum(asked[50:]) <= 7
    stats.rounds_off = 0
    policy.hears(stats, num_asked=1, num_drafted=1)
    assert all(policy.asks(stats) for _ in range(5)), "a draft ends the pauses"


def test_rounds_without_the_drafter_do_not_make_drafts_look_cheap() -> None:
    policy = AdaptiveLength({1: 1.0, 2: 1.1}, max_draft_tokens=1)
    stats = RowStats(1)  # half of the drafts are accepted
    for _ in range(60):
        policy.observe_times(draft_sec=0.002, verify_sec=0.002, width=1, num_rows=1)
    for _ in range(300):
        policy.observe_times(draft_sec=0.0, verify_sec=0.002, width=1, num_rows=1)
    assert policy.choose(stats, most=1, num_rows=1) == 1, "a try, before the pause"
    assert policy.choose(stats, most=1, num_rows=1) == 0


def test_a_request_starts_from_what_earlier_ones_accepted() -> None:
    policy = AdaptiveLength({1: 1.0, 5: 1.2}, max_draft_tokens=4)
    first = policy.new_stats()
    assert first.tokens()[1] == pytest.approx(1.5)
    for _ in range(200):
        first.observe(4, 1)
    later = policy.new_stats()
    assert later.tokens()[1] > 1.95
    assert later.tokens()[4] - later.tokens()[1] < 0.1
    later.observe(4, 0)
    assert later.tokens()[1] < 1.7, "but soon goes by its own rounds"


class Scripted(LengthPolicy):
    """Lengths in turns."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.max_draft_tokens = max(lengths)
        self._turns = itertools.cycle(lengths)

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        return min(most, next(self._turns))


@pytest.mark.parametrize("lengths", [(0, 0, 2), (0,) * 150 + (3,), (0, 3, 1, 0, 0, 0, 2), (1,)])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_drafter_that_was_not_asked_for_some_rounds_has_the_whole_text_when_it_is(
    lengths: tuple[int, ...], num_requests: int
) -> None:
    target = ToyTarget(random_table(3), eos=())
    plain = Engine(target)
    requests = [
        Request(prompt_ids=(2 + i, 9, 4), params=SamplingParams(max_tokens=200 - 7 * i)) for i in range(num_requests)
    ]
    want = [plain.generate([r])[0].token_ids for r in requests]
    texts = [[*r.prompt_ids, *w] for r, w in zip(requests, want, strict=True)]
    seen = []

    def script(text: list[int], n: int) -> list[int]:
        whole = next(t for t in texts if t[: len(text)] == text)
        seen.append(len(text))
        return whole[len(text) : len(text) + n]

    drafter = ScriptDrafter(script, target.info)
    engine = Engine(target, drafter, policy=Scripted(lengths))
    got = engine.generate(requests)
    assert [r.token_ids for r in got] == want
    assert seen
    assert all(max(c.lengths) <= LATE_PIECES for c in drafter.commits[1:])
    total = sum(sum(c.lengths) for c in drafter.commits)
    assert total == sum(map(len, texts)) - num_requests, "all but each last token, which no drafter sees"
    if lengths == (0,) * 150 + (3,):
        assert len(drafter.commits) < 20 * num_requests


def test_a_full_house_waits_and_rows_are_reused() -> None:
    target = ToyTarget.chain([], eos=())
    engine = Engine(target, ScriptDrafter(oracle(target), target.info), policy=FixedLength(2), max_rows=1)
    results = engine.generate([Request(prompt_ids=(i,), params=SamplingParams(max_tokens=4)) for i in range(1, 4)])
    assert [r.token_ids[0] for r in results] == [2, 3, 4]


def test_a_refused_request_takes_the_others_of_its_call_with_it() -> None:
    engine = Engine(ToyTarget(random_table(1)))
    with pytest.raises(UserError, match="empty"):
        engine.generate([Request(prompt_ids=(1, 2)), Request(prompt_ids=())])
    assert engine.num_unfinished == 0
