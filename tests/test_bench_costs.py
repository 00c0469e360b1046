"""`hyflash bench --costs`: floors by hand, medians by a scripted clock, the JSON of the contract, clashing options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from families import family_dir
from helpers import TINY_CONTEXT, tiny_target_dir
from hyflash import environment, hub
from hyflash.bench import floors, race
from hyflash.bench.floors import Machine, Shape, Work
from hyflash.bench.peers import find
from hyflash.bench.peers.base import Engine, MissingPeer
from hyflash.cli import main
from hyflash.targets import hf

SHAPE = Shape(
    num_weights=1000,
    windows=(0, 4),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    stored_type="Q8_0",
    stored_bytes=1062,
)
RESULT_FIELDS = {"engine", "weights", "context", "width", "ms_median", "ms_min", "floor_ms"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_dir(tmp_path_factory.mktemp("costs"))


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bandwidth of the cache will do here."""
    full = floors.measure
    monkeypatch.setattr(floors, "measure", lambda threads: full(threads, read_bytes=1 << 16, num_repeats=1))


def costs_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code = main(["bench", "--costs", *argv, "--repeats", "2", "--threads", "1", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


# --------------------------------------------------------------------------------------------- floors


def test_forward_bytes_are_weights_once_and_the_cache_that_is_seen() -> None:
    work = Work(shape=SHAPE, weight_bytes=1062, kv_bytes=2)
    # Layer 0 sees 10 + 3 tokens; layer 1 a window of 4, and the 3 new ones: 2 (keys, values) * 2 heads * 16 * 2 bytes.
    assert work.forward_bytes(10, 3) == 1062 + (13 + 7) * 128
    assert work.forward_bytes(0, 1) == 1062 + 2 * 128


def test_attention_operations_grow_with_each_row_up_to_the_window() -> None:
    work = Work(shape=SHAPE, weight_bytes=0, kv_bytes=2)
    # Rows at positions 2, 3, 4 see 3 + 4 + 5 tokens, and 3 + 4 + 4 in the layer with a window of 4.
    assert work.attention_ops(2, 3) == 2 * (12 + 11) * 4 * 16


def test_floor_is_the_slower_of_bytes_and_arithmetic() -> None:
    work = Work(shape=SHAPE, weight_bytes=1062, kv_bytes=2)
    slow_memory = Machine(num_threads=1, isa="x", bytes_per_sec=100.0, int8_per_sec=1e12, float32_per_sec=1e12)
    assert floors.floor_sec(slow_memory, work, context=10, width=3) == pytest.approx((1062 + 20 * 128) / 100)
    slow_sums = Machine(num_threads=1, isa="x", bytes_per_sec=1e12, int8_per_sec=10.0, float32_per_sec=5.0)
    expected = 3 * 1000 / 10 + work.attention_ops(10, 3) / 5
    assert floors.floor_sec(slow_sums, work, context=10, width=3) == pytest.approx(expected)


def test_without_kernels_the_floor_is_bytes_alone_and_memory_is_read_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "_library", lambda: None)
    machine = floors.measure(1)
    assert (machine.isa, machine.int8_per_sec, machine.float32_per_sec) == (None, None, None)
    assert machine.bytes_per_sec > 0
    assert floors.ping_pong_ns(2) is None
    work = Work(shape=SHAPE, weight_bytes=1000, kv_bytes=2)
    assert floors.floor_sec(machine, work, context=0, width=1) == pytest.approx(1256 / machine.bytes_per_sec)


@pytest.mark.skipif(bool(environment.kernels_missing()), reason="hyflash-kernels is not built here")
def test_rates_of_this_machine_are_measured_with_the_kernels() -> None:
    machine = floors.measure(2)
    assert machine.isa
    assert machine.bytes_per_sec > 1e6
    assert machine.int8_per_sec is not None
    assert machine.int8_per_sec > 1e6
    assert machine.float32_per_sec is not None
    assert machine.float32_per_sec > 1e6
    assert floors.ping_pong_ns(1) is None
    trip = floors.ping_pong_ns(2, num_repeats=1)
    assert trip is not None
    assert trip > 0


def test_weights_of_a_llama_are_counted_as_its_matrices_hold_them(path: Path) -> None:
    target = hf.load(str(path))
    shape = find.shape_of(hub.find_target(str(path)), target.info)
    matrices = [p for name, p in target.model.named_parameters() if p.ndim == 2]  # the tied embedding is the head
    assert shape.num_weights == sum(p.numel() for p in matrices)
    assert (shape.stored_type, shape.stored_bytes) == ("F32", 4 * shape.num_weights)
    assert shape.windows == (0, 0)


def test_sliding_layers_of_a_directory_are_found(tmp_path: Path) -> None:
    source = family_dir(tmp_path, "gemma2")
    shape = find.shape_of(hub.find_target(str(source)), hf.load(str(source)).info)
    assert shape.windows == (8, 0, 8)


# ----------------------------------------------------------------------------------------------- race


class Clock:
    """Stands for the module `time`: engines move it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Scripted(Engine):
    """Takes `seconds` per row, ten times as long in its first timed visit; keeps what was asked of it."""

    weights, max_tokens = "F32", 1000
    work = Work(shape=SHAPE, weight_bytes=1000, kv_bytes=2)

    def __init__(self, clock: Clock, name: str, seconds: float, log: list[str]) -> None:
        self.name, self.about = name, {"version": "1"}
        self._clock, self._seconds, self._log, self._calls, self._rows = clock, seconds, log, 0, 0

    def start(self, ids: Sequence[int]) -> None:
        self._clock.now += self._seconds * len(ids)
        self._log.append(f"{self.name} start {len(ids)}")

    def verify(self, ids: Sequence[int]) -> None:
        self._calls += 1
        self._rows = len(ids)
        self._clock.now += self._seconds * len(ids) * (10 if self._calls <= 3 else 1)
        self._log.append(f"{self.name} {len(ids)}")

    def logits(self) -> NDArray[np.float32]:
        return np.eye(self._rows, 9, dtype=np.float32) * (1 if self.name == "a" else 2)

    def rewind(self) -> None:
        self._log.append(f"{self.name} rewind")

    def close(self) -> None:
        self._log.append(f"{self.name} close")


def test_engines_and_widths_take_turns_and_medians_and_minima_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(), list[str]()
    monkeypatch.setattr(race, "time", clock)
    engines = [Scripted(clock, "a", 0.001, log), Scripted(clock, "b", 0.002, log)]
    machine = Machine(num_threads=1, isa=None, bytes_per_sec=1e6, int8_per_sec=None, float32_per_sec=None)
    rows = race.forwards(engines, machine, context=5, widths=(1, 4), vocab_size=9, num_repeats=3)
    assert log[:2] == ["a start 5", "b start 5"]
    assert [line for line in log if "rewind" not in line][2:8] == ["a 1", "a 1", "a 4", "b 1", "b 1", "b 4"]
    assert [line for line in log if "rewind" not in line][8:14] == ["a 4", "a 4", "a 1", "b 4", "b 4", "b 1"]
    assert sum("rewind" in line for line in log) == 2 * 3 * 3
    found = {(row["engine"], row["width"]): row for row in rows}
    assert found["a", 1]["ms_median"] == pytest.approx(1)
    assert found["b", 4]["ms_median"] == pytest.approx(8)
    assert found["b", 4]["ms_min"] == pytest.approx(8)
    assert found["a", 4]["c"] == pytest.approx(4)
    assert found["a", 1]["c"] == 1
    assert found["a", 1]["floor_ms"] == pytest.approx(1e3 * (1000 + (5 + 4 + 2) * 128) / 1e6)


def test_prompts_are_timed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(), list[str]()
    monkeypatch.setattr(race, "time", clock)
    (row,) = race.prefill([Scripted(clock, "a", 0.001, log)], num_tokens=50, vocab_size=9, num_repeats=2)
    assert log == ["a start 50", "a start 50"]
    assert row["tokens_per_sec_median"] == pytest.approx(1000)
    assert row["tokens_per_sec_best"] == pytest.approx(1000)


def test_agreement_counts_equal_best_tokens_and_measures_the_distance() -> None:
    clock = Clock()
    engines = [Scripted(clock, name, 0.0, []) for name in ("a", "b")]
    own, other = race.agreement(engines, context=2, width=3, vocab_size=9)
    assert (own["same_best_token"], own["logit_error"]) == (3, 0.0)
    assert (other["rows"], other["same_best_token"]) == (3, 3)
    first = np.eye(3, 9)
    assert other["logit_error"] == pytest.approx(np.sqrt((first**2).mean()) / first.std())


# -------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_json_has_the_fields_of_the_contract(path: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    if backend == "native" and environment.kernels_missing():
        pytest.skip("hyflash-kernels is not built here")
    argv = ["-t", str(path), "--backend", backend, "--context", "32,64", "--widths", "4,2", "--prefill", "100"]
    got = costs_json(capsys, *argv)
    assert {"pingpong_ns", "bandwidth_gb_per_sec", "threads", "results", "int8_gmac_per_sec", "provenance"} <= set(got)
    assert (got["threads"], got["pingpong_ns"], got["warnings"]) == (1, None, [])
    assert [(row["context"], row["width"]) for row in got["results"]] == [(c, w) for c in (32, 64) for w in (1, 2, 4)]
    for row in got["results"]:
        assert set(row) >= RESULT_FIELDS
        assert (row["engine"], row["weights"]) == (f"hyflash {backend}", "F32")
        assert row["floor_ms"] > 0
        assert 0 < row["ms_min"] <= row["ms_median"]
    (prompt,) = got["prefill"]
    assert prompt["tokens"] == 100
    (engine,) = got["engines"]
    assert (engine["rows"], engine["same_best_token"], engine["logit_error"]) == (4, 4, 0.0)
    assert got["provenance"]["target_backend"]["backend"] == backend


def test_context_beyond_the_target_is_cut_and_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = costs_json(capsys, "-t", str(path), "--context", "8k", "--widths", "6")
    assert {row["context"] for row in got["results"]} == {TINY_CONTEXT - 6}
    assert "context 8192 was cut to 250" in got["warnings"][0]


def test_table_says_what_the_machine_does_and_c_of_each_width(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--context", "16", "--widths", "1,3", "--repeats", "1", "--prefill", "20", "--threads", "1"]
    assert main(["bench", "--costs", "-t", str(path), *argv]) == 0
    out = capsys.readouterr().out
    for words in ("after 16 tokens", "c(q)", "floor ms", "GB/s", "a prompt of 20 tokens", "best token as in the first"):
        assert words in out


def test_results_file_gets_one_line(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "costs.jsonl"
    got = costs_json(capsys, "-t", str(path), "--context", "16", "--widths", "1", "--out", str(out))
    assert [json.loads(line) for line in out.read_text().splitlines()] == [got]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--costs", "--widths", "0"], "width '0' is none"),
        (["--costs", "--widths", "1,,2"], "width '' is none"),
        (["--costs", "--widths", "257"], "expected whole numbers from 1 to 256"),
        (["--costs", "--repeats", "0"], "repeats is 0"),
        (["--costs", "--prefill", "many"], "not a token count"),
        (["--costs", "--context", "-1"], "not a token count"),
        (["--costs", "--peers", "lama.cpp"], "Did you mean 'llama.cpp'?"),
        (["--costs", "--peers", "all,transformers"], "unknown peer 'all'"),
        (["--costs", "--peers", ""], "unknown peer ''"),
        (["--costs", "--prompts", "demo"], "leave --prompts out"),
        (["--costs", "-d", "lookup"], "leave --drafter out"),
        (["--costs", "--against", "x.jsonl"], "leave --against out"),
        (["--widths", "1,2"], "--widths needs --costs"),
        (["--peers", "all"], "--peers needs --costs"),
        (["--repeats", "3"], "--repeats needs --costs"),
        (["--prefill", "2k"], "--prefill needs --costs"),
        (["--costs", "--threads", "0"], "threads is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    assert main(["bench", "-t", str(path), *argv]) == 1
    assert complaint in capsys.readouterr().err


def test_prompt_longer_than_the_context_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--costs", "-t", str(path), "--context", "16", "--prefill", "1k", "--threads", "1"]) == 1
    assert f"prefill is 1024 tokens; {path} holds {TINY_CONTEXT}" in capsys.readouterr().err


def test_widths_beyond_the_target_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--costs", "-t", str(path), "--widths", "256", "--threads", "1"]) == 1
    assert "give smaller --widths" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- peers


def missing_peer(name: str, *args: Any, **kwargs: Any) -> Engine:
    raise MissingPeer(f"{name} is not installed; install it")


def test_named_peer_that_is_missing_is_an_error(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "make", missing_peer)
    argv = ["bench", "--costs", "-t", str(path), "--context", "16", "--threads", "1", "--peers", "llama.cpp"]
    assert main(argv) == 1
    assert "peer llama.cpp cannot run: llama.cpp is not installed; install it." in capsys.readouterr().err


def test_of_all_peers_the_missing_ones_are_left_out_with_a_line_each(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "make", missing_peer)
    got = costs_json(capsys, "-t", str(path), "--context", "16", "--widths", "1", "--peers", "all")
    assert got["warnings"] == [f"{name} is not installed; install it; left out" for name in find.NAMES]
    assert len(got["engines"]) == 1
