"""Peers compute the same model as we do: logits as of our torch target at every width; or they are absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from families import VOCAB, family_dir, text
from hyflash import environment, hub
from hyflash.bench.peers import find
from hyflash.bench.peers.base import Engine, MissingPeer
from hyflash.core import Rows
from hyflash.targets import hf
from native_models import native_dir, write_gguf

IDS = text(40, seed=1).tolist()
CONTEXT = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_dir(tmp_path_factory.mktemp("peers"), "llama")


@pytest.fixture(scope="module")
def reference(directory: Path) -> NDArray[np.float32]:
    """Logits (40, V) by our torch target."""
    target = hf.load(str(directory))
    logits = target.forward(Rows(tokens=torch.tensor(IDS), seqs=(target.open(),), lengths=(len(IDS),))).logits
    assert logits is not None
    return logits.numpy()


def make(name: str, path: Path, directory: Path) -> Engine:
    source, info = hub.find_target(str(path)), hf.load(str(directory)).info
    return find.make(name, source, find.shape_of(source, info), info=info, num_threads=1, max_tokens=64)


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Rms of the difference over the standard deviation."""
    return float(np.sqrt(np.mean((one - other) ** 2)) / other.std())


def check_forwards(engine: Engine, reference: NDArray[np.float32], *, error: float) -> None:
    """Rows of every width after the context have the reference's logits, also after others were forgotten."""

    def check(prompt: int, widths: list[int]) -> None:
        engine.start(IDS[:prompt])
        for width in widths:
            engine.verify(IDS[prompt : prompt + width])
            got = engine.logits()
            assert got.shape == (width, VOCAB)
            assert distance(got, reference[prompt : prompt + width]) < error
            engine.rewind()

    engine.thread.submit(check, CONTEXT, [10, 1, 4, 10]).result()
    engine.thread.submit(check, 2, [1]).result()  # a new prompt leaves nothing of the old one
    assert engine.about["version"]
    assert engine.work.forward_bytes(CONTEXT, 1) > 0
    engine.end()


def test_transformers_gives_the_logits_of_our_target(
    directory: Path, reference: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {**environment.hardware(), "cpu_flags": []}  # no bfloat16: float32
    monkeypatch.setattr("hyflash.bench.peers.eager.hardware", lambda: facts)
    engine = make("transformers", directory, directory)
    assert engine.weights == "F32"
    check_forwards(engine, reference, error=1e-4)


def test_onnx_runtime_gives_them_but_for_eight_bits(directory: Path, reference: NDArray[np.float32]) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    check_forwards(make("onnxruntime", directory, directory), reference, error=0.15)


def test_llama_cpp_gives_them_from_a_file(directory: Path, reference: NDArray[np.float32], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    gguf = write_gguf(directory, tmp_path / "model.gguf", tokenizer=True)
    check_forwards(make("llama.cpp", gguf, directory), reference, error=0.02)


def test_llama_cpp_needs_a_file(directory: Path) -> None:
    with pytest.raises(MissingPeer, match=r"reads \.gguf files alone"):
        make("llama.cpp", directory, directory)


def test_onnx_runtime_is_for_llamas(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    directory = family_dir(tmp_path, "qwen3")
    with pytest.raises(MissingPeer, match="this is a qwen3 model"):
        make("onnxruntime", directory, directory)


@pytest.mark.parametrize(("name", "module"), [("llama.cpp", "llama_cpp"), ("onnxruntime", "onnxruntime")])
def test_absent_peer_says_how_to_install_it(
    name: str, module: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = write_gguf(directory, tmp_path / "model.gguf", tokenizer=True) if name == "llama.cpp" else directory
    with pytest.raises(MissingPeer, match=r"not installed.*make peers"):
        make(name, path, directory)


def test_llama_cpp_that_ends_its_process_is_left_out_and_ours_goes_on(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    gguf = write_gguf(directory, tmp_path / "model.gguf", tokenizer=True)
    dead = subprocess.CompletedProcess([], -4, stdout="", stderr="")
    monkeypatch.setattr("hyflash.bench.peers.llama_cpp.subprocess.run", lambda *args, **kwargs: dead)
    with pytest.raises(MissingPeer, match=r"fails here \(it ended with -4\); build it again with `make peers`"):
        make("llama.cpp", gguf, directory)
