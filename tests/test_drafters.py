"""What every drafter file must keep, whatever its method: the contract of `drafters/base.py`, by name of the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafting import (
    BatchKV,
    HalfRight,
    ask,
    assert_same_snapshot,
    assert_training_is_serving,
    commit_spans,
    drafts,
    filled,
    random_batch,
    tiny_drafter,
)
from families import VOCAB, family_dir, text
from hyflash import checkpoint, drafters
from hyflash.core import Draft, DraftRequest, Request, SamplingParams, TrainBatch
from hyflash.drafters.base import Drafter
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import HyflashError
from hyflash.targets import hf

torch.set_num_threads(1)
NAMES = drafters.names()
SPECS = [*NAMES, "+".join(NAMES)]
LENGTHS = (1, 23, 40)
UPTO = (0, 22, 39)  # the last token of each sequence is its anchor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("target"), "llama")))


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def drafter(spec: str, target: hf.HFTarget) -> Drafter:
    return tiny_drafter(spec, target.hooks())


@pytest.fixture
def batch(drafter: Drafter) -> TrainBatch:
    return random_batch(drafter, LENGTHS)


def anchors_of(batch: TrainBatch, upto: tuple[int, ...] = UPTO) -> list[int]:
    return [int(batch.tokens[b, n]) for b, n in enumerate(upto)]


# -------------------------------------------------------------------------------------- engine

PROMPTS = [text(n, seed=n) for n in (1, 9, 30, 4)]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5)


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def plain(request: pytest.FixtureRequest, target: hf.HFTarget) -> tuple[list[Request], list[tuple[int, ...]]]:
    """Requests and their answers by plain decoding, one at a time."""
    requests = [Request(prompt_ids=tuple(p.tolist()), params=request.param) for p in PROMPTS]
    return requests, [Engine(target).generate([r])[0].token_ids for r in requests]


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", [1, 4])
def test_texts_equal_plain_decoding_at_every_width_and_ragged_batch(
    drafter: Drafter, target: hf.HFTarget, plain: tuple[list[Request], list[tuple[int, ...]]], width: int, rows: int
) -> None:
    requests, want = plain
    if rows == 1:
        requests, want = requests[2:3], want[2:3]
    policy = FixedLength(width - 1)
    assert [r.token_ids for r in Engine(target, drafter, policy=policy).generate(requests)] == want
    texts = [[*r.prompt_ids, *answer] for r, answer in zip(requests, want, strict=True)]
    engine = Engine(target, HalfRight(drafter, texts, seed=width), policy=policy, prefill_chunk=2 * width - 1)
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == want
    if width > 2:
        assert len({trace.num_accepted for r in results for trace in r.rounds}) > 1


# --------------------------------------------------------------------------------------- state


def test_commits_in_pieces_equal_one_commit(drafter: Drafter, batch: TrainBatch) -> None:
    whole = filled(drafter, batch, UPTO)
    want = ask(drafter, whole, range(3), anchors_of(batch), batch=batch)
    for pieces in ([1] * 40, [5, 1, 7, 16, 2], [39], [8] * 5):
        state = filled(drafter, batch, UPTO, pieces=pieces)
        got = ask(drafter, state, range(3), anchors_of(batch), batch=batch)
        assert drafts(got) == drafts(want)
        for row in range(3):
            assert_same_snapshot(state.snapshot(row), whole.snapshot(row), exact=False)
            assert state.nbytes(row) == whole.nbytes(row)


def test_an_empty_commit_changes_nothing(drafter: Drafter, batch: TrainBatch) -> None:
    state = filled(drafter, batch, UPTO)
    before = [state.snapshot(row) for row in range(3)]
    commit_spans(drafter, state, batch, {0: (0, 0), 2: (39, 39)}, {0: 0, 2: 2})
    for row in range(3):
        assert_same_snapshot(state.snapshot(row), before[row])


def test_propose_leaves_the_state_as_it_was(drafter: Drafter, batch: TrainBatch) -> None:
    state = filled(drafter, batch, UPTO)
    before = [state.snapshot(row) for row in range(3)]
    first = ask(drafter, state, range(3), anchors_of(batch), batch=batch)
    for num in (1, 2, 99):
        ask(drafter, state, (2, 0), [4, 5], num, batch=batch)
    for row in range(3):
        assert_same_snapshot(state.snapshot(row), before[row])
    assert drafts(ask(drafter, state, range(3), anchors_of(batch), batch=batch)) == drafts(first)


def test_a_batch_row_proposes_what_it_proposes_alone(drafter: Drafter, batch: TrainBatch) -> None:
    state, anchors = filled(drafter, batch, UPTO), anchors_of(batch)
    together = ask(drafter, state, range(3), anchors, batch=batch)
    for row in range(3):
        alone = ask(drafter, state, (row,), anchors[row : row + 1], batch=batch)
        assert drafts(alone)[0] == drafts(together)[row]
        other = drafter.new_state(5)
        commit_spans(drafter, other, batch, {row: (0, UPTO[row])}, {row: 3})
        moved = ask(drafter, other, (3,), anchors[row : row + 1], batch=batch, seqs={3: row})
        assert drafts(moved)[0] == drafts(together)[row]
    mixed = ask(drafter, state, (2, 0, 1), [anchors[2], anchors[0], anchors[1]], batch=batch)
    assert drafts(mixed) == [drafts(together)[row] for row in (2, 0, 1)]


def test_rows_that_were_not_committed_to_stay_as_they_were(drafter: Drafter, batch: TrainBatch) -> None:
    state = filled(drafter, batch, (0, 10, 10))
    before = state.snapshot(1)
    commit_spans(drafter, state, batch, {2: (10, 39)}, {2: 2})
    assert_same_snapshot(state.snapshot(1), before)


def test_a_snapshot_is_a_copy_and_restores_to_the_bit_in_any_row(drafter: Drafter, batch: TrainBatch) -> None:
    state, anchor = filled(drafter, batch, (0, 22, 20)), anchors_of(batch)[2:]
    saved = state.snapshot(2)
    commit_spans(drafter, state, batch, {2: (20, 39)}, {2: 2})
    want, after = ask(drafter, state, (2,), anchor, batch=batch), state.snapshot(2)
    state.restore(1, saved)  # over another text
    assert_same_snapshot(state.snapshot(1), saved)
    commit_spans(drafter, state, batch, {2: (20, 39)}, {2: 1})
    assert_same_snapshot(state.snapshot(1), after)
    assert drafts(ask(drafter, state, (1,), anchor, batch=batch, seqs={1: 2})) == drafts(want)
    fresh = drafter.new_state(1)
    fresh.restore(0, after)
    assert drafts(ask(drafter, fresh, (0,), anchor, batch=batch, seqs={0: 2})) == drafts(want)
    assert fresh.nbytes(0) == state.nbytes(1)


def test_a_reset_row_is_as_good_as_new(drafter: Drafter, batch: TrainBatch) -> None:
    state, fresh = filled(drafter, batch, UPTO), drafter.new_state(3)
    kept = state.snapshot(1)
    state.reset(2)
    assert_same_snapshot(state.snapshot(2), fresh.snapshot(2))
    assert state.nbytes(2) == fresh.nbytes(2)
    assert_same_snapshot(state.snapshot(1), kept)
    commit_spans(drafter, state, batch, {1: (0, 9)}, {1: 2})
    commit_spans(drafter, fresh, batch, {1: (0, 9)}, {1: 2})
    got = ask(drafter, state, (2,), [5], batch=batch, seqs={2: 1})
    assert drafts(got) == drafts(ask(drafter, fresh, (2,), [5], batch=batch, seqs={2: 1}))


# ------------------------------------------------------------------------------------ proposals


def test_proposals_are_in_range_and_no_longer_than_asked(spec: str, drafter: Drafter, batch: TrainBatch) -> None:
    state, anchors = filled(drafter, batch, UPTO), anchors_of(batch)
    assert drafter.max_draft_tokens >= 1
    longest = drafts(ask(drafter, state, range(3), anchors, drafter.max_draft_tokens + 5, batch=batch))
    for num in (1, 2, drafter.max_draft_tokens, drafter.max_draft_tokens + 5):
        proposal = ask(drafter, state, range(3), anchors, num, batch=batch)
        assert len(proposal.drafts) == 3
        for draft in proposal.drafts:
            assert type(draft) is Draft
            assert len(draft.tokens) <= min(num, drafter.max_draft_tokens)
            assert all(type(t) is int and 0 <= t < VOCAB for t in draft.tokens)
            assert len(draft.confidence) in (0, len(draft.tokens))
            assert all(type(rate) is float and 0 <= rate <= 1 for rate in draft.confidence)
            assert type(draft.kind) is int
            assert draft.kind >= 0
        for row, known in zip(drafts(proposal), longest, strict=True):
            if "+" in spec:  # which part drafts does depend on it
                continue
            assert row == known[: len(row)], "what is drafted must not depend on how much is asked for"


@pytest.mark.parametrize("name", NAMES)
def test_ragged_requests_get_each_row_its_own_length(name: str, target: hf.HFTarget) -> None:
    drafter = tiny_drafter(name, target.hooks())
    batch = random_batch(drafter, LENGTHS)
    state, anchors = filled(drafter, batch, UPTO), anchors_of(batch)
    full = drafts(ask(drafter, state, range(3), anchors, batch=batch))
    kv = BatchKV(drafter, batch, {row: row for row in range(3)})
    request = DraftRequest(rows=(0, 1, 2), anchors=anchors, num_tokens=(2, 1, 3), kv=kv)
    assert drafts(drafter.propose(state, request)) == [row[:n] for row, n in zip(full, (2, 1, 3), strict=True)]


def test_every_committed_token_is_read_with_its_features(drafter: Drafter, batch: TrainBatch) -> None:
    """Whatever is drafted from a long text must change when all that was committed changes."""
    state, other = filled(drafter, batch, UPTO), replace(batch, tokens=batch.tokens.flip(1), features=-batch.features)
    changed = filled(drafter, other, UPTO)
    with pytest.raises(AssertionError):
        assert_same_snapshot(changed.snapshot(2), state.snapshot(2))


@pytest.mark.parametrize("name", NAMES)
def test_broken_weights_end_a_proposal_and_are_counted(name: str, target: hf.HFTarget) -> None:
    drafter = tiny_drafter(name, target.hooks())
    batch = random_batch(drafter, LENGTHS)
    state = filled(drafter, batch, UPTO)
    for parameter in drafter.parameters():
        parameter.data.fill_(float("nan"))
        proposal = ask(drafter, state, range(3), anchors_of(batch), batch=batch)
        assert all(0 <= t < VOCAB for row in drafts(proposal) for t in row)
    if list(drafter.parameters()):
        assert drafts(proposal) == [[], [], []]
        assert proposal.num_nonfinite == 3


@pytest.mark.parametrize("name", NAMES)
def test_what_is_called_cheap_runs_no_network(name: str, target: hf.HFTarget) -> None:
    drafter = tiny_drafter(name, target.hooks())
    assert drafter.cheap == (drafter.cost(100).propose_flops == 0)
    assert not (drafter.cheap and (list(drafter.parameters()) or drafter.target_layer_ids))


# ----------------------------------------------------------------------------------------- cost


def test_cost_equals_the_bytes_a_state_holds(drafter: Drafter) -> None:
    batch = random_batch(drafter, (300,))
    for length in (0, 1, 7, 64, 299):
        state = filled(drafter, batch, (length,), pieces=[50, 1, 100])
        assert state.nbytes(0) == drafter.cost(length).total_bytes(length)
    cost = drafter.cost(100)
    tensors = {t.data_ptr(): t.nbytes for t in (*drafter.parameters(), *drafter.buffers())}
    assert cost.weight_bytes >= sum(tensors.values())
    assert min(cost.propose_flops, cost.commit_flops_per_token, cost.state_bytes, cost.kv_bytes_per_token) >= 0


def test_drafter_state_grows_by_what_cost_says_from_1k_to_8k_tokens(drafter: Drafter) -> None:
    batch, held = random_batch(drafter, (8192,)), []
    state = drafter.new_state(1)
    for start in range(0, 8192, 1024):
        commit_spans(drafter, state, batch, {0: (start, start + 1024)}, {0: 0})
        held.append(state.nbytes(0))
    assert held[-1] - held[0] == 7 * 1024 * drafter.cost(8192).kv_bytes_per_token
    if drafter.cost(0).kv_bytes_per_token == 0:
        tensors = state.snapshot(0)
        small = filled(drafter, batch, (1024,)).snapshot(0)
        assert _tensor_bytes(tensors) == _tensor_bytes(small), "a bounded state really holds no more"


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


# ------------------------------------------------------------------------------------- training

TRAINABLE = [name for name in NAMES if drafters.load_class(name).trainable]


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_training_forward_at_an_anchor_is_the_serving_proposal(name: str, target: hf.HFTarget) -> None:
    """Teacher forcing with the drafter's own drafts must predict exactly those, at every position and context."""
    assert_training_is_serving(tiny_drafter(name, target.hooks()))


def cut_to_second(batch: TrainBatch) -> TrainBatch:
    """The second sequence of a batch without its padding."""
    along = ("tokens", "features", "loss_mask", "target_kv")
    whole = ("lengths", "anchors", "anchor_mask", "weights")
    parts = {name: getattr(batch, name) for name in (*along, *whole)}
    size = int(batch.lengths[1])
    cut = {name: t[1:, :size] if name in along else t[1:] for name, t in parts.items() if t is not None}
    return replace(batch, **cut)


@pytest.mark.parametrize("name", TRAINABLE)
def test_padding_and_later_tokens_do_not_reach_the_training_forward(name: str, target: hf.HFTarget) -> None:
    drafter = tiny_drafter(name, target.hooks())
    batch = replace(random_batch(drafter, (30, 12)), anchors=torch.tensor([[5, 17], [5, 11]]))
    other = replace(batch, features=batch.features.clone())
    other.features[0, 17:], other.features[1, 11:] = 50.0, -50.0
    if batch.target_kv is not None:
        other = replace(other, target_kv=batch.target_kv.clone())
        other.target_kv[0, 17:], other.target_kv[1, 11:] = 50.0, -50.0
    with torch.no_grad():
        one, two = drafter(batch), drafter(other)
        alone = drafter(cut_to_second(batch))
    torch.testing.assert_close(one.hidden, two.hidden)
    torch.testing.assert_close(one.hidden[1:], alone.hidden, atol=1e-5, rtol=1e-4)
    assert torch.equal(one.mask[1:], alone.mask)
    assert not one.mask[1, 1].any(), "the last token has nothing after it"


@pytest.mark.parametrize("name", TRAINABLE)
def test_an_optimiser_step_lowers_the_loss_and_reaches_every_parameter(name: str, target: hf.HFTarget) -> None:
    drafter = tiny_drafter(name, target.hooks())
    batch = random_batch(drafter, (30, 25), num_anchors=6)
    optimiser = torch.optim.Adam(drafter.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        terms = drafter.loss(drafter(batch), batch)
        assert terms.denominator > 0
        assert not terms.denominator.requires_grad
        return terms.numerator / terms.denominator

    before = loss()
    before.backward()
    idle = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle, f"no gradient reaches {idle}"
    optimiser.step()
    assert loss() < before


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TRAINABLE])
def test_training_free_drafters_say_so(name: str, target: hf.HFTarget) -> None:
    drafter = tiny_drafter(name, target.hooks())
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    with pytest.raises(HyflashError, match="training-free"):
        drafter(random_batch(drafter, (5,)))


# ------------------------------------------------------------------------------- on disk, in lists


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_drafter_loads_as_the_same_drafter(name: str, target: hf.HFTarget, tmp_path: Path) -> None:
    drafter = tiny_drafter(name, target.hooks())
    checkpoint.save(drafter, tmp_path / "saved", dtype="fp32")
    loaded = checkpoint.load(str(tmp_path / "saved"), target.hooks())
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    assert_same_snapshot(dict(loaded.state_dict()), dict(drafter.state_dict()))
    batch = random_batch(drafter, LENGTHS)
    want = ask(drafter, filled(drafter, batch, UPTO), range(3), anchors_of(batch), batch=batch)
    got = ask(loaded, filled(loaded, batch, UPTO), range(3), anchors_of(batch), batch=batch)
    assert_same_snapshot(drafts(got), drafts(want))


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_describes_itself(name: str) -> None:
    method = drafters.load_class(name)
    assert drafters.summary(name)
    assert method.source
    assert all(option["help"] for option in method.Config.describe())
    assert method.Config.parse(method.Config.tiny().model_dump(), where=name) == method.Config.tiny()
