"""The native target against the torch target on tiny checkpoints of the real classes, and its promise bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import CONTEXT, LAYERS, feed, text
from hyflash import environment
from hyflash.core import KV_TYPES, Rows, TargetOutput
from hyflash.errors import HyflashError
from hyflash.ops.online_softmax import look
from hyflash.targets import hf
from hyflash.targets.base import Target
from native_models import GGUF_MODELS, MODELS, native_dir, needs_kernels, write_gguf

if not environment.kernels_missing():
    import hyflash_kernels as hk
    from hyflash.targets import native
    from hyflash.targets.native import NativeTarget

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache")]


torch.set_num_threads(1)
TAPS = (1, LAYERS, 0)  # out of order on purpose
LENGTH = 75  # more than nine windows, and into the second page of the cache
ISAS = [] if environment.kernels_missing() else [
    name
    for name in ("amx", "avx512", "avxvnni", "avx2", "neon", "portable")
    if hk.library().hk_isa_runs(name.encode())
]  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_dir(tmp_path_factory.mktemp("native"), model)


@pytest.fixture(scope="module")
def target(path: Path) -> NativeTarget:
    """Weights as they are stored and float32 keys and values, as exact as the torch target."""
    return native.load(path, kv="float32", num_threads=1)


@pytest.fixture(scope="module")
def torch_target(path: Path) -> hf.HFTarget:
    return hf.load(str(path))


def run(target: Target, ids: Tensor, widths: list[int], taps: tuple[int, ...] = TAPS) -> TargetOutput:
    """Logits and features of a text fed in pieces."""
    seq = target.open()
    try:
        return feed(target, seq, ids, widths, taps)  # type: ignore[arg-type]
    finally:
        target.close(seq)


def assert_close(got: TargetOutput, want: TargetOutput, *, tolerance: float = 2e-4) -> None:
    """Equal within a share of the largest value."""
    for a, b in ((got.logits, want.logits), (got.features, want.features)):
        assert a is not None
        assert b is not None
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def assert_same_bits(got: TargetOutput, want: TargetOutput, where: object = "") -> None:
    assert torch.equal(got.logits, want.logits), where  # type: ignore[arg-type]
    assert torch.equal(got.features, want.features), where  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- against the torch target


def test_logits_and_features_are_those_of_the_torch_target(target: NativeTarget, torch_target: hf.HFTarget) -> None:
    ids, taps = text(LENGTH), tuple(range(LAYERS + 1))
    assert_close(run(target, ids, [LENGTH], taps), run(torch_target, ids, [LENGTH], taps))


def test_facts_are_those_of_the_torch_target(target: NativeTarget, torch_target: hf.HFTarget) -> None:
    ours, theirs = target.info, torch_target.info
    for name in ("name", "fingerprint", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps", "max_context", "eos_token_ids"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.family, ours.dtype) == (theirs.family, "native F32, float32 KV")


def test_hooks_are_those_of_the_torch_target(target: NativeTarget, torch_target: hf.HFTarget) -> None:
    ours, theirs, ids = target.hooks(), torch_target.hooks(), torch.tensor([[5, 0, 7], [5, 5, 1]])
    torch.testing.assert_close(ours.embed(ids), theirs.embed(ids))
    assert torch.equal(ours.head_rows(ids[0]), theirs.head_rows(ids[0]))
    hidden = torch.randn(2, 3, target.info.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours.head(hidden), theirs.head(hidden), atol=1e-4, rtol=1e-4)
    leaf, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    ours.head(leaf).square().sum().backward()
    theirs.head(other).square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, atol=1e-3, rtol=1e-3)
    assert ours.head(hidden[:0]).shape == (0, 3, target.info.vocab_size)


def test_keys_and_values_are_those_of_the_torch_target(target: NativeTarget, torch_target: hf.HFTarget) -> None:
    views, ids = [], text(LENGTH)
    for one in (target, torch_target):
        seq = one.open()
        feed(one, seq, ids, [70, 5])  # type: ignore[arg-type]
        one.truncate(seq, 66)
        views.append([[part.clone() for part in one.kv_view(seq, layer)] for layer in range(LAYERS)])
        one.close(seq)
    for ours, theirs in zip(*views, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == (66, target.info.num_kv_heads, target.info.head_dim)
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kv", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_attention_to_the_pages_is_attention_to_a_copy_of_them(path: Path, kv: str, num_threads: int) -> None:
    target = native.load(path, kv=kv, num_threads=num_threads)
    info, seq = target.info, target.open()
    length = min(600, info.max_context)
    feed(target, seq, text(length), [length])
    spans = [(0, 1), (5, 70), (63, 65), (length // 2, length), (0, length)]
    for (first, last), num, reps in zip(spans, (1, 6, 2, 6, 9), (1, 1, 2, 3, 1), strict=True):
        torch.manual_seed(first)
        queries = torch.randn(num, reps * info.num_kv_heads, info.head_dim) * info.head_dim**-0.5
        for layer in range(LAYERS):
            got = target.kv_attend(seq, layer, first, last, queries)
            want = look(queries, *target.kv_view(seq, layer, first, last))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    with pytest.raises(HyflashError, match=f"tokens 3 to {length + 1} are not in a cache"):
        target.kv_attend(seq, 0, 3, length + 1, queries)


def test_keys_are_turned_as_the_torch_target_says(target: NativeTarget, torch_target: hf.HFTarget) -> None:
    ours, theirs = target.hooks().rotation, torch_target.hooks().rotation
    assert ours is not None
    assert theirs is not None
    for layer in range(LAYERS):
        assert ours(layer)[0] == pytest.approx(theirs(layer)[0], rel=1e-6)
        assert ours(layer)[1] == pytest.approx(theirs(layer)[1], rel=1e-6)


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_cross_splits_as_the_torch_target_does(window: int | None, tmp_path: Path) -> None:
    path = native_dir(tmp_path, "mistral", sliding_window=window, max_position_embeddings=700)
    ids = text(700)
    ours, theirs = native.load(path, kv="float32", num_threads=2), hf.load(str(path))
    whole = run(ours, ids, [700])
    assert_close(whole, run(theirs, ids, [700]))
    for widths in ([255, 1, 1, 1, 254, 3, 185], [64, 63, 129, 16, 16, 412], [1] * 40 + [600, 1, 59]):
        assert_same_bits(run(ours, ids, widths), whole, widths)


# --------------------------------------------------------------------------------------- row invariance


@pytest.fixture(scope="module")
def alone(target: NativeTarget) -> tuple[Tensor, TargetOutput]:
    """A text, and what it gives token by token."""
    ids = text(LENGTH)
    return ids, run(target, ids, [1] * LENGTH)


def test_every_width_gives_the_bits_of_token_by_token(target: NativeTarget, alone: tuple[Tensor, TargetOutput]) -> None:
    ids, want = alone
    rng = random.Random(0)
    splits = [[LENGTH], [63, 1, 1, 10], [64, 11]]
    splits += [[n] * (LENGTH // n) + [LENGTH % n] * (LENGTH % n > 0) for n in range(2, 17)]
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, LENGTH), 6))
        splits.append([b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)])
    for widths in splits:
        assert_same_bits(run(target, ids, widths), want, widths)


def test_ragged_batches_give_the_bits_of_a_row_alone(target: NativeTarget, alone: tuple[Tensor, TargetOutput]) -> None:
    ids, want = alone
    assert want.logits is not None
    assert want.features is not None
    rng = random.Random(1)
    others = [target.open() for _ in range(3)]
    seq, done = target.open(), 0
    while done < LENGTH:
        n = min(rng.choice([1, 2, 3, 9]), LENGTH - done)
        batch = [(other, text(rng.randrange(1, 20), seed=done + other)) for other in others]
        place = rng.randrange(4)
        batch.insert(place, (seq, ids[done : done + n]))
        lengths = tuple(len(tokens) for _, tokens in batch)
        out = target.forward(
            Rows(tokens=torch.cat([t for _, t in batch]), seqs=tuple(s for s, _ in batch), lengths=lengths, taps=TAPS)
        )
        first = sum(lengths[:place])
        assert torch.equal(out.logits[first : first + n], want.logits[done : done + n])  # type: ignore[index]
        assert torch.equal(out.features[first : first + n], want.features[done : done + n])  # type: ignore[index]
        done += n
        for at, other in enumerate(others):
            if target.length(other) > CONTEXT - 40:
                target.truncate(other, 3)
            elif rng.random() < 0.2:  # one ends and another begins in the same batch
                target.close(other)
                others[at] = target.open()
    for s in (seq, *others):
        target.close(s)


def test_truncated_rows_leave_no_trace(target: NativeTarget, alone: tuple[Tensor, TargetOutput]) -> None:
    ids, want = alone
    assert want.logits is not None
    rng = random.Random(2)
    seq, done = target.open(), 0
    while done < LENGTH:
        n = min(rng.choice([1, 4, 16]), LENGTH - done)
        wrong = text(rng.choice([1, 7, 16, 40]), seed=done)
        target.forward(Rows(tokens=wrong, seqs=(seq,), lengths=(len(wrong),), logits="none"))
        target.truncate(seq, done)
        out = target.forward(Rows(tokens=ids[done : done + n], seqs=(seq,), lengths=(n,)))
        assert torch.equal(out.logits, want.logits[done : done + n])  # type: ignore[arg-type]
        done += n
    target.close(seq)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_threads_instruction_sets_and_cuts_do_not_reach_the_bits(model: str, path: Path, kv: str) -> None:
    """Each weight type once among the models; every instruction set that runs here, with 1, 2 and 4 threads."""
    quant = ("none", "q8_0", "q4_0", "q4_1")[(list(MODELS).index(model) + KV_TYPES.index(kv)) % 4]
    ids = text(LENGTH)
    want = run(native.load(path, quant=quant, kv=kv, num_threads=1, isa=ISAS[0]), ids, [LENGTH])
    for isa in ISAS:
        other = native.load(path, quant=quant, kv=kv, num_threads=2, isa=isa)
        assert (other.describe()["isa"], other.describe()["kv"]) == (isa, kv)
        assert_same_bits(run(other, ids, [40, 3, 1, 16, 15]), want, isa)
        other.set_threads(4)
        assert_same_bits(run(other, ids, [8] * 9 + [3]), want, isa)


@pytest.mark.parametrize(("kv", "tolerance"), [("float16", 5e-3), ("bfloat16", 5e-2), ("int8", 8e-2)])
def test_smaller_keys_and_values_cost_little_accuracy(
    path: Path, target: NativeTarget, kv: str, tolerance: float
) -> None:
    ids = text(LENGTH)
    small = native.load(path, kv=kv, num_threads=1)
    got, want = run(small, ids, [LENGTH]), run(target, ids, [LENGTH])
    assert got.logits is not None
    assert want.logits is not None
    assert float((got.logits - want.logits).std()) < tolerance * float(want.logits.std())


@pytest.mark.parametrize(("quant", "tolerance"), [("q8_0", 0.2), ("q4_0", 1.0), ("q4_1", 1.0)])
def test_quantised_on_load_stays_near_the_dense_model(
    path: Path, target: NativeTarget, quant: str, tolerance: float
) -> None:
    ids = text(LENGTH)
    got, want = run(native.load(path, quant=quant, num_threads=1), ids, [LENGTH]), run(target, ids, [LENGTH])
    assert got.logits is not None
    assert want.logits is not None
    assert 0 < float((got.logits - want.logits).std()) < tolerance * float(want.logits.std())


# ------------------------------------------------------------------------------------------------ GGUF


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_file_gives_the_logits_of_its_directory(name: str, tmp_path: Path) -> None:
    changes = {"query_pre_attn_scalar": 16} if name.startswith("gemma") else {}
    if name == "gemma3_text":  # the file has no list of layers: every sixth is global
        changes["layer_types"] = ["sliding_attention"] * LAYERS
    if name == "qwen2":
        changes["use_sliding_window"] = False
    directory = native_dir(tmp_path, name, **changes)
    file = write_gguf(directory, tmp_path / "model.gguf")
    ids = text(LENGTH)
    ours = native.load(file, kv="float32", num_threads=1)
    assert_close(run(ours, ids, [LENGTH]), run(hf.load(str(directory)), ids, [LENGTH]))
    assert ours.info.eos_token_ids == (2,)
    assert_same_bits(run(ours, ids, [5, 30, 1, 39]), run(ours, ids, [LENGTH]))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_weights_of_each_type_are_near_their_dense_values(kind: str, tmp_path: Path) -> None:
    directory = native_dir(tmp_path, "llama")
    ids = text(LENGTH)
    ours = native.load(write_gguf(directory, tmp_path / "m.gguf", kind=kind), kv="float32", num_threads=1)
    assert ours.weight_type == kind
    got, want = run(ours, ids, [LENGTH]), run(native.load(directory, kv="float32", num_threads=1), ids, [LENGTH])
    assert got.logits is not None
    assert want.logits is not None
    limit = {"F16": 0.01, "BF16": 0.1, "Q8_0": 0.2}.get(kind, 1.0)
    assert float((got.logits - want.logits).std()) < limit * float(want.logits.std())
    assert_same_bits(run(ours, ids, [16, 1, 8, 50]), run(ours, ids, [1] * LENGTH))
