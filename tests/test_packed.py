"""The cache of packed weights: the same bytes as packing anew, made once, mended when damaged, no condition to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_bytes import write_model
from hyflash.errors import UserError
from hyflash.targets import decoder
from hyflash.targets.decoder import Weights
from hyflash.targets.gguf_file import GgufFile
from hyflash.targets.hf_files import HfFiles
from native_models import native_dir, needs_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "a.gguf")


def weights_of(path: Path, quant: str = "none") -> Weights:
    files = HfFiles(path, quant=quant) if path.is_dir() else GgufFile(path)
    return files.weights(files.spec())


def pack(rows: decoder.Rows) -> NDArray[np.uint8]:
    """The whole matrix in one call."""
    import hyflash_kernels as hk
    from hyflash.targets.packed import packed_size

    data = np.ascontiguousarray(rows.data)
    out = np.empty(packed_size(rows.type, rows.num_outputs, rows.num_inputs), np.uint8)
    hk.library().hk_pack(hk.TYPES[rows.type], *data.shape[:1], rows.num_inputs, data.ctypes.data, out.ctypes.data)
    return out


def packed_file(cache: Path) -> Path:
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) == 1
    return files[0]


def test_the_file_holds_what_packing_in_one_piece_gives(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyflash.targets import packed

    monkeypatch.setattr(packed, "_CHUNK_BYTES", 4096)  # 16 or 32 rows at a time, and 40 rows are no whole number
    weights = weights_of(model)
    out = packed.load_packed(weights, "key")
    assert out.mapped
    assert list(out.matrices) == [name for name, _ in weights.matrices()]
    for name, rows in weights.matrices():
        assert out.matrices[name].ctypes.data % 64 == 0
        assert np.array_equal(out.matrices[name], pack(rows))
    assert out.head is out.embedding
    assert np.array_equal(out.embedding, weights.embedding.data)


def test_a_second_load_maps_the_file_and_reads_no_tensor(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyflash.targets.packed import load_packed

    first = load_packed(weights_of(model), "key")
    weights = weights_of(model)
    monkeypatch.setattr(decoder.Rows, "read", lambda *_: pytest.fail("read again"))
    second = load_packed(weights, "key")
    assert second.mapped
    assert all(np.array_equal(first.matrices[name], second.matrices[name]) for name in first.matrices)


def test_a_quantised_directory_keeps_its_embedding_and_head_rows_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyflash.targets.packed import load_packed

    for name, tied in (("llama", True), ("llama-untied", False)):
        weights = weights_of(native_dir(tmp_path, name), "q8_0")
        expected = weights.embedding.data, weights.head.data
        load_packed(weights, name)
        with monkeypatch.context() as patch:
            patch.setattr(decoder.Rows, "read", lambda *_: pytest.fail("read again"))
            out = load_packed(weights, name)
        assert np.array_equal(out.embedding, expected[0])
        assert np.array_equal(out.head, expected[1])
        assert (out.head is out.embedding) == tied


def damage_cut(data: bytes) -> bytes:
    return data[:-100]


def damage_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def damage_empty(data: bytes) -> bytes:
    return b""


def damage_mark(data: bytes) -> bytes:
    return data[:-1] + b"?"


def damage_label(data: bytes) -> bytes:
    return data.replace(b'"head", "F32"', b'"head", "F16"')


def damage_start(data: bytes) -> bytes:
    return bytes(4096) + data[4096:]


def damage_longer(data: bytes) -> bytes:
    return data + bytes(64)


@pytest.mark.parametrize(
    "damage",
    [damage_cut, damage_half, damage_empty, damage_mark, damage_label, damage_start, damage_longer],
    ids=lambda f: f.__name__,
)
def test_a_damaged_file_is_made_again(model: Path, cache: Path, damage: object) -> None:
    from hyflash.targets.packed import load_packed

    load_packed(weights_of(model), "key")
    path = packed_file(cache)
    good = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(good))  # type: ignore[operator]
    assert load_packed(weights_of(model), "key").mapped
    assert packed_file(cache).read_bytes() == good


def test_a_damaged_file_that_cannot_be_removed_is_left_out(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyflash.targets import packed

    packed.load_packed(weights_of(model), "key")
    path = packed_file(cache)
    path.unlink()
    path.write_bytes(b"")
    monkeypatch.setattr(packed.shutil, "rmtree", lambda *_, **__: None)  # as where another program holds it open
    with pytest.warns(UserWarning, match="damaged and cannot be replaced"):
        assert not packed.load_packed(weights_of(model), "key").mapped


def test_packing_is_reported_in_bytes_and_mapping_is_silent(model: Path) -> None:
    from hyflash.targets.packed import load_packed

    heard: list[tuple[str, int, int]] = []
    for _ in range(2):
        load_packed(weights_of(model), "key", report=lambda *facts: heard.append(facts))
    assert [what for what, _, _ in heard] == ["pack"] * 15
    assert heard == sorted(heard)
    assert heard[-1][1] == heard[-1][2]


def test_a_file_of_other_weights_is_never_taken(tmp_path: Path, model: Path) -> None:
    from hyflash.targets.packed import load_packed

    load_packed(weights_of(model), "key")
    other = weights_of(write_model(tmp_path / "b.gguf", block_count=3))
    out = load_packed(other, "key")
    assert all(np.array_equal(out.matrices[name], pack(rows)) for name, rows in other.matrices())


def test_the_key_changes_with_bytes_times_and_quant(model: Path) -> None:
    from hyflash.targets.packed import packed_key

    first = packed_key(model, "none")
    assert packed_key(model, "none") == first
    assert packed_key(model, "q8_0") != first
    stat = model.stat()
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert packed_key(model, "none") != first


@pytest.mark.parametrize("kind", ["a file is in the way", "the disk is full"])
def test_where_the_cache_cannot_be_written_weights_stay_in_memory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from hyflash import hub
    from hyflash.targets.packed import load_packed

    if kind == "a file is in the way":
        (tmp_path / "cache").write_text("")
    else:
        usage = hub.shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    weights = weights_of(model)
    with pytest.warns(UserWarning, match="packed weights are not kept"):
        out = load_packed(weights, "key")
    assert not out.mapped
    for name, rows in weights.matrices():
        assert out.matrices[name].ctypes.data % 64 == 0
        assert np.array_equal(out.matrices[name], pack(rows))


def test_a_source_that_shrinks_meanwhile_is_a_sentence_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    from hyflash.targets.packed import load_packed

    path = write_model(tmp_path / "b.gguf")
    weights = weights_of(path)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match="not kept"), pytest.raises(UserError, match="became shorter"):
        load_packed(weights, "key")
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_inputs_that_fill_no_blocks_are_a_sentence() -> None:
    from hyflash.targets.packed import packed_size

    with pytest.raises(UserError, match="33 inputs are no whole number of Q4_1 blocks"):
        packed_size("Q4_1", 16, 33)


def test_the_first_load_needs_little_memory(tmp_path: Path) -> None:
    """In a process of its own: far less than the weights, which the model file and the cache share out."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from hyflash.targets.decoder import Rows, Stored, Weights
from hyflash.targets.packed import load_packed
path = Path(sys.argv[1])
rows, inputs = 1 << 14, 1 << 11
np.zeros(rows * inputs, np.float32).tofile(path)  # 128 MB
stored = Stored(path=path, offset=0, type="F32", shape=(rows, inputs), row_bytes=4 * inputs)
whole = Rows(type="F32", num_outputs=rows, num_inputs=inputs, stored=stored)
weights = Weights(embedding=whole, head=whole, final_norm=np.ones(4, np.float32), layers=(), vectors=())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert load_packed(weights, "big").mapped
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "w")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40
