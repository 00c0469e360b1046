"""Confidence: its calibration finds what was wrong with it, and as many drafts are verified as pay."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafting import ask, filled, num_drafted, random_batch, stated, tiny_drafter
from families import family_dir, text
from hyflash import checkpoint
from hyflash.core import Draft, DraftRequest, Outcomes, Prices, Request, SamplingParams
from hyflash.drafters import dspark
from hyflash.drafters.confidence import GRID, admit, calibration_error, errors_by_position, fit_temperatures
from hyflash.engine.decode import Engine
from hyflash.engine.length import AdaptiveLength, FixedLength
from hyflash.engine.replay import measure, record, watch
from hyflash.targets import hf


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("target"), "llama")))


def tiny(target: hf.HFTarget, **options: object) -> dspark.DrafterImpl:
    drafter = tiny_drafter("dspark", target.hooks(), **options)
    assert isinstance(drafter, dspark.DrafterImpl)
    return drafter


def rounds(logits: torch.Tensor, *, depth: int | None = None) -> Outcomes:
    """Rounds that accept each draft with the chance its logit says."""
    random = torch.Generator().manual_seed(1)
    hits = torch.rand(logits.shape, generator=random) < logits.sigmoid()
    drafted = torch.full((len(logits),), logits.shape[1] if depth is None else depth)
    accepted = torch.minimum(hits.long().cumprod(1).sum(1), drafted)
    return Outcomes(confidence=logits.sigmoid(), num_drafted=drafted, num_accepted=accepted)


# --------------------------------------------------------------------------------------------- calibration


def test_calibration_error_is_the_mean_gap_over_bins() -> None:
    stated, happened = torch.tensor([0.05, 0.05, 0.95, 0.95]), torch.tensor([False, True, True, True])
    assert calibration_error(stated, happened) == pytest.approx((2 * 0.45 + 2 * 0.05) / 4)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == 0
    assert calibration_error(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) == 0


def test_temperatures_are_found_position_by_position() -> None:
    random = torch.Generator().manual_seed(0)
    true = 1.5 * torch.randn(20_000, 3, generator=random)
    wrong = torch.tensor([1.0, 3.0, 0.4])
    outcomes = rounds(true)
    found = fit_temperatures(true * wrong, outcomes)
    torch.testing.assert_close(found, wrong, rtol=0.25, atol=0.0)
    before = errors_by_position((true * wrong).sigmoid(), outcomes)
    after = errors_by_position((true * wrong / found).sigmoid(), outcomes)
    assert before[1] > 0.05
    assert max(after) < 0.02


def test_positions_that_were_hardly_drafted_keep_their_temperature() -> None:
    logits = 5 * torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    assert fit_temperatures(logits, rounds(logits / 5, depth=1))[1:].tolist() == [1, 1]
    assert fit_temperatures(logits[:0], rounds(logits[:0])).tolist() == [1, 1, 1]
    assert 1.0 in GRID.tolist()


def test_calibrating_corrects_what_proposals_state_and_is_saved(target: hf.HFTarget, tmp_path: Path) -> None:
    drafter = tiny(target)
    logits = torch.randn(8000, 3, generator=torch.Generator().manual_seed(0))
    outcomes = rounds(logits)
    figures = drafter.calibrate(replace(outcomes, confidence=(3 * logits).sigmoid()))
    assert figures["ece_after"] < 0.03 < figures["ece_before"]
    assert figures["calibration_rounds"] == 8000
    assert figures.keys() >= {"ece_before@1", "ece_after@3"}
    raw, batch = tiny(target), random_batch(drafter, (9,))
    one, two = (torch.tensor(stated(ask(d, filled(d, batch, (8,)), [0], [5]))) for d in (raw, drafter))
    assert one.shape == two.shape == (1, 3)
    assert drafter.confidence_temperature is not None
    torch.testing.assert_close(two.logit(), one.logit() / drafter.confidence_temperature)
    checkpoint.save(drafter, tmp_path, dtype="fp32")
    loaded = checkpoint.load(str(tmp_path), target.hooks())
    assert stated(ask(loaded, filled(loaded, batch, (8,)), [0], [5])) == two.tolist()


def test_calibrating_again_starts_from_the_uncalibrated_confidence(target: hf.HFTarget) -> None:
    drafter, once = tiny(target), tiny(target)
    logits = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    outcomes = rounds(logits)
    drafter.confidence_temperature = torch.tensor([2.0, 0.5, 3.0])
    once.calibrate(outcomes)
    drafter.calibrate(replace(outcomes, confidence=(logits / drafter.confidence_temperature).sigmoid()))
    torch.testing.assert_close(drafter.confidence_temperature, once.confidence_temperature)


def test_without_a_confidence_head_there_is_nothing_to_calibrate(target: hf.HFTarget) -> None:
    drafter = tiny(target, confidence_head=False)
    assert not drafter.calibrates
    assert not drafter.cuts_by_prices
    assert drafter.calibrate(rounds(torch.randn(50, 3))) == {}


def test_watching_a_replay_tells_what_every_round_stated_and_how_it_fared(target: hf.HFTarget) -> None:
    drafter = tiny(target)
    recordings = []
    for n in (3, 11):
        prompt = text(n, seed=n).tolist()
        answer = (
            Engine(target)
            .generate([Request(prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=20, ignore_eos=True))])[0]
            .token_ids
        )
        recordings.append(record(target, drafter.target_layer_ids, prompt, answer))
    plain, seen = measure(drafter, recordings, 3), watch(drafter, recordings, 3)
    traces = [t for r in plain for t in r.rounds if t.num_drafted]
    assert sorted(zip(seen.num_drafted.tolist(), seen.num_accepted.tolist(), strict=True)) == sorted(
        (t.num_drafted, t.num_accepted) for t in traces
    )
    places = torch.arange(3) < seen.num_drafted[:, None]
    assert ((seen.confidence > 0) == places).all()


# ------------------------------------------------------------------------------------------------ admission


def worth(kept: tuple[int, ...], rates: list[list[float]], prices: Prices) -> float:
    """Committed tokens per cost when the first `kept[b]` drafts of each row are verified."""
    gained = sum(float(torch.tensor(row[:n]).cumprod(0).sum()) for row, n in zip(rates, kept, strict=True))
    mean = sum(kept) / len(rates)
    low, high = math.floor(mean), math.ceil(mean)
    cost = prices.forward[low] + (mean - low) * (prices.forward[high] - prices.forward[low])
    return (1 + gained / len(rates)) / cost


@pytest.mark.parametrize("slope", [0.05, 0.3, 0.6])
def test_admission_is_the_best_choice_where_costs_grow_evenly(slope: float) -> None:
    prices = Prices(forward=[1 + slope * k for k in range(4)], one_sec=1.0)
    random = torch.Generator().manual_seed(2)
    for _ in range(20):
        rates = torch.rand(2, 3, generator=random).tolist()
        best = max(worth(kept, rates, prices) for kept in itertools.product(range(4), repeat=2))
        assert worth(tuple(admit(rates, prices)), rates, prices) == pytest.approx(best)


def test_admission_stops_at_the_first_drop() -> None:
    steps = Prices(forward=(1.0, 3.0, 3.0, 3.0), one_sec=1.0)
    assert admit([[1.0, 1.0, 1.0]], steps) == [0], "three drafts would pay, but the first does not"
    flat = Prices(forward=(1.0,) * 4, one_sec=1.0)
    assert admit([[1.0, 1.0], [0.5, 0.0, 1.0], []], flat) == [2, 1, 0]
    assert admit([], flat) == []
    assert admit([[2.0, -1.0]], flat) == [1]


def test_prices_cut_proposals_and_leave_the_rest_of_them(target: hf.HFTarget) -> None:
    drafter, batch = tiny(target), random_batch(tiny(target), (9, 20))
    state, rows = filled(drafter, batch, (8, 19)), (0, 1)
    whole = ask(drafter, state, rows, [5, 7])
    for slope in (0.0, 0.2, 5.0):
        prices = Prices(forward=[1 + slope * k for k in range(4)], one_sec=1.0)
        cut = drafter.propose(state, DraftRequest(rows=rows, anchors=[5, 7], num_tokens=[3, 3], prices=prices))
        assert num_drafted(cut) == ([3, 3] if slope == 0 else [0, 0] if slope == 5 else num_drafted(cut))
        for draft, full in zip(cut.drafts, whole.drafts, strict=True):
            n = len(draft.tokens)
            assert draft == Draft(full.tokens[:n], full.confidence[:n])


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}])
def test_text_with_cut_drafts_is_that_of_plain_decoding(target: hf.HFTarget, params: dict[str, float]) -> None:
    requests = [
        Request(
            prompt_ids=tuple(text(n, seed=n).tolist()),
            params=SamplingParams(max_tokens=24, ignore_eos=True, **params),  # type: ignore[arg-type]
        )
        for n in (2, 9, 30)
    ]
    plain = [Engine(target).generate([r])[0].token_ids for r in requests]
    drafter = tiny(target)
    costs = {q: 1 + 0.02 * (q - 1) for q in (1, 2, 4, 8, 16)}
    engine = Engine(target, drafter, policy=AdaptiveLength(costs, max_draft_tokens=3, one_sec=1.0))
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == plain
    lengths = {t.num_drafted for r in results for t in r.rounds}
    assert len(lengths - {0}) > 1, "the confidence decides"
    fixed = Engine(target, drafter, policy=FixedLength(3)).generate(requests)
    assert {t.num_drafted for r in fixed for t in r.rounds[:-3]} == {3}
