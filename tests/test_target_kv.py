"""The target's keys and values as drafters and training see them: whose, of which tokens, in which order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafting import HalfRight, tiny_drafter
from fake_training import FakeTarget, make_answers
from families import FAMILIES, LAYERS, family_dir, text
from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Prices, Proposal, Request, Rows, SamplingParams
from hyflash.data import anchors, shards
from hyflash.data.anchors import AnchorOptions, build_batch
from hyflash.data.capture import Example, LiveSource, capture
from hyflash.data.shards import ShardReader, write_shards
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.drafters.compose import Composite
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength, LengthPolicy, RowStats
from hyflash.engine.offload import Offload
from hyflash.engine.replay import measure, record
from hyflash.errors import HyflashError, UserError
from hyflash.ops.rope import rotate, turn_tables
from hyflash.targets import hf
from hyflash.targets.base import Target, copy_kv
from hyflash.train.loader import select_layers
from native_models import native_dir, needs_kernels, write_gguf

pytestmark = pytest.mark.usefixtures("own_cache")
torch.set_num_threads(1)
LLAMA_LAYERS = (0, LAYERS - 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_dir(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=needs_kernels)])
def target(request: pytest.FixtureRequest, llama: Path) -> Target:
    if request.param == "torch":
        return hf.load(str(llama))
    from hyflash.targets import native

    return native.load(llama, kv="float32", num_threads=1)


def fed(target: Target, ids: Sequence[int]) -> int:
    """A sequence that holds these tokens."""
    seq = target.open()
    if ids:
        target.forward(Rows(tokens=torch.tensor(ids), seqs=(seq,), lengths=(len(ids),), logits="none"))
    return seq


# ------------------------------------------------------------------------------------------ targets


def test_part_of_a_view_is_the_view_of_a_part(target: Target) -> None:
    seq = fed(target, text(70).tolist())
    for layer in range(LAYERS):
        whole = [part.clone() for part in target.kv_view(seq, layer)]
        for first, last in ((0, 70), (0, 0), (70, 70), (63, 65), (69, 70), (0, 1)):
            for part, all_ in zip(target.kv_view(seq, layer, first, last), whole, strict=True):
                assert torch.equal(part, all_[first:last])
    target.close(seq)


@pytest.mark.parametrize(("first", "last"), [(0, 4), (-1, 2), (2, 1), (4, None)])
def test_tokens_that_are_not_in_the_cache_are_refused(target: Target, first: int, last: int | None) -> None:
    seq = fed(target, [5, 6, 7, 8])
    target.truncate(seq, 3)  # the fourth is in memory still
    with pytest.raises(HyflashError, match="not in a cache of 3"):
        target.kv_view(seq, 0, first, last)
    target.close(seq)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_layers_that_are_not_there_are_refused(target: Target, layer: int) -> None:
    seq = fed(target, [5])
    with pytest.raises(UserError, match=f"layer {layer} is none of"):
        target.kv_view(seq, layer)
    target.close(seq)


@pytest.mark.parametrize("shape", [(1, 3, 0), (1, 2, 2), (1, 2, -1), (2,)])
def test_queries_that_do_not_fit_the_keys_are_refused(target: Target, shape: tuple[int, ...]) -> None:
    """The kernels would read beside them."""
    seq, width = fed(target, [5, 6, 7]), target.info.head_dim
    queries = torch.randn(shape if len(shape) == 1 else (*shape[:2], width + shape[2]))
    assert target.info.num_kv_heads == 2
    with pytest.raises(HyflashError, match=r"expected \(Q, H, \d+\) with H a multiple of 2"):
        target.kv_attend(seq, 0, 0, 3, queries)
    with pytest.raises(HyflashError, match="over at least one token"):
        target.kv_attend(seq, 0, 2, 2, torch.randn(1, 2, width))
    target.close(seq)


def test_a_float32_view_on_torch_is_the_cache_itself(llama: Path) -> None:
    target = hf.load(str(llama))
    seq = fed(target, [5, 6, 7])
    keys, _ = target.kv_view(seq, 1, 1, 3)
    cached, _ = target.cache.view(1, seq, seq + 1, 3)
    assert keys.data_ptr() == cached[0, :, 1:].data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_one_token_differ_by_the_rotation_alone(family: str, tmp_path: Path) -> None:
    target = hf.load(str(family_dir(tmp_path, family)))
    rotation = target.hooks().rotation
    assert rotation is not None
    seq = fed(target, [5] * 40)
    for layer in range(LAYERS):
        frequencies, factor = rotation(layer)
        keys = target.kv_view(seq, layer)[0]
        plain = keys[:1] / factor
        turned = rotate(plain.expand_as(keys), *turn_tables(torch.arange(40), torch.tensor(frequencies), factor))
        torch.testing.assert_close(turned, keys, atol=1e-3, rtol=1e-3)
    assert len(target.cache.lengths) == 2, "what was opened to look is closed"


def test_a_rotation_that_is_not_the_targets_is_noticed(llama: Path) -> None:
    target = hf.load(str(llama))
    target._base.rotary_emb.register_buffer("inv_freq", target._base.rotary_emb.inv_freq * 2)  # type: ignore
    rotary, target._base.rotary_emb = target._base.rotary_emb, torch.nn.Module()
    rotation = target.hooks().rotation
    assert rotation is not None

    class Odd(torch.nn.Module):
        inv_freq = rotary.inv_freq * 1.5  # type: ignore[operator]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return rotary(*args, **kwargs)

    target._base.rotary_emb = Odd()
    with pytest.raises(UserError, match="rotates its keys in a way unknown"):
        rotation(0)


@needs_kernels
def test_a_gguf_file_shows_its_keys_in_the_order_of_its_directory(llama: Path, tmp_path: Path) -> None:
    from hyflash.targets import native

    file = native.load(write_gguf(llama, tmp_path / "m.gguf"), kv="float32", num_threads=1)
    other, ids = hf.load(str(llama)), text(9).tolist()
    for layer in range(LAYERS):
        for ours, theirs in zip(
            file.kv_view(fed(file, ids), layer, 2, 7), other.kv_view(fed(other, ids), layer, 2, 7), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------------------------------- engine


class Texts(State):
    """The committed tokens of each row."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]

    def reset(self, row: int) -> None:
        self.rows[row] = []

    def nbytes(self, row: int) -> int:
        return 8 * len(self.rows[row])

    def snapshot(self, row: int) -> dict[str, Any]:
        return {"tokens": list(self.rows[row])}

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        self.rows[row] = list(saved["tokens"])


class Probe(Drafter):
    """Drafts nonsense, and holds what it is shown of the target against the target's own reading of its texts."""

    Config = DrafterConfig
    trainable = False
    max_draft_tokens = 3
    target_layer_ids = (0,)

    def __init__(self, target: Target, layers: tuple[int, ...] = LLAMA_LAYERS) -> None:
        super().__init__(DrafterConfig(), target.hooks())
        self.target, self.target_kv_layers = target, layers
        self.num_proposals = self.num_commits = 0

    def new_state(self, num_rows: int) -> Texts:
        return Texts(num_rows)

    def _compare(self, request: Commit | DraftRequest, row: int, ids: list[int], first: int) -> None:
        assert request.kv is not None
        seq = fed(self.target, ids)
        for layer in self.target_kv_layers:
            got = request.kv.read(row, layer, first, len(ids))
            for ours, theirs in zip(got, self.target.kv_view(seq, layer, first), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        self.target.close(seq)

    def commit(self, state: State, new: Commit) -> None:
        assert isinstance(state, Texts)
        for row, ids in zip(new.rows, new.tokens, strict=True):
            first = len(state.rows[row])
            state.rows[row] += ids
            self._compare(new, row, state.rows[row], first)
            self.num_commits += 1

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        assert isinstance(state, Texts)
        for row in request.rows:
            ids = state.rows[row]
            self._compare(request, row, ids, 0)
            with pytest.raises(HyflashError):
                request.kv.read(row, self.target_kv_layers[0], 0, len(ids) + 1)  # type: ignore[union-attr]
            self.num_proposals += 1
        return Proposal([Draft([7, 8, 9][:n]) for n in request.num_tokens])

    def cost(self, context_tokens: int) -> DraftCost:
        return DraftCost(state_bytes=0, kv_bytes_per_token=8, weight_bytes=0, propose_flops=0, commit_flops_per_token=0)


class Sometimes(LengthPolicy):
    """Drafts in every third round, so that the others are committed late; with prices if asked."""

    max_draft_tokens = 3

    def __init__(self, *, priced: bool) -> None:
        self.rounds, self.priced = itertools.count(), priced

    def begin_round(self, *, num_rows: int, context_tokens: int) -> int:
        return 3 if next(self.rounds) % 3 == 2 else 0

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        return most

    def prices(self, num_rows: int) -> Prices | None:
        return Prices(forward=[1.0] * 20, one_sec=1.0) if self.priced else None


PROMPTS = [text(n, seed=n).tolist() for n in (1, 9, 30, 4)]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def requests() -> list[Request]:
    return [Request(prompt_ids=tuple(p), params=GREEDY) for p in PROMPTS]


@pytest.mark.parametrize("max_rows", [1, 2, 4])
@pytest.mark.parametrize("exact", ["auto", "recheck"])
def test_a_drafter_sees_the_targets_keys_and_values_of_its_own_rows(target: Target, max_rows: int, exact: Any) -> None:
    want = [Engine(target).generate([r])[0].token_ids for r in requests()]
    probe, texts = Probe(target), [[*p, *w] for p, w in zip(PROMPTS, want, strict=True)]
    drafter = HalfRight(probe, texts)
    engine = Engine(target, drafter, policy=FixedLength(3), max_rows=max_rows, prefill_chunk=4, exact=exact)
    results = engine.generate(requests())
    assert [r.token_ids for r in results] == want
    assert len({trace.num_accepted for r in results for trace in r.rounds}) > 1
    assert probe.num_proposals > 10
    assert probe.num_commits > 20


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("composed", [False, True])
def test_late_commits_see_the_keys_and_values_of_their_tokens(target: Target, composed: bool, priced: bool) -> None:
    want = [Engine(target).generate([r])[0].token_ids for r in requests()]
    probe = Probe(target)
    lookup = tiny_drafter("lookup", target.hooks())
    drafter = Composite([("lookup", lookup), ("probe", probe)]) if composed else probe
    engine = Engine(target, drafter, policy=Sometimes(priced=priced), max_rows=3, prefill_chunk=7)
    assert [r.token_ids for r in engine.generate(requests())] == want
    assert probe.num_commits > 8
    assert probe.num_proposals > 0


def test_a_composition_reads_what_its_parts_read(target: Target) -> None:
    parts = [("a", Probe(target, (2, 0))), ("b", Probe(target, (1,))), ("c", tiny_drafter("lookup", target.hooks()))]
    assert Composite(parts).target_kv_layers == (0, 1, 2)


class Once(Offload):
    """The drafter is away in rounds 3 to 6."""

    def __init__(self) -> None:
        self.is_away, self.rounds = False, 0

    def may_draft(self) -> bool:
        return not 3 <= self.rounds < 6

    def bring_back(self) -> bool:
        self.is_away = False
        return True

    def after_round(self, *, drafted: bool) -> bool:
        self.rounds += 1
        leaves = 3 <= self.rounds < 6 and not self.is_away and not drafted
        self.is_away = self.is_away or leaves
        return leaves


def test_a_text_that_is_read_again_after_an_absence_is_read_with_its_keys_and_values(target: Target) -> None:
    want = [Engine(target).generate([r])[0].token_ids for r in requests()]
    probe, offload = Probe(target), Once()
    engine = Engine(target, probe, policy=FixedLength(3), offload=offload, prefill_chunk=5)
    assert [r.token_ids for r in engine.generate(requests())] == want
    assert offload.rounds > 6
    assert not offload.is_away


def test_a_replay_shows_what_was_recorded(target: Target) -> None:
    """The probe compares with the target itself; a replay gives up where nothing was recorded."""
    answers = [Engine(target).generate([r])[0].token_ids for r in requests()]
    layers, probe = (1, 0), Probe(target, (0, 1))
    recordings = [
        record(target, (0,), prompt, answer, kv_layers=layers) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    results = measure(probe, recordings, 2)
    assert [r.token_ids for r in results] == answers
    assert probe.num_proposals > 4
    with pytest.raises(UserError, match=r"no keys and values of layer 2, but \[1, 0\]"):
        measure(Probe(target, (2,)), recordings, 2)


# --------------------------------------------------------------------------------------------- data

TAPS, KV = (1, 3), (2, 0)


def test_captured_keys_and_values_are_the_targets(llama: Path) -> None:
    target, answers = hf.load(str(llama)), make_answers(5)
    for batch_tokens in (8, 4096):  # in pieces, and many in one forward
        for example in capture(target, answers, taps=(0,), kv_layers=KV, batch_tokens=batch_tokens):
            seq = fed(target, example.tokens.tolist())
            copied = copy_kv(target, seq, KV)
            assert example.kv is not None
            assert example.kv.dtype == torch.float16
            assert example.kv.shape == copied.shape
            torch.testing.assert_close(example.kv.float(), copied, atol=1e-2, rtol=1e-2)
            target.close(seq)


def test_shards_and_live_capture_give_the_same_keys_and_values(tmp_path: Path) -> None:
    answers = make_answers(9)
    write_shards(FakeTarget(), answers, tmp_path, taps=TAPS, kv_layers=KV, shard_tokens=50)
    reader, live = ShardReader(tmp_path), LiveSource(FakeTarget(), answers, taps=TAPS, kv_layers=KV)
    assert reader.info == live.info
    assert reader.info.kv_layers == KV
    assert reader.summary()["kv_layers"] == [2, 0]
    for a, b in zip(reader.fetch(reader.ids), live.fetch(live.ids), strict=True):
        assert a.kv is not None
        assert b.kv is not None
        assert torch.equal(a.kv, b.kv)
    assert all(e.kv is None for e in (*reader.fetch(reader.ids, features=False), *live.fetch(live.ids, features=False)))


def test_a_capture_goes_on_only_with_the_same_layers(tmp_path: Path) -> None:
    write_shards(FakeTarget(), make_answers(3), tmp_path / "a", taps=TAPS)
    with pytest.raises(UserError, match=r"kv_layers is \[\], now \[2, 0\]"):
        write_shards(FakeTarget(), make_answers(3), tmp_path / "a", taps=TAPS, kv_layers=KV)


def test_a_capture_of_before_there_were_keys_and_values_is_read_and_gone_on_with(tmp_path: Path) -> None:
    write_shards(FakeTarget(), make_answers(3), tmp_path, taps=TAPS)
    manifest = shards.read_json(tmp_path / "manifest.json")
    del manifest["kv_layers"]
    shards.write_json(tmp_path / "manifest.json", manifest)
    assert ShardReader(tmp_path).info.kv_layers == ()
    write_shards(FakeTarget(), make_answers(3), tmp_path, taps=TAPS)


def test_broken_keys_are_refused_at_capture() -> None:
    class Broken(FakeTarget):
        def kv_view(self, *args: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().kv_view(*args)
            return keys * float("nan"), values

    with pytest.raises(HyflashError, match="hold NaN"):
        list(capture(Broken(), make_answers(1), taps=TAPS, kv_layers=KV))


def test_values_of_another_width_than_the_keys_are_refused() -> None:
    class Narrow(FakeTarget):
        def kv_view(self, *args: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().kv_view(*args)
            return keys, values[..., :2]

    with pytest.raises(UserError, match="not as wide as its keys"):
        list(capture(Narrow(), make_answers(1), taps=TAPS, kv_layers=KV))


def test_a_drafter_gets_its_layers_in_its_order_or_is_told_what_to_capture() -> None:
    wide = LiveSource(FakeTarget(), make_answers(3), taps=TAPS, kv_layers=(0, 1, 2))
    chosen = select_layers(wide, TAPS, (2, 0))
    narrow = LiveSource(FakeTarget(), make_answers(3), taps=TAPS, kv_layers=(2, 0))
    assert chosen.info.kv_layers == (2, 0)
    for a, b in zip(chosen.fetch(chosen.ids), narrow.fetch(narrow.ids), strict=True):
        assert a.kv is not None
        assert b.kv is not None
        assert torch.equal(a.kv, b.kv)
    assert all(e.kv is None for e in select_layers(wide, TAPS).fetch(wide.ids))
    with pytest.raises(UserError, match=r"layers \[3\], and the data has those of layers \[0, 1, 2\].*--kv-layers 3\."):
        select_layers(wide, TAPS, (3,))
    bare = LiveSource(FakeTarget(), make_answers(3), taps=TAPS)
    with pytest.raises(UserError, match="and the data has none; capture again"):
        select_layers(bare, TAPS, (1,))


def test_a_batch_pads_keys_and_values_and_knows_where_its_parts_begin() -> None:
    source = LiveSource(FakeTarget(), make_answers(4), taps=TAPS, kv_layers=KV)
    examples = source.fetch(source.ids)
    options = AnchorOptions(max_tokens=2048)
    batch = build_batch(examples, options, seed=0, epoch=0)
    assert batch.target_kv is not None
    assert batch.starts is not None
    assert batch.starts.tolist() == [0] * 4
    for row, example in zip(batch.target_kv, examples, strict=True):
        assert example.kv is not None
        assert torch.equal(row[: len(example.kv)], example.kv.float())
        assert not row[len(example.kv) :].any()
    long = next(e for e in examples if len(e.tokens) > 12)
    part = anchors.crop(long, AnchorOptions(max_tokens=5), seed=3, epoch=1)
    at = find(long, part)
    assert part.start == at
    assert part.kv is not None
    assert long.kv is not None
    assert torch.equal(part.kv, long.kv[at : at + 5])
    again = anchors.crop(replace(long, start=100), AnchorOptions(max_tokens=5), seed=3, epoch=1)
    assert again.start == 100 + at


def find(whole: Example, part: Example) -> int:
    """Where a part begins; its features are those of one place alone."""
    size = len(part.tokens)
    (at,) = [i for i in range(len(whole.tokens)) if torch.equal(whole.features[i : i + size], part.features)]
    return at


@needs_kernels
def test_half_precision_caches_show_what_they_hold(llama: Path) -> None:
    from hyflash.targets import native

    exact, ids = hf.load(str(llama)), text(20).tolist()
    want = copy_kv(exact, fed(exact, ids), (1,))
    for kv in ("float16", "bfloat16", "int8"):
        half = native.load(llama, kv=kv, num_threads=1)
        got = copy_kv(half, fed(half, ids), (1,))
        assert 0 < float((got - want).norm()) < 0.05 * float(want.norm())
