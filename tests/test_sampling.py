"""From logits to a token: hand-computed values, transformers' processors as oracle, distributions by chi-square."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyflash.core import Request, SamplingParams
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import UserError
from hyflash.sampling import Choice, adjust, choose, is_plain_greedy, uniform, warp
from toys import ScriptDrafter, ToyTarget

INF = float("inf")
P = torch.tensor([0.4, 0.3, 0.2, 0.1])


def pick(logits: Tensor, *, position: int = 0, prompt: tuple[int, ...] = (), generated: tuple[int, ...] = (),
         banned: tuple[int, ...] = (), **params: Any) -> Choice:  # fmt: skip
    return choose(
        logits, SamplingParams(**params), position=position, prompt=prompt, generated=generated, banned=banned
    )


def support(logits: Tensor, **params: Any) -> set[int]:
    warped, _ = warp(logits, SamplingParams(temperature=params.pop("temperature", 1.0), **params))
    return {int(i) for i in warped.isfinite().nonzero()[:, 0]}


# -------------------------------------------------------------------------------- penalties and bias


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer_once() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0, 1.0])
    params = SamplingParams(repetition_penalty=2.0)
    out = adjust(logits, params, prompt=(0, 1, 0), generated=(2, 2, 3), banned=())
    assert out.tolist() == [1.0, -4.0, 2.0, -8.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, -4.0, 1.0], "the target's logits are not touched"


def test_presence_counts_once_and_frequency_each_time_in_the_answer_only() -> None:
    logits = torch.zeros(4)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust(logits, params, prompt=(3,), generated=(1, 2, 2, 2), banned=()).tolist() == [0.0, -0.75, -1.25, 0.0]
    assert adjust(logits, params, prompt=(3,), generated=(), banned=()).tolist() == [0.0] * 4


def test_bias_adds_after_the_penalties_and_a_ban_is_final() -> None:
    logits = torch.tensor([2.0, -1.0, 0.0])
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 10.0, 2: -1.0})
    assert adjust(logits, params, prompt=(0,), generated=(), banned=()).tolist() == [11.0, -1.0, -1.0]
    assert adjust(logits, params, prompt=(0,), generated=(), banned=(0,)).tolist() == [-INF, -1.0, -1.0]


def test_penalties_follow_transformers_on_random_logits() -> None:
    random = torch.Generator().manual_seed(0)
    for penalty in (0.7, 1.3, 2.5):
        logits = torch.randn(64, generator=random) * 3
        seen = torch.randint(0, 64, (20,), generator=random)
        want = RepetitionPenaltyLogitsProcessor(penalty)(seen[None], logits[None].clone())[0]
        got = adjust(
            logits,
            SamplingParams(repetition_penalty=penalty),
            prompt=seen[:12].tolist(),
            generated=seen[12:].tolist(),
            banned=(),
        )
        assert torch.equal(got, want)


def test_prompt_tokens_outside_the_logits_are_ignored_by_penalties() -> None:
    out = adjust(torch.ones(4), SamplingParams(repetition_penalty=2.0), prompt=(1, 900), generated=(), banned=())
    assert out.tolist() == [1.0, 0.5, 1.0, 1.0]


# ------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.7}, {0, 1}),  # the mass before token 2 is 0.7: as much as asked for
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1, 2}),
        ({"min_p": 0.51}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.75}, {0, 1}),  # of the three kept, the mass before the third is 7/9
        ({"top_k": 3, "top_p": 0.8}, {0, 1, 2}),
        ({"top_p": 0.65, "min_p": 0.8}, {0}),
        ({"temperature": 0.5, "top_p": 0.8}, {0, 1}),  # 16 : 9 : 4 : 1 of 30, so 25/30 before the third
        ({"temperature": 2.0, "top_p": 0.6}, {0, 1}),
    ],
    ids=str,
)
def test_filters_keep_the_tokens_computed_by_hand(params: dict[str, Any], want: set[int]) -> None:
    # A hair above 0.4 and 0.3, so that a border on the dot falls the way exact arithmetic says.
    exact = torch.tensor([0.4, 0.3 + 1e-6, 0.2 - 1e-6 if "min_p" not in params else 0.2 + 1e-6, 0.1])
    assert support(exact.log(), **params) == want


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 0.1},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"temperature": 1.3, "top_k": 7, "min_p": 0.2},
        {"temperature": 0.3, "top_p": 0.95, "min_p": 0.01}, {"top_k": 1}, {"temperature": 0.01, "top_p": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_probabilities_are_those_of_transformers_warpers_in_their_order(params: dict[str, float]) -> None:
    temperature = params.get("temperature", 1.0)
    for seed in range(20):
        logits = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 3
        want = (
            TemperatureLogitsWarper(temperature)(torch.empty(1, 0), logits[None]) if temperature != 1 else logits[None]
        )
        if "top_k" in params:
            want = TopKLogitsWarper(int(params["top_k"]))(torch.empty(1, 0), want)
        if "top_p" in params:
            want = TopPLogitsWarper(params["top_p"])(torch.empty(1, 0), want)
        if "min_p" in params:
            want = MinPLogitsWarper(params["min_p"])(torch.empty(1, 0), want)
        got, _ = warp(logits, SamplingParams(**{"temperature": 1.0, **params}))  # type: ignore[arg-type]
        torch.testing.assert_close(got.softmax(-1).float(), want[0].softmax(-1), atol=1e-6, rtol=1e-4)
        assert torch.equal(got.isfinite(), want[0].isfinite())


def test_ties_are_kept_together_by_top_k_and_in_vocabulary_order_by_top_p() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert support(logits, top_k=2) == {0, 1, 2}
    assert support(logits, top_p=0.35) == {0, 1}
    assert pick(torch.tensor([0.0, 3.0, 3.0])).token_id == 1


def test_no_temperature_is_too_small_or_too_large() -> None:
    for temperature in (1e-320, 1e-30, 1e-3):
        choice = pick(torch.tensor([1.0, 3.0, 2.999]), temperature=temperature)
        assert (choice.token_id, choice.finite) == (1, True)
    drawn = {pick(torch.tensor([1.0, 300.0, -300.0]), temperature=1e30, position=p).token_id for p in range(50)}
    assert drawn == {0, 1, 2}


# ------------------------------------------------------------------------------------------ the draw


def test_the_uniform_numbers_are_pinned_for_ever() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.011546754286331617,
        0.8133540609793564,
        0.30356803430675866,
    ]
    tokens = [pick(torch.zeros(1000), temperature=1.0, seed=7, position=p).token_id for p in range(5)]
    assert tokens == [872, 882, 366, 482, 551]


def test_the_largest_seeds_are_as_distinct_as_small_ones() -> None:
    assert uniform(2**64 - 1, 10**6) == 0.5105042479420185
    assert len({uniform(seed, 0) for seed in range(2**64 - 50, 2**64)}) == 50
    assert len({uniform(seed, 0) for seed in range(2**53, 2**53 + 50)}) == 50


def test_seeds_and_positions_give_independent_uniform_numbers() -> None:
    drawn = np.array([[uniform(seed, position) for position in range(400)] for seed in range(20)])
    assert len(np.unique(drawn)) == drawn.size
    assert 0 < drawn.min() <= drawn.max() < 1
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 0.001
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.2
    assert abs(np.corrcoef(drawn[:, 1:].ravel(), drawn[:, :-1].ravel())[0, 1]) < 0.05


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    texts = {
        seed: [pick(logits, temperature=1.0, seed=seed, position=p).token_id for p in range(60)] for seed in (0, 1, 2)
    }
    assert texts[0] == [pick(logits, temperature=1.0, seed=0, position=p).token_id for p in range(60)]
    assert len({tuple(t) for t in texts.values()}) == 3


MODES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "T=1": ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    "T=0.7": ({"temperature": 0.7}, [float(p) for p in (P ** (1 / 0.7)) / (P ** (1 / 0.7)).sum()]),
    "top_p=0.7": ({"temperature": 1.0, "top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
    "top_k=2": ({"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    "min_p=0.4": ({"temperature": 1.0, "min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0]),
    "bias": ({"temperature": 1.0, "logit_bias": {3: math.log(4.0)}}, [4 / 13, 3 / 13, 2 / 13, 4 / 13]),
}


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    return np.array([uniform(11, position) for position in range(200_000)])


@pytest.mark.parametrize("mode", MODES)
def test_emitted_tokens_follow_the_processed_distribution(mode: str, numbers: np.ndarray) -> None:
    """Chi-square on 200,000 uniform numbers through the intervals of `choose`, which is itself asked at 500 of them."""
    params, want = MODES[mode]
    adjusted = adjust(P.log(), SamplingParams(**params), prompt=(), generated=(), banned=())
    ends = warp(adjusted, SamplingParams(**params))[0].softmax(-1).cumsum(-1)
    tokens = np.searchsorted(ends.numpy(), numbers * float(ends[-1]), side="right")
    for position in range(0, 200_000, 400):
        assert pick(P.log(), seed=11, position=position, **params).token_id == tokens[position]
    counts = np.bincount(tokens, minlength=4)
    expected = np.array(want) * len(tokens)
    alive = expected > 0
    assert counts[~alive].sum() == 0
    assert stats.chisquare(counts[alive], expected[alive] * counts[alive].sum() / expected[alive].sum()).pvalue > 0.001


def test_a_point_mass_is_accepted_as_often_as_the_target_says_it() -> None:
    """p = [.4, .3, .2, .1] whatever came before: drafting token i is accepted with p(i)."""
    for token in range(4):
        target = ToyTarget(P.log().expand(4, 4).clone(), max_context=4096, eos=())
        drafter = ScriptDrafter(lambda text, n, token=token: [token], target.info)  # type: ignore[misc]
        params = SamplingParams(max_tokens=1000, temperature=1.0, seed=token)
        result = Engine(target, drafter, policy=FixedLength(1)).generate([Request(prompt_ids=(1,), params=params)])[0]
        rounds = [r for r in result.rounds if r.num_drafted]
        accepted = sum(r.num_accepted for r in rounds)
        assert stats.binomtest(accepted, len(rounds), float(P[token])).pvalue > 0.001
        counts = np.bincount(result.token_ids, minlength=4)
        assert stats.chisquare(counts, P.double().numpy() / P.double().sum().item() * 1000).pvalue > 0.001


def test_the_last_token_of_the_support_takes_what_rounding_leaves() -> None:
    logits = torch.full((3,), -INF)
    logits[0] = 0.0
    for position in range(100):
        assert pick(logits, temperature=1.0, position=position).token_id == 0


# --------------------------------------------------------------------------- bans, logprobs, faults


def test_banned_tokens_are_never_chosen_greedily_or_sampled() -> None:
    logits = torch.tensor([5.0, 1.0, 0.0])
    assert pick(logits, banned=(0,)).token_id == 1
    assert {pick(logits, banned=(0, 2), temperature=2.0, position=p).token_id for p in range(50)} == {1}
    assert not pick(logits, banned=(0, 1, 2)).finite


def test_min_tokens_masks_stop_tokens_in_greedy_and_sampled_text() -> None:
    for temperature in (0.0, 1.0):
        target = ToyTarget.chain([5, 2, 7, 2, 9])
        params = SamplingParams(max_tokens=12, min_tokens=6, temperature=temperature)
        result = Engine(target).generate([Request(prompt_ids=(5,), params=params)])[0]
        assert 2 not in result.token_ids[:6]
        assert len(result.token_ids) >= 6


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"repetition_penalty": 1.5}, (7, 8)),
        ({"presence_penalty": 0.6}, (7, 8)),
        ({"frequency_penalty": 0.3}, (7, 7, 8)),
    ],
    ids=str,
)
def test_penalties_count_the_tokens_of_the_same_block(params: dict[str, float], want: tuple[int, ...]) -> None:
    table = torch.zeros(16, 16)
    table[:, 7], table[:, 8] = 3.0, 2.5
    target = ToyTarget(table, eos=())
    drafter = ScriptDrafter(lambda text, n: [7, 7, 7], target.info)
    request = Request(prompt_ids=(5,), params=SamplingParams(max_tokens=len(want), **params))  # type: ignore[arg-type]
    for policy in (FixedLength(0), FixedLength(3)):
        assert Engine(target, drafter, policy=policy).generate([request])[0].token_ids == want


def test_logprobs_are_of_the_processed_distribution_and_sum_to_one() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    choice = pick(logits, temperature=0.7, logprobs=12)
    assert choice.logprob is not None
    assert sum(math.exp(v) for _, v in choice.logprob.top) == pytest.approx(1.0)
    assert [v for _, v in choice.logprob.top] == sorted((v for _, v in choice.logprob.top), reverse=True)
    assert dict(choice.logprob.top)[choice.token_id] == choice.logprob.logprob
    want = (logits.double() / 0.7).log_softmax(-1)
    assert choice.logprob.logprob == pytest.approx(float(want[choice.token_id]))


def test_logprobs_name_no_token_outside_the_support() -> None:
    choice = pick(P.log(), temperature=1.0, top_k=2, logprobs=4)
    assert choice.logprob is not None
    assert {token for token, _ in choice.logprob.top} == {0, 1}
    assert sum(math.exp(v) for _, v in choice.logprob.top) == pytest.approx(1.0)


def test_greedy_logprobs_are_at_temperature_one_and_none_are_asked_for_with_zero() -> None:
    choice = pick(P.log(), logprobs=2)
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(math.log(0.4))
    assert [t for t, _ in choice.logprob.top] == [0, 1]
    only = pick(P.log(), logprobs=0).logprob
    assert only is not None
    assert (only.token_id, only.top) == (0, ())
    assert pick(P.log()).logprob is None


@pytest.mark.parametrize("bad", [float("nan"), INF], ids=str)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}], ids=str)
def test_logits_that_are_not_finite_are_reported_not_sampled(bad: float, params: dict[str, float]) -> None:
    assert not pick(torch.tensor([0.0, bad, 1.0]), **params).finite
    assert not pick(torch.full((3,), -INF), **params).finite
    assert pick(torch.tensor([0.0, -INF, 1.0]), **params).finite


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logit_bias": {2: 1e308}}, {2}),
        ({"logit_bias": {0: -1e308, 1: -1e308}}, {2}),
        ({"presence_penalty": -1e308}, {1}),
        ({"frequency_penalty": 1e308}, {0, 2}),
        ({"presence_penalty": 1e308, "frequency_penalty": -1e308}, {0, 1, 2}),
        ({"repetition_penalty": 5e-324}, {0}),
        ({"repetition_penalty": 1e308}, {0, 1, 2}),
    ],
    ids=str,
)
def test_numbers_beyond_float32_choose_a_token_and_give_finite_logprobs(
    temperature: float, params: dict[str, Any], expected: set[int]
) -> None:
    params = {**params, "temperature": temperature, "logprobs": 3}
    choice = choose(
        torch.tensor([1.0, -1.0, 0.0]), SamplingParams(**params), position=4, prompt=[0], generated=[1, 1, 1]
    )
    assert choice.finite
    assert choice.token_id in expected
    assert choice.logprob is not None
    assert all(math.isfinite(v) for v in (choice.logprob.logprob, *(v for _, v in choice.logprob.top)))


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True), ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, True), ({"temperature": 0.1}, False),
        ({"logprobs": 0}, False), ({"repetition_penalty": 1.1}, False), ({"presence_penalty": -0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {1: 1.0}}, False), ({"min_tokens": 1}, False), ({"stop": ("x",), "seed": 3}, True),
    ],
    ids=str,
)  # fmt: skip
def test_only_requests_that_change_no_logit_take_the_greedy_short_cut(params: dict[str, Any], plain: bool) -> None:
    assert is_plain_greedy(SamplingParams(**params)) is plain


# -------------------------------------------------------------------------------------------- margin


@pytest.mark.parametrize(
    "params",
    [
        {}, {"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}, {"temperature": 1.0}, {"temperature": 0.4},
        {"temperature": 2.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.6}, {"temperature": 0.8, "min_p": 0.2},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=str,
)  # fmt: skip
def test_moving_every_logit_by_less_than_the_margin_never_changes_the_token(params: dict[str, float]) -> None:
    random = torch.Generator().manual_seed(5)
    for position in range(150):
        logits = (torch.randn(8, generator=random) * 2).double()
        context = {"position": position, "prompt": (0, 1), "generated": (2, 2), "seed": 3, **params}
        choice = pick(logits, **context)
        assert choice.margin >= 0
        move = 0.999 * min(choice.margin, 50.0)
        signs = torch.randint(0, 2, (6, 8), generator=random) * 2.0 - 1.0
        worst = torch.full((1, 8), 1.0).double()
        worst[0, choice.token_id] = -1.0
        for sign in (*signs.double(), *worst, *(-worst)):
            assert pick(logits + move * sign, **context).token_id == choice.token_id


def test_the_margin_is_what_it_takes_and_no_less() -> None:
    assert pick(torch.tensor([1.0, 3.0, 2.0])).margin == 0.5
    assert pick(torch.tensor([1.0])).margin == INF
    assert pick(torch.tensor([1.0, 1.0])).margin == 0.0
    kept, dropped = torch.tensor([2.0, 1.0]), torch.tensor([0.9, -1.0])
    assert pick(torch.cat((kept, dropped)), temperature=1.0, top_k=2).margin <= 0.05 + 1e-6


# ------------------------------------------------------------------------------------- wrong settings


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 10**400}, {"temperature": float("nan")}, {"logit_bias": {0: -INF}}, {"logit_bias": {0.5: 1.0}},
        {"stop": "END"}, {"stop": ("",)}, {"stop_token_ids": ("2",)},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_would_be_misread_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(params))} is "):
        SamplingParams(**params)
