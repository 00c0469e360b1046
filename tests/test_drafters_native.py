"""Drafters on the CPU kernels: what they serve on torch, to rounding; every row on its own; never with old weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafting import (
    KINDS,
    ask,
    assert_same_snapshot,
    commit_spans,
    drafts,
    filled,
    num_drafted,
    random_batch,
    stated,
    tiny_drafter,
)
from families import text
from hyflash.core import Commit, DraftRequest, Draw, Request, SamplingParams, TrainBatch
from hyflash.drafters import dels, dflash, packed_drafter
from hyflash.drafters.base import Drafter
from hyflash.drafters.compose import Composite
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.ops.kernels import Kernels
from native_models import native_dir, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache")]
torch.set_num_threads(1)
ON_TORCH = ("lookup", "dflash2", "eagle")
"""Methods without a form for the kernels; `fold` has one at its limits only."""
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: kind for name, kind in KINDS.items() if kind[0] not in ON_TORCH and name != "fold"},
    "dflash-two-layers": ("dflash", {"num_layers": 2, "causal_block": True, "attention_bias": True}),
    "dflash-mixed": ("dflash", {"num_layers": 2, "window": 8, "full_layers": (1,)}),
    "dflash-markov": ("dflash", {"draft_vocab_size": 32, "correction": "markov"}),
    "dflash-full-gru": ("dflash", {"correction": "gru"}),
    "hyflash-reduced": ("hyflash", {"draft_vocab_size": 32, "num_layers": 2}),
    "dels-silu": (
        "dels",
        {"draft_vocab_size": 32, "expert_activation": "silu", "alpha": 0.8, "beta": 0.5, "num_layers": 2},
    ),
    "dels-schedule": ("dels", {"draft_vocab_size": 32, "correction": "gru", "alpha": (0.8, 0.1, 0.4)}),
    "dels-bigram": ("dels", {"draft_vocab_size": 32, "correction": "gru", "expert": "markov", "expert_width": 0}),
    "hyflash-low-rank": ("hyflash", {"draft_vocab_size": 24, "start": "ridge", "start_rank": 12, "tap_norm": False}),
}
"""Kinds of drafters that have a packed form on a target whose heads are 16 wide."""
LENGTHS = (1, 9, 23, 40)
UPTO = (0, 8, 22, 39)  # the last token of each sequence is its anchor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from hyflash.targets import native

    path: Path = native_dir(tmp_path_factory.mktemp("target"), "llama")
    return native.load(path, num_threads=1)


@pytest.fixture(params=NATIVE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pair(kind: str, target: Any, weights: str = "float32") -> tuple[Drafter, Drafter]:
    """The same drafter on torch and on the kernels."""
    spec, options = NATIVE[kind]
    plain, packed = (tiny_drafter(spec, target.hooks(), **options) for _ in range(2))
    assert packed.use_kernels(target.kernels(weights))
    return plain, packed


def block(drafter: Drafter) -> dflash.DrafterImpl:
    """The block drafter, or the one inside."""
    inner = drafter.parts[-1] if isinstance(drafter, Composite) else drafter
    assert isinstance(inner, dflash.DrafterImpl)
    return inner


def anchors_of(batch: TrainBatch) -> list[int]:
    return [int(batch.tokens[b, n]) for b, n in enumerate(UPTO)]


def hidden(drafter: Drafter, state: Any, rows: tuple[int, ...], anchors: list[int]) -> Tensor:
    inner = state.parts[-1] if isinstance(drafter, Composite) else state
    request = DraftRequest(rows=rows, anchors=anchors, num_tokens=(3,) * len(rows))
    return block(drafter).block_hidden(inner, request)


def assert_same_proposal(got: Any, want: Any) -> None:
    assert drafts(got) == drafts(want)
    assert got.num_nonfinite == want.num_nonfinite
    torch.testing.assert_close(stated(got), stated(want), atol=1e-4, rtol=1e-3)


# ------------------------------------------------------------------------------------- parity with torch


@pytest.mark.parametrize("pieces", [(), (1,) * 40, (3, 17, 1, 5), (39,)])
def test_states_and_drafts_are_those_on_torch(kind: str, pieces: tuple[int, ...], target: Any) -> None:
    plain, packed = pair(kind, target)
    batch = random_batch(plain, LENGTHS)
    want, got = (filled(drafter, batch, UPTO, pieces=pieces) for drafter in (plain, packed))
    for row in range(len(UPTO)):
        assert_same_snapshot(got.snapshot(row), want.snapshot(row), exact=False)
        assert got.nbytes(row) == want.nbytes(row)
    rows, anchors = tuple(range(len(UPTO))), anchors_of(batch)
    torch.testing.assert_close(
        hidden(packed, got, rows, anchors), hidden(plain, want, rows, anchors), atol=1e-4, rtol=1e-4
    )
    for num in (1, 2, 99):
        assert_same_proposal(ask(packed, got, rows, anchors, num), ask(plain, want, rows, anchors, num))
    assert packed.cost(100) == plain.cost(100)


def test_samples_are_of_the_distributions_of_torch(kind: str, target: Any) -> None:
    plain, packed = (block(drafter) for drafter in pair(kind, target))
    batch = random_batch(plain, LENGTHS)
    draws = [Draw(SamplingParams(temperature=0.8, seed=row, draft_sampling=True), n + 1) for row, n in enumerate(UPTO)]
    request = DraftRequest(rows=range(4), anchors=anchors_of(batch), num_tokens=[3, 1, 3, 2], draws=[None, *draws[1:]])
    want, got = (drafter.propose(filled(drafter, batch, UPTO), request) for drafter in (plain, packed))
    assert packed.packed is not None
    assert drafts(got) == drafts(want)
    assert got.probs is not None
    torch.testing.assert_close(got.probs, want.probs, atol=1e-4, rtol=1e-2)
    assert [len(row) for row in drafts(got)] == [3, 1, 3, 2]


def test_a_proposal_leaves_the_state_as_it_was(kind: str, target: Any) -> None:
    _, packed = pair(kind, target)
    batch = random_batch(packed, LENGTHS)
    state = filled(packed, batch, UPTO)
    before = [copy.deepcopy(state.snapshot(row)) for row in range(4)]
    first = ask(packed, state, range(4), anchors_of(batch))
    assert ask(packed, state, range(4), anchors_of(batch)) == first
    for row in range(4):
        assert_same_snapshot(state.snapshot(row), before[row])


@pytest.mark.parametrize("weights", ["float32", "q8_0"])
def test_a_row_is_the_same_alone_bit_for_bit(kind: str, weights: str, target: Any) -> None:
    _, packed = pair(kind, target, weights)
    batch = random_batch(packed, LENGTHS)
    state, rows, anchors = filled(packed, batch, UPTO), (0, 1, 2, 3), anchors_of(batch)
    together, drafted = hidden(packed, state, rows, anchors), ask(packed, state, rows, anchors)
    for row in rows:
        alone = packed.new_state(1)
        if UPTO[row]:
            commit_spans(packed, alone, batch, {row: (0, UPTO[row])}, {row: 0})
        assert torch.equal(hidden(packed, alone, (0,), anchors[row : row + 1])[0], together[row])
        one = ask(packed, alone, (0,), anchors[row : row + 1])
        assert drafts(one)[0] == drafts(drafted)[row]
        assert_same_snapshot(alone.snapshot(0), state.snapshot(row))


def test_reset_and_restored_rows_serve_as_new_ones(kind: str, target: Any) -> None:
    _, packed = pair(kind, target)
    batch = random_batch(packed, LENGTHS)
    state = filled(packed, batch, UPTO)
    saved, want = state.snapshot(3), ask(packed, state, [3], anchors_of(batch)[3:])
    state.reset(3)
    assert_same_snapshot(state.snapshot(3), packed.new_state(4).snapshot(3))
    commit_spans(packed, state, batch, {2: (0, 5)}, {2: 3})
    state.restore(3, saved)
    assert_same_snapshot(state.snapshot(3), saved)
    assert ask(packed, state, [3], anchors_of(batch)[3:]) == want


def test_a_state_made_on_torch_is_served_on_the_kernels_and_back(target: Any) -> None:
    plain, packed = pair("hyflash-all-parts", target)
    batch = random_batch(plain, LENGTHS)
    state = filled(plain, batch, UPTO)
    want = ask(plain, state, range(4), anchors_of(batch))
    assert_same_proposal(ask(packed, state, range(4), anchors_of(batch)), want)
    assert not packed.use_kernels(None)
    assert ask(packed, state, range(4), anchors_of(batch)) == want


@pytest.mark.parametrize("kind", ["hyflash-all-parts", "hyflash-reduced"])
def test_features_that_are_not_finite_cut_the_draft_and_are_counted(kind: str, target: Any) -> None:
    for drafter in pair(kind, target):
        batch = random_batch(drafter, LENGTHS)
        bad = replace(batch, features=batch.features.clone())
        bad.features[2] = torch.nan
        state = filled(drafter, bad, UPTO)
        proposal = ask(drafter, state, range(4), anchors_of(batch))
        assert proposal.num_nonfinite == 1
        assert num_drafted(proposal) == [3, 3, 0, 3]


def test_an_anchor_outside_the_vocabulary_is_refused(target: Any) -> None:
    _, packed = pair("hyflash-all-parts", target)
    for anchor in (-1, target.info.vocab_size):
        with pytest.raises(IndexError):
            ask(packed, packed.new_state(1), [0], [anchor])


@pytest.mark.parametrize("kept", [1, 3, 7])
def test_few_kept_head_rows_serve_as_many(kept: int, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_drafter, "KEPT_ROWS", kept)
    plain, packed = pair("hyflash-reduced", target)
    for drafter in (plain, packed):
        drafter.set_draft_vocab(torch.arange(40, 72))  # what random_batch draws lies outside
    batch = random_batch(plain, LENGTHS)
    want, got = (filled(drafter, batch, UPTO) for drafter in (plain, packed))
    for rows in ([0], [3, 1], [2, 0], [0, 1, 2, 3]):
        for anchor in (5, 50, 90):
            anchors = [anchor] * len(rows)
            assert_same_proposal(ask(packed, got, rows, anchors), ask(plain, want, rows, anchors))


def test_empty_commits_change_nothing(kind: str, target: Any) -> None:
    _, packed = pair(kind, target)
    batch = random_batch(packed, LENGTHS)
    state = filled(packed, batch, UPTO)
    before = state.snapshot(1)
    commit_spans(packed, state, batch, {1: (8, 8), 3: (39, 40)}, {1: 1, 3: 3})
    commit_spans(packed, state, batch, {1: (8, 8)}, {1: 1})
    packed.commit(state, Commit(rows=[], tokens=[], features=batch.features[:0]))
    assert_same_snapshot(state.snapshot(1), before)


# --------------------------------------------------------------------------------------- what packs, and when


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("lookup", {}),
        ("dflash", {"head_dim": 8}),
        ("hyflash", {"memory_dim": 8}),
        ("hyflash", {"head_dim": 24, "memory_dim": 16}),
        ("dflash", {"window": 8, "window_counts_slots": True}),
        ("dflash2", {}),  # the kernels know no convolutions
    ],
)
def test_what_does_not_fit_stays_on_torch_and_says_so(spec: str, options: dict[str, Any], target: Any) -> None:
    drafter = tiny_drafter(spec, target.hooks(), **options)
    assert not drafter.use_kernels(target.kernels("q8_0"))
    batch = random_batch(drafter, LENGTHS)
    assert len(ask(drafter, filled(drafter, batch, UPTO), range(4), anchors_of(batch)).drafts) == 4


def test_other_precisions_stay_on_torch(target: Any) -> None:
    drafter = tiny_drafter("hyflash", target.hooks()).to(torch.bfloat16)
    assert not drafter.use_kernels(target.kernels("q8_0"))


def changed(drafter: dflash.DrafterImpl, how: str, kernels: Kernels) -> dflash.DrafterImpl:
    """The drafter after its weights may have changed in one of many ways."""
    if how == "load":
        drafter.load_state_dict(
            {name: 2 * value for name, value in drafter.state_dict().items() if value.is_floating_point()}, strict=False
        )
    elif how == "move":
        drafter.to(torch.float64)
    elif how == "copy":
        return copy.copy(drafter)
    elif how == "train":
        drafter.train()
    elif how == "step":
        batch = random_batch(drafter, (12, 20), num_anchors=3)
        drafter.loss(drafter(batch), batch).numerator.backward()
    elif how == "start":
        batch = random_batch(drafter, (30, 30), num_anchors=9)
        drafter.start([batch])
    return drafter


@pytest.mark.parametrize(
    ("kind", "folds"),
    [("dels", False), ("dels-folded", True), ("dels-hyflash", True), ("dels-silu", True), ("dels-schedule", False),
     ("dels-bigram", False)],
)  # fmt: skip
def test_a_short_expert_of_one_weight_is_in_the_pass_of_the_kernels(
    kind: str, folds: bool, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an expert that decides and a counted unigram; where it folds, no step of it is left to torch."""
    plain, packed = pair(kind, target)
    batch = random_batch(plain, LENGTHS)
    anchors = anchors_of(batch)
    silent = drafts(ask(plain, filled(plain, batch, UPTO), range(4), anchors))
    for drafter in (plain, packed):
        assert isinstance(drafter, dels.DrafterImpl)
        drafter.expert.up.data.mul_(20.0)
        drafter.set_label_counts(torch.arange(target.info.vocab_size) ** 2)
        assert drafter.packed is None
    assert packed.use_kernels(target.kernels("float32"))
    want = ask(plain, filled(plain, batch, UPTO), range(4), anchors)
    assert drafts(want) != silent
    if folds:
        monkeypatch.setattr(dels.LocalExpert, "forward", None)
    assert_same_proposal(ask(packed, filled(packed, batch, UPTO), range(4), anchors), want)


@pytest.mark.parametrize("how", ["load", "move", "copy", "train", "step", "start"])
def test_weights_that_may_have_changed_are_not_served_packed(how: str, target: Any) -> None:
    kernels = target.kernels("float32")
    drafter = block(tiny_drafter("hyflash", target.hooks(), draft_vocab_size=32, start="ridge"))
    assert drafter.use_kernels(kernels)
    assert drafter.packed is not None
    after = changed(drafter, how, kernels)
    assert after.packed is None
    if how != "move":
        assert after.eval().use_kernels(kernels)


def test_evaluation_keeps_the_kernels_and_measures_on_torch(target: Any) -> None:
    plain, packed = pair("hyflash-all-parts", target)
    batch = random_batch(plain, (12, 20), num_anchors=3)
    with torch.no_grad():
        assert torch.equal(packed.eval()(batch).hidden, plain(batch).hidden)
    assert block(packed).packed is not None


def test_a_new_draft_vocabulary_reaches_the_packed_head(target: Any) -> None:
    plain, packed = pair("hyflash-reduced", target)
    batch = random_batch(plain, LENGTHS)
    want, got = (filled(drafter, batch, UPTO) for drafter in (plain, packed))
    assert_same_proposal(ask(packed, got, range(4), anchors_of(batch)), ask(plain, want, range(4), anchors_of(batch)))
    for drafter in (plain, packed):
        drafter.set_draft_vocab(torch.arange(50, 82))
    assert_same_proposal(ask(packed, got, range(4), anchors_of(batch)), ask(plain, want, range(4), anchors_of(batch)))


# --------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    "kind", ["hyflash-all-parts", "hyflash-reduced", "dflash", "dcoco-memory", "dels-folded", "lookup+hyflash"]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_text_with_packed_drafters_is_that_of_plain_decoding(kind: str, batch: int, target: Any) -> None:
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}, {"temperature": 0.5}, {}]
    requests = [
        Request(prompt_ids=tuple(text(n, seed=n).tolist()), params=SamplingParams(max_tokens=14, ignore_eos=True, **s))
        for n, s in zip((1, 13, 40, 6), settings, strict=True)
    ]
    plain = [Engine(target, None).generate([request])[0].token_ids for request in requests]
    _, drafter = pair(kind, target, "q8_0")
    for width in (1, 2, 4, 8):
        engine = Engine(target, drafter, policy=FixedLength(width - 1), max_rows=batch)
        assert [result.token_ids for result in engine.generate(requests)] == plain
