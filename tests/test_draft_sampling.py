"""Sampled drafts: whatever the drafter, texts have the target's distribution, by chi-square against hand-made rates."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from block_fakes import DIM, VOCAB, fake_hooks
from drafting import random_batch, tiny_drafter
from helpers import tiny_target_dir
from hyflash.cli.main import main
from hyflash.core import (
    Commit,
    Draft,
    DraftCost,
    DraftRequest,
    Draw,
    Prices,
    Proposal,
    Request,
    Result,
    Rows,
    SamplingParams,
    TargetHooks,
    TargetOutput,
)
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.drafters.compose import Composite
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import HyflashError, UserError
from hyflash.sampling import DRAFTING, Proposed, choose, sample, uniform
from toys import ScriptState, ToyTarget

pytestmark = pytest.mark.usefixtures("own_cache")

PASSES = 1e-4
"""Least p-value of a distribution that is right; seeds are fixed, so that a test passes always or never."""
FAILS = 1e-6

P = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.05, 0.7, 0.15, 0.1], [0.25, 0.25, 0.5, 0.0]])
"""The target: chances of the next token by the last one."""
OVERLAP = np.array([[0.0, 0.6, 0.4, 0.0], [0.5, 0.5, 0.0, 0.0], [0.3, 0.3, 0.0, 0.4], [0.0, 0.0, 0.2, 0.8]])
OUTSIDE = np.array([[0.01, 0.0, 0.01, 0.98], [0.0, 0.01, 0.01, 0.98], [0.0, 0.0, 0.02, 0.98], [0.0, 0.0, 0.01, 0.99]])
DRAFTERS = {
    "good": P,
    "better than chance": 0.7 * P + 0.3 * OVERLAP,
    "rubbish": P[:, ::-1].copy(),
    "overlap": OVERLAP,
    "mostly where the target says nothing": OUTSIDE,
    "certain": None,
}


def logs(rates: np.ndarray) -> Tensor:
    return torch.tensor(np.where(rates > 0, np.log(np.maximum(rates, 1e-300)), -np.inf)).float()


def target(rates: np.ndarray = P) -> ToyTarget:
    return ToyTarget(logs(rates), eos=())


class TableDrafter(Drafter):
    """Samples the token after each token from a row of `rates`; None always drafts the next token in order."""

    Config = DrafterConfig
    samples = True

    def __init__(self, rates: np.ndarray | None, *, most: int = 4) -> None:
        super().__init__(DrafterConfig(), target().hooks())
        self.table = None if rates is None else logs(rates)
        self.max_draft_tokens = most
        self.requests: list[DraftRequest] = []

    def new_state(self, num_rows: int) -> State:
        return ScriptState(num_rows)

    def commit(self, state: State, new: Commit) -> None:
        pass

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        self.requests.append(request)
        num = max(request.num_tokens)
        drafts, probs = [], torch.zeros(len(request.rows), num, 4, dtype=torch.float64)
        for b, anchor in enumerate(request.anchors):
            tokens = [anchor]
            for k in range(request.num_tokens[b]):
                draw = request.draws[b] if request.draws else None
                if self.table is None or draw is None:
                    tokens.append((tokens[-1] + 1) % 4)
                else:
                    token, probs[b, k] = sample(self.table[tokens[-1]], self.changed(draw), k)
                    tokens.append(token)
            drafts.append(Draft(self.cut(tokens[1:])))
        return Proposal(drafts, None if self.table is None or not request.draws else probs)

    def changed(self, draw: Draw) -> Draw:
        return draw

    def cut(self, tokens: list[int]) -> list[int]:
        return tokens

    def cost(self, context_tokens: int) -> DraftCost:
        return DraftCost(state_bytes=0, kv_bytes_per_token=0, weight_bytes=0, propose_flops=0, commit_flops_per_token=0)


def texts(engine: Engine, num: int, *, prompt: tuple[int, ...] = (1,), **params: Any) -> list[Result]:
    """Answers to one prompt with `num` seeds."""
    settings: dict[str, Any] = {"max_tokens": 2, "temperature": 1.0, "draft_sampling": True, "ignore_eos": True}
    requests = [
        Request(prompt_ids=prompt, params=SamplingParams(**{**settings, **params, "seed": seed})) for seed in range(num)
    ]
    return [result for first in range(0, num, 100) for result in engine.generate(requests[first : first + 100])]


def rates_of_texts(rates: Sequence[np.ndarray], first: int) -> dict[tuple[int, ...], float]:
    """Chance of each text, position i by the table rates[i], after the token `first`."""
    out = {}
    for text in itertools.product(range(4), repeat=len(rates)):
        chance = 1.0
        for table, (before, token) in zip(rates, itertools.pairwise((first, *text)), strict=True):
            chance *= table[before, token]
        out[text] = chance
    return out


def pvalue(seen: Counter[Any], expected: dict[Any, float]) -> float:
    """Chi-square of counts against chances; 0 where something came that has no chance."""
    total = sum(seen.values())
    if any(seen[key] for key in seen if expected.get(key, 0.0) == 0.0):
        return 0.0
    # Cells too rare for the approximation are counted as one.
    common = [key for key, chance in expected.items() if chance * total >= 5]
    counts, chances = [seen[key] for key in common], [expected[key] for key in common]
    if 1 - sum(chances) > 1e-12:
        counts, chances = [*counts, total - sum(counts)], [*chances, 1 - sum(chances)]
    return float(stats.chisquare(counts, np.array(chances) / sum(chances) * total).pvalue)


def follows(results: Sequence[Result], expected: dict[Any, float]) -> float:
    return pvalue(Counter(r.token_ids for r in results), expected)


# ------------------------------------------------------------------------------ the text's distribution


@pytest.mark.parametrize("kind", DRAFTERS)
def test_texts_have_the_targets_distribution_whatever_the_drafter(kind: str) -> None:
    engine = Engine(target(), TableDrafter(DRAFTERS[kind]), policy=FixedLength(3))
    results = texts(engine, 800, max_tokens=3)
    assert follows(results, rates_of_texts([P] * 3, 1)) > PASSES
    accepted = [r.num_accepted for result in results for r in result.rounds if r.num_drafted]
    assert 0 < sum(accepted) < sum(r.num_drafted for result in results for r in result.rounds) or kind == "good"
    assert kind != "good" or all(r.num_accepted == r.num_drafted for result in results for r in result.rounds)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_neither_draft_length_nor_batch_changes_the_distribution(length: int, max_rows: int) -> None:
    engine = Engine(target(), TableDrafter(OVERLAP), policy=FixedLength(length), max_rows=max_rows)
    # With 5 tokens to go a block of 4 fits; the first two are counted.
    seen = Counter(r.token_ids[:2] for r in texts(engine, 350, max_tokens=5))
    assert pvalue(seen, rates_of_texts([P] * 2, 1)) > PASSES


# Of P's rows, by hand: the two likeliest of each; what is in the likeliest tokens up to 0.6; at most half as likely.
KEPT = {
    "top_k": np.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0]]),
    "top_p": np.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 0]]),
    "min_p": np.array([[1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0]]),
}
FILTERS: dict[str, dict[str, float]] = {"top_k": {"top_k": 2}, "top_p": {"top_p": 0.6}, "min_p": {"min_p": 0.499}}


@pytest.mark.parametrize("plain_drafts", [False, True], ids=["filtered drafts", "unfiltered drafts"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_hold_for_the_text_also_where_the_drafter_has_none(name: str, plain_drafts: bool) -> None:
    class Plain(TableDrafter):
        def changed(self, draw: Draw) -> Draw:
            return draw._replace(params=SamplingParams(temperature=1.0, seed=draw.params.seed))

    drafter = (Plain if plain_drafts else TableDrafter)(0.5 * P + 0.5 * OVERLAP)
    results = texts(Engine(target(), drafter, policy=FixedLength(2)), 500, **FILTERS[name])
    kept = P * KEPT[name]
    assert follows(results, rates_of_texts([kept / kept.sum(1, keepdims=True)] * 2, 1)) > PASSES


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_is_the_targets(temperature: float) -> None:
    results = texts(Engine(target(), TableDrafter(OVERLAP), policy=FixedLength(2)), 600, temperature=temperature)
    warm = P ** (1 / temperature)
    assert follows(results, rates_of_texts([warm / warm.sum(1, keepdims=True)] * 2, 1)) > PASSES


def test_penalties_biases_and_bans_count_the_tokens_of_the_same_block() -> None:
    """Token 2 weighs double and token 0 is banned for one token; the first token weighs half as the second one."""
    params: dict[str, Any] = {
        "logit_bias": {2: float(np.log(2))}, "presence_penalty": float(np.log(2)),
        "stop_token_ids": (0,), "min_tokens": 1,
    }  # fmt: skip
    expected = {}
    first = P[1] * np.array([0, 1, 2, 1])
    for one in range(1, 4):
        second = P[one] * np.array([1, 1, 2, 1]) * np.where(np.arange(4) == one, 0.5, 1.0)
        for two in range(4):
            expected[one, two] = first[one] / first.sum() * second[two] / second.sum()
    for rates in (OVERLAP, None):
        results = texts(Engine(target(), TableDrafter(rates), policy=FixedLength(2)), 800, **params)
        assert follows(results, expected) > PASSES


def test_requests_with_and_without_sampled_drafts_share_a_batch() -> None:
    engine, drafter = Engine(target()), TableDrafter(OVERLAP)
    params = [
        SamplingParams(max_tokens=3, temperature=1.0, seed=seed, draft_sampling=seed % 2 == 0) for seed in range(1000)
    ]
    mixed = Engine(target(), drafter, policy=FixedLength(2), max_rows=4)
    got = mixed.generate([Request(prompt_ids=(1,), params=p) for p in params])
    assert follows(got[::2], rates_of_texts([P] * 3, 1)) > PASSES
    plain = engine.generate([Request(prompt_ids=(1,), params=p) for p in params[1::2]])
    assert [r.token_ids for r in got[1::2]] == [r.token_ids for r in plain]
    for request in drafter.requests:
        assert request.draws is None or all(d is None or d.params.draft_sampling for d in request.draws)


# -------------------------------------------------------------------------------- what would bend it


def test_drafts_cut_by_what_they_are_fail_the_same_test() -> None:
    class Choosy(TableDrafter):
        """Never lets a 0 be verified."""

        def cut(self, tokens: list[int]) -> list[int]:
            return tokens[: tokens.index(0)] if 0 in tokens else tokens

    results = texts(Engine(target(), Choosy(OVERLAP), policy=FixedLength(2)), 800)
    assert follows(results, rates_of_texts([P] * 2, 1)) < FAILS


def test_drafts_that_misstate_their_distribution_fail_the_same_test() -> None:
    class Cooler(TableDrafter):
        def propose(self, state: State, request: DraftRequest) -> Proposal:
            proposal = super().propose(state, request)
            assert proposal.probs is not None
            return proposal._replace(probs=(proposal.probs**2) / (proposal.probs**2).sum(-1, keepdim=True))

    results = texts(Engine(target(), Cooler(P), policy=FixedLength(2)), 1200)
    assert follows(results, rates_of_texts([P] * 2, 1)) < FAILS


def test_drafts_cut_by_those_before_them_pass() -> None:
    class Patient(TableDrafter):
        """Ends a draft behind a 1."""

        def cut(self, tokens: list[int]) -> list[int]:
            return tokens[: tokens.index(1) + 1] if 1 in tokens else tokens

    results = texts(Engine(target(), Patient(OVERLAP), policy=FixedLength(3)), 800, max_tokens=3)
    assert follows(results, rates_of_texts([P] * 3, 1)) > PASSES


# ------------------------------------------------------------------------------------ uniform numbers


def test_the_tokens_own_numbers_are_what_they_were_and_streams_are_apart() -> None:
    for seed, position in [(0, 0), (7, 123), (2**64 - 1, 5)]:
        key = np.array([seed, position], dtype=np.uint64)
        bits = int(np.random.Philox(key=key).random_raw())
        assert uniform(seed, position) == uniform(seed, position, 0) == ((bits >> 11) + 0.5) * 2.0**-53
    numbers = np.array([[uniform(3, position, stream) for stream in range(5)] for position in range(1000)])
    assert len(np.unique(numbers)) == numbers.size
    assert all(stats.kstest(column, "uniform").pvalue > PASSES for column in numbers.T)
    correlation = np.corrcoef(numbers.T) - np.eye(5)
    assert np.abs(correlation).max() < 4 / np.sqrt(1000)


def test_a_position_drafted_in_two_rounds_is_drawn_anew() -> None:
    drafter = TableDrafter(OUTSIDE)
    texts(Engine(target(), drafter, policy=FixedLength(3)), 1, max_tokens=6)
    places = [
        (draw.position + k, DRAFTING + k)
        for request in drafter.requests
        for draw, n in zip(request.draws or (), request.num_tokens, strict=True)
        if draw
        for k in range(n)
    ]
    positions = [position for position, _ in places]
    assert len(set(places)) == len(places) > len(set(positions))
    assert next(draw.position for request in drafter.requests for draw in request.draws or () if draw) == 1


def test_without_the_option_no_drafter_is_asked_for_samples() -> None:
    drafter = TableDrafter(P)
    engine = Engine(target(), drafter, policy=FixedLength(3))
    drafted, plain = (texts(e, 50, max_tokens=8, draft_sampling=False) for e in (engine, Engine(target())))
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(request.draws is None for request in drafter.requests)


def test_the_same_drafter_and_seed_give_the_same_text_alone_and_in_a_batch() -> None:
    alone, batch = (
        texts(Engine(target(), TableDrafter(OVERLAP), policy=FixedLength(3), max_rows=rows), 40, max_tokens=9)
        for rows in (1, 8)
    )
    assert [r.token_ids for r in alone] == [r.token_ids for r in batch]


# --------------------------------------------------------------------------------------- one decision


def test_a_draft_is_accepted_with_p_over_q_and_never_drawn_again() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
    rest = {0: 0.4 / 0.5, 2: 0.1 / 0.5}  # of p - q where it is above 0
    params = SamplingParams(temperature=1.0, draft_sampling=True)
    for token, chance in enumerate((1.0, 0.5, 1.0, 0.0)):
        tokens = [
            choose(p.log(), params, position=i, prompt=(), generated=(), draft=Proposed(token, q)).token_id
            for i in range(700)
        ]
        hits = tokens.count(token)
        assert hits == 700 * chance if chance in (0, 1) else stats.binomtest(hits, 700, chance).pvalue > PASSES
        others = Counter(t for t in tokens if t != token)
        assert not others or pvalue(others, rest) > PASSES


def test_a_certain_draft_is_accepted_with_p_and_the_rest_is_the_target_without_it() -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    params = SamplingParams(temperature=1.0, draft_sampling=True)
    tokens = [
        choose(p.log(), params, position=i, prompt=(), generated=(), draft=Proposed(1, None)).token_id
        for i in range(1000)
    ]
    assert stats.binomtest(tokens.count(1), 1000, 0.3).pvalue > PASSES
    assert pvalue(Counter(t for t in tokens if t != 1), {0: 5 / 7, 2: 2 / 7}) > PASSES


def test_equal_distributions_accept_always_also_where_one_token_is_certain() -> None:
    params = SamplingParams(temperature=1.0, draft_sampling=True)
    for p in (torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.0, 1.0, 0.0])):
        for position in range(100):
            token, q = sample(p.log(), Draw(params, position), 0)
            choice = choose(p.log(), params, position=position, prompt=(), generated=(), draft=Proposed(token, q))
            assert choice.token_id == token
            assert choice.margin == float("inf")


def test_log_probabilities_are_the_targets_also_of_drafts() -> None:
    for result in texts(Engine(target(), TableDrafter(OVERLAP), policy=FixedLength(2)), 20, logprobs=1):
        assert [item.token_id for item in result.logprobs] == list(result.token_ids)
        for (before, token), item in zip(itertools.pairwise((1, *result.token_ids)), result.logprobs, strict=True):
            assert item.logprob == pytest.approx(np.log(P[before, token]), abs=1e-5)


@pytest.mark.parametrize("exact", ["recheck", "off"])
def test_near_ties_need_no_recheck_where_no_seed_promises_a_token(exact: Any) -> None:
    model = target()
    model.epsilon = 0.5
    engine = Engine(model, TableDrafter(OVERLAP), policy=FixedLength(2), exact=exact)
    assert follows(texts(engine, 400), rates_of_texts([P] * 2, 1)) > PASSES
    assert engine.counters["near_ties"] == engine.counters["rechecks"] == 0


# --------------------------------------------------------------------------------------------- faults


class Faulty(ToyTarget):
    """A block that holds a 1 behind its anchor makes the row before that not finite."""

    def forward(self, rows: Rows) -> TargetOutput:
        out = super().forward(rows)
        assert out.logits is not None
        first = 0
        for n in rows.lengths:
            for at in range(first + 1, first + n):
                if int(rows.tokens[at]) == 1:
                    out.logits[at - 1] = torch.nan
            first += n
        return out


def test_a_row_computed_anew_weighs_the_same_draft() -> None:
    """Else drafts of 1, which break their row, would be judged by another rule than the others."""
    model = Faulty(logs(P), eos=())
    engine = Engine(model, TableDrafter(OVERLAP), policy=FixedLength(2))
    assert follows(texts(engine, 1000), rates_of_texts([P] * 2, 1)) > PASSES
    assert engine.counters["rechecks"] > 200


def test_logits_that_are_not_finite_alone_end_the_request() -> None:
    model = target()
    model.noise = lambda _width, _position: float("nan")
    (result,) = texts(Engine(model, TableDrafter(P), policy=FixedLength(2)), 1)
    assert result.finish_reason == "error"
    assert "non-finite" in (result.error or "")


def test_samples_of_another_vocabulary_are_refused() -> None:
    drafter = TableDrafter(P)
    propose = drafter.propose

    def wider(state: State, request: DraftRequest) -> Proposal:
        proposal = propose(state, request)
        assert proposal.probs is not None
        return proposal._replace(probs=torch.cat((proposal.probs, torch.zeros(1, 2, 1)), dim=-1))

    drafter.propose = wider  # type: ignore[method-assign]
    with pytest.raises(HyflashError, match="samples of 5 tokens; the target has 4"):
        texts(Engine(target(), drafter, policy=FixedLength(2)), 1, max_tokens=3)


def test_greedy_requests_and_drafters_that_cannot_sample_refuse_the_option() -> None:
    with pytest.raises(UserError, match="draft_sampling needs a temperature above 0"):
        SamplingParams(draft_sampling=True)
    drafter = TableDrafter(P)
    drafter.samples = False
    for engine, why in ((Engine(target()), "there is none"), (Engine(target(), drafter), "cannot")):
        with pytest.raises(UserError, match=f"draft_sampling needs a drafter that samples its drafts.*{why}"):
            texts(engine, 1)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "hi", "--draft-sampling"], ["draft_sampling", "temperature above 0"]),
        (["bench", "-d", "lookup", "--draft-sampling"], ["draft_sampling", "temperature above 0"]),
        (["generate", "hi", "--draft-sampling", "--temperature", "1", "-d", "none"], ["--draft-sampling", "none"]),
        (["generate", "hi", "--draft-sampling", "--temperature", "1", "--compare"], ["--compare", "--draft-sampling"]),
    ],
)
def test_the_command_line_says_what_does_not_go_together(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in words)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target_dir(tmp_path_factory.mktemp("target")))


SAMPLED = ["--temperature", "1", "--draft-sampling"]


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["bench", "--limit", "1"]], ids=lambda c: c[0])
def test_commands_refuse_a_drafter_without_samples(
    command: list[str], tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "-t", tiny, "-d", "lookup", *SAMPLED]) == 1
    assert "draft_sampling needs a drafter that samples its drafts" in capsys.readouterr().err


def test_generate_samples_drafts_and_says_that_the_text_is_not_plain(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["-t", tiny, "-d", "hyflash", "-n", "24", "--length", "fixed", "--json", "hello"]
    found = []
    for options in (SAMPLED, SAMPLED, SAMPLED[:2]):
        torch.manual_seed(0)  # of the drafter's fresh weights
        assert main(["generate", *how, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["token_ids"] == found[1]["token_ids"] != found[2]["token_ids"]
    assert [one["exact"] for one in found] == [False, False, True]
    assert "drafts are sampled" in found[0]["warnings"][0]
    assert not found[2]["warnings"]


@pytest.mark.parametrize("more", [["--acceptance-only"], ["--length", "fixed"]], ids=["acceptance", "timed"])
def test_bench_compares_nothing_where_texts_may_differ(
    more: list[str], tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["-t", tiny, "-d", "hyflash", "--limit", "1", "-n", "12", "--num-draft-tokens", "3", "--json"]
    assert main(["bench", *how, *SAMPLED, *more]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["settings"]["draft_sampling"] is True
    for row in table["results"]:
        assert row["exact"] is None
        assert row["forks"] == []
        assert row["num_judged_by_position"][0] > 0
        assert (row["tokens_per_sec"] is None) == ("--acceptance-only" in more)


# --------------------------------------------------------------------------------------- real drafters

BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash-markov": ("dflash", {"correction": "markov", "draft_vocab_size": 32}),
    "hyflash": ("hyflash", {"correction": "gru", "start": "ridge", "draft_vocab_size": 32}),
    "domino": ("domino", {"draft_vocab_size": 32}),
    "dspark": ("dspark", {"markov": "rnn"}),
    "dels": ("dels", {}),
    "dflash2": ("dflash2", {"selector_top_k": 16}),
    "eagle": ("eagle", {"draft_vocab_size": 32}),
    "eagle-own-head": ("eagle", {"own_head": True, "draft_vocab_size": 32}),
    "dcoco": ("dcoco", {"draft_vocab_size": 32, "selector_top_k": 16}),
}


class FeatureTarget(ToyTarget):
    """A table of next tokens whose features are random rows of the last token, as the tiny drafters read them."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        super().__init__(torch.randn(VOCAB, VOCAB, generator=random), eos=())
        self.rows = torch.randn(VOCAB, 3, DIM, generator=random)

    def forward(self, rows: Rows) -> TargetOutput:
        out = super().forward(rows)
        return replace(out, features=self.rows[rows.tokens][:, list(rows.taps)] if rows.taps else None)

    def hooks(self) -> TargetHooks:
        return hooks()


def drafts_of(
    drafter: Drafter,
    num: int,
    *,
    text: Sequence[int] = (5, 9, 11),
    first_seed: int = 0,
    prices: Prices | None = None,
    **params: Any,
) -> Proposal:
    """Drafts after one text with `num` seeds, a row each."""
    model, state = FeatureTarget(), drafter.new_state(num)
    committed = torch.tensor(text[:-1])
    features = model.rows[committed][:, list(drafter.target_layer_ids)].repeat(num, 1, 1, 1)
    drafter.commit(state, Commit(rows=range(num), tokens=[list(text[:-1])] * num, features=features))
    settings = {"temperature": 1.0, "draft_sampling": True, **params}
    draws = [Draw(SamplingParams(seed=first_seed + b, **settings), len(text)) for b in range(num)]
    return drafter.propose(
        state, DraftRequest(rows=range(num), anchors=[text[-1]] * num, num_tokens=[3] * num, prices=prices, draws=draws)
    )


def hooks() -> TargetHooks:
    """With a head that makes distributions neither flat nor certain."""
    sharp = fake_hooks()
    return replace(sharp, head=lambda h: 0.3 * sharp.head(h), head_rows=lambda ids: 0.3 * sharp.head_rows(ids))


def block_drafter(name: str) -> Drafter:
    method, options = BLOCKS[name]
    return tiny_drafter(method, hooks(), **options)


@pytest.mark.parametrize("name", BLOCKS)
def test_real_drafters_draft_samples_of_the_distribution_they_state(name: str) -> None:
    proposal = drafts_of(block_drafter(name), 400, top_k=4)
    probs = proposal.probs
    assert probs is not None
    assert probs.shape == (400, 3, VOCAB)
    torch.testing.assert_close(probs.sum(-1), torch.ones(400, 3, dtype=torch.float64))
    tokens = torch.tensor([list(draft.tokens) for draft in proposal.drafts])
    assert (probs.gather(-1, tokens[..., None]) > 0).all()
    alike = [torch.equal(probs[:, k], probs[:1, k].expand(400, -1)) for k in (0, 1)]
    assert alike == [True, name == "dflash"], "the first hangs on the text alone, later ones on the samples before"
    expected: dict[Any, float] = {}
    for b, (one, two, _) in enumerate(tokens.tolist()):
        expected[one, two] = float(probs[0, 0, one] * probs[b, 1, two])
        for other in probs[b, 1].nonzero()[:, 0].tolist():
            expected[one, other] = float(probs[0, 0, one] * probs[b, 1, other])
    assert len({one for one, _ in expected}) > 1
    assert pvalue(Counter((one, two) for one, two, _ in tokens.tolist()), expected) > PASSES


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_without_a_draw_stay_greedy_and_nothing_changes_the_state(name: str) -> None:
    drafter = block_drafter(name)
    batch = random_batch(drafter, (9, 12))
    state, params = drafter.new_state(2), SamplingParams(temperature=1.0, draft_sampling=True)
    for row, n in enumerate((8, 11)):
        features, tokens = batch.features[row : row + 1, :n], [batch.tokens[row, :n].tolist()]
        drafter.commit(state, Commit(rows=[row], tokens=tokens, features=features))
    plain = DraftRequest(rows=[0, 1], anchors=[4, 6], num_tokens=[3, 2])
    before = drafter.propose(state, plain)
    mixed = drafter.propose(state, replace(plain, draws=[None, Draw(params, 12)]))
    assert drafter.propose(state, plain) == before
    assert before.probs is None
    assert mixed.drafts[0].tokens == before.drafts[0].tokens
    assert mixed.probs is not None
    for k, token in enumerate(mixed.drafts[0].tokens):
        assert mixed.probs[0, k].nonzero().tolist() == [[token]]
    assert len(mixed.drafts[1].tokens) == 2
    if name != "dspark":  # whose confidence comes from the tokens before
        assert not mixed.drafts[1].confidence
    assert drafter.propose(state, replace(plain, draws=[None, Draw(params, 12)])).drafts == mixed.drafts


@pytest.mark.parametrize("name", BLOCKS)
def test_mean_acceptance_is_the_overlap_of_both_distributions(name: str) -> None:
    """Of the first draft of a block, sum over tokens of min(p, q); the second by the q after each first."""
    drafter, model, num = block_drafter(name), FeatureTarget(), 600
    results = texts(Engine(model, drafter, policy=FixedLength(2), max_rows=100), num, prompt=(5, 9, 11), max_tokens=3)
    probs = drafts_of(drafter, 1).probs
    assert probs is not None
    p = model.table[11].double().softmax(-1)
    overlap = float(torch.minimum(p, probs[0, 0]).sum())
    accepted = sum(result.rounds[0].num_accepted > 0 for result in results)
    assert 0.05 < overlap < 0.95
    assert stats.binomtest(accepted, num, overlap).pvalue > PASSES
    assert pvalue(Counter(r.token_ids[0] for r in results), dict(enumerate(p.tolist()))) > PASSES


class Priced(FixedLength):
    """Rows that cost something, so that parts with prices cut and choose."""

    def prices(self, num_rows: int) -> Prices:
        return Prices(forward=[1.0, 1.2, 1.4, 1.7, 2.0], one_sec=10.0)


def expected_texts(last: int, num: int) -> dict[Any, float]:
    """Chances of the next `num` tokens with top-k 3."""
    if not num:
        return {(): 1.0}
    top = FeatureTarget().table[last].double().topk(3)
    return {
        (token, *rest): chance * after
        for token, chance in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True)
        for rest, after in expected_texts(token, num - 1).items()
    }


def wavering(bias: float = 2.0) -> Drafter:
    """A DSpark whose confidence in a draft hangs on the one before it."""
    drafter = block_drafter("dspark")
    with torch.no_grad():
        drafter.get_parameter("confidence_head.proj.bias").add_(bias)
        drafter.get_parameter("confidence_head.proj.weight")[:, DIM:].mul_(30.0)  # of the token before
    return drafter


def test_a_confidence_that_cuts_by_prices_leaves_the_distribution_alone() -> None:
    engine = Engine(FeatureTarget(), wavering(), policy=Priced(3), max_rows=50)
    results = texts(engine, 800, prompt=(5, 9, 11), max_tokens=4, top_k=3)
    first = Counter(result.rounds[0].num_drafted for result in results)
    assert len(first - Counter([0])) > 1, "where the first drafts end hangs on the samples before"
    assert pvalue(Counter(r.token_ids[:3] for r in results), expected_texts(11, 3)) > PASSES


def test_what_other_rows_sample_does_not_cut_a_row() -> None:
    drafter, prices = wavering(), Priced(3).prices(1)
    together = drafts_of(drafter, 40, top_k=3, prices=prices).drafts
    assert len({len(d.tokens) for d in together}) > 1
    for seed, draft in enumerate(together):
        (alone,) = drafts_of(drafter, 1, first_seed=seed, top_k=3, prices=prices).drafts
        assert alone.tokens == draft.tokens


def composed(dear: Drafter) -> Composite:
    return Composite([("lookup", tiny_drafter("lookup", hooks())), ("block", dear)])


@pytest.mark.parametrize("policy", [FixedLength(2), Priced(2)], ids=["fixed", "priced"])
def test_a_composition_of_samples_and_copies_keeps_the_distribution(policy: FixedLength) -> None:
    drafter = composed(block_drafter("hyflash"))
    assert drafter.samples
    assert not composed(tiny_drafter("lookup", hooks())).samples
    # 9 came before, so that lookup has a copy; after most other tokens it has none.
    engine = Engine(FeatureTarget(), drafter, policy=policy, max_rows=50)
    results = texts(engine, 800, prompt=(5, 9, 11, 5, 9), max_tokens=4, top_k=3)
    assert pvalue(Counter(r.token_ids[:2] for r in results), expected_texts(9, 2)) > PASSES
    assert {"lookup", "block"} <= {r.source for result in results for r in result.rounds}


def test_a_composition_chooses_by_the_past_alone_whatever_the_samples_are() -> None:
    """What the block drafter states of its later drafts would make it lose to lookup after some first drafts."""
    dear = wavering(bias=-3.0)
    stated = [sum(np.cumprod(d.confidence)) for d in drafts_of(dear, 60, text=(9, 11, 5, 9)).drafts]
    assert np.std(stated) > 0.01
    composite = composed(dear)
    for prices in (None, Prices(forward=[1.0, 1.01, 1.02, 1.03], one_sec=10.0)):
        proposal = drafts_of(composite, 60, text=(9, 11, 5, 9), prices=prices)
        assert {(d.source, len(d.tokens)) for d in proposal.drafts} == {("block", 3)}
        assert len({d.tokens[0] for d in proposal.drafts}) > 3


def test_a_drafter_that_breaks_in_a_block_keeps_the_samples_before() -> None:
    drafter = block_drafter("domino")
    whole = drafts_of(drafter, 20)
    for parameter in drafter.get_submodule("prefix_gru").parameters():
        parameter.data.fill_(torch.nan)
    broken = drafts_of(drafter, 20)
    assert [d.tokens for d in broken.drafts] == [d.tokens[:1] for d in whole.drafts]
    assert broken.num_nonfinite == 20
    with pytest.warns(UserWarning, match="non-finite"):
        results = texts(
            Engine(FeatureTarget(), drafter, policy=FixedLength(3), max_rows=50),
            500,
            prompt=(5, 9, 11),
            max_tokens=4,
            top_k=3,
        )
    assert pvalue(Counter(r.token_ids[:2] for r in results), expected_texts(11, 2)) > PASSES
