"""The native target as the engine, the command line and Python use it: contract, faults, memory, choice of backend."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hyflash
from families import CONTEXT, LAYERS, VOCAB, family_dir, text
from helpers import tiny_target_dir
from hyflash import api, environment, hub
from hyflash.cli import main
from hyflash.core import Request, Result, Rows, SamplingParams, TargetOptions, TargetOutput
from hyflash.data.answers import Answer
from hyflash.data.capture import capture
from hyflash.engine.decode import Engine
from hyflash.errors import HyflashError, UserError
from hyflash.targets import choose, hf
from native_models import native_dir, needs_kernels, write_gguf

if not environment.kernels_missing():
    from hyflash.targets import native
    from hyflash.targets.native import NativeTarget

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the user's."""
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "native-cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_dir(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def target(llama: Path) -> NativeTarget:
    return native.load(llama, num_threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a template."""
    return tiny_target_dir(tmp_path_factory.mktemp("tiny"))


def rows(tokens: torch.Tensor, *seqs: tuple[int, int], **options: Any) -> Rows:
    return Rows(tokens=tokens, seqs=tuple(s for s, _ in seqs), lengths=tuple(n for _, n in seqs), **options)


# -------------------------------------------------------------------------------------------- contract


@needs_kernels
def test_lengths_and_bytes_follow_opens_truncations_and_closes(target: NativeTarget) -> None:
    one, two = target.open(), target.open()
    assert (target.length(one), target.kv_bytes()) == (0, 0)
    target.forward(rows(text(70), (one, 67), (two, 3)))
    per_token = 2 * LAYERS * 2 * 16 * 2
    assert (target.length(one), target.length(two), target.kv_bytes()) == (67, 3, 70 * per_token)
    target.truncate(one, 5)
    assert (target.length(one), target.kv_bytes()) == (5, 8 * per_token)
    with pytest.raises(ValueError, match="5 tokens to 6"):
        target.truncate(one, 6)
    target.close(one)
    assert target.kv_bytes() == 3 * per_token
    assert target.open() == one
    assert target.length(one) == 0
    for use in (target.length, target.close):
        with pytest.raises(HyflashError, match="sequence 7 is not open"):
            use(7)
    with pytest.raises(HyflashError, match="not open"):
        target.forward(rows(text(1), (9, 1)))


@needs_kernels
def test_malformed_rows_are_refused_and_change_nothing(target: NativeTarget) -> None:
    seq = target.open()
    target.forward(rows(text(3), (seq, 3)))
    for bad in (
        rows(text(3), (seq, 2)),
        rows(text(2), (seq, 1), (seq, 1)),
        rows(text(0), (seq, 0)),
        rows(torch.tensor([VOCAB]), (seq, 1)),
        rows(torch.tensor([-1]), (seq, 1)),
    ):
        with pytest.raises(HyflashError):
            target.forward(bad)
    with pytest.raises(UserError, match="tap 4 is not a layer"):
        target.forward(rows(text(1), (seq, 1), taps=(LAYERS + 1,)))
    with pytest.raises(UserError, match="layer 3 is none"):
        target.kv_view(seq, LAYERS)
    assert target.length(seq) == 3


@needs_kernels
def test_the_last_position_of_the_context_is_served_and_no_further(target: NativeTarget) -> None:
    seq = target.open()
    target.forward(rows(text(CONTEXT - 1), (seq, CONTEXT - 1), logits="none"))
    with pytest.raises(UserError, match=f"{CONTEXT + 1} tokens do not fit"):
        target.forward(rows(text(2), (seq, 2)))
    out = target.forward(rows(text(1), (seq, 1), logits="last"))
    assert out.logits is not None
    assert target.length(seq) == CONTEXT
    whole = target.open()
    ids = torch.cat([text(CONTEXT - 1), text(1)])
    want = target.forward(rows(ids, (whole, CONTEXT), logits="last")).logits
    assert torch.equal(out.logits, want)  # type: ignore[arg-type]


@needs_kernels
def test_logits_of_last_rows_and_best_logits_are_those_of_all_rows(target: NativeTarget) -> None:
    seqs = [target.open() for _ in range(3)]
    lengths = (5, 1, 9)

    def run(**options: Any) -> TargetOutput:
        for seq in seqs:
            target.truncate(seq, 0)
        return target.forward(rows(text(15), *zip(seqs, lengths, strict=True), **options))

    every = run().logits
    assert every is not None
    last = run(logits="last").logits
    assert torch.equal(last, every[[4, 5, 14]])  # type: ignore[arg-type]
    for logits, want in (("all", every), ("last", every[[4, 5, 14]])):
        for top in (1, 2, 20, VOCAB, VOCAB + 5):
            out = run(top=top, logits=logits)
            assert out.logits is None
            sorted_ = torch.sort(want, dim=-1, descending=True, stable=True)
            assert out.top_values == sorted_.values[:, :top].tolist()
            assert out.top_ids == sorted_.indices[:, :top].tolist()
    nothing = run(top=3, logits="none", taps=(1,))
    assert (nothing.logits, nothing.top_ids) == (None, None)
    assert nothing.features is not None
    assert nothing.features.dtype == torch.float32


@needs_kernels
def test_many_requests_reuse_the_memory_of_the_first(target: NativeTarget) -> None:
    def cycle(times: int) -> None:
        for i in range(times):
            seq = target.open()
            target.forward(rows(text(150, seed=i), (seq, 150), logits="last"))
            target.close(seq)

    cycle(20)
    before = resident_bytes()
    cycle(280)
    assert resident_bytes() - before < 2 << 20
    assert (target.open(), target.kv_bytes()) == (0, 0)


@needs_kernels
def test_loaded_and_dropped_targets_free_their_memory(llama: Path) -> None:
    for _ in range(5):
        native.load(llama, num_threads=2)
    before = resident_bytes()
    for _ in range(40):
        one = native.load(llama, num_threads=2)
        seq = one.open()
        one.forward(rows(text(64), (seq, 64)))
    assert resident_bytes() - before < 8 << 20


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pytest.skip("this system does not tell how much memory a process holds")


@needs_kernels
def test_weights_and_keys_are_counted(target: NativeTarget, llama: Path) -> None:
    stored = sum(t.nbytes for t in load_file(llama / "model.safetensors").values())
    memory = target.memory()
    assert stored <= memory["weights_bytes"] <= 1.5 * stored + VOCAB * 32 * 4  # tied: a packed head beside the table
    seq = target.open()
    target.forward(rows(text(64), (seq, 64)))
    assert target.memory()["kv_bytes"] == target.kv_bytes() > 0
    assert target.memory()["kv_reserved_bytes"] >= target.kv_bytes()
    assert target.memory()["scratch_bytes"] > 64 * target.info.hidden_size * 4
    target.close(seq)
    assert target.kv_bytes() == 0 < target.memory()["kv_reserved_bytes"]


@needs_kernels
def test_threads_are_chosen_and_do_not_reach_the_bits(target: NativeTarget) -> None:
    seq = target.open()
    want = target.forward(rows(text(9), (seq, 9))).logits
    assert target.choose_threads(2) in (1, 2)
    assert target.length(seq) == 9
    target.truncate(seq, 0)
    assert torch.equal(target.forward(rows(text(9), (seq, 9))).logits, want)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- faults


def broken_dir(parent: Path, model: str, **changes: Any) -> Path:
    """Token 9 has an embedding of NaN, and is hardly ever said."""
    path = native_dir(parent, model, tie_word_embeddings=False, **changes)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("nan")
    weights["lm_head.weight"][9] = 0.0  # the best logit is above 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@needs_kernels
@pytest.mark.parametrize("kv", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_a_row_of_nan_spoils_nothing_but_itself_and_what_follows(model: str, kv: str, tmp_path: Path) -> None:
    target = native.load(broken_dir(tmp_path, model), kv=kv, num_threads=1)
    clean = text(30)[text(30) != 9]
    ill = clean.clone()
    ill[20] = 9
    seq, beside = target.open(), target.open()
    want = target.forward(rows(clean, (seq, len(clean)))).logits
    target.truncate(seq, 0)
    assert want is not None
    both = target.forward(rows(torch.cat([ill, clean]), (seq, len(ill)), (beside, len(clean)), taps=(0,)))
    assert both.logits is not None
    assert torch.equal(both.logits[:20], want[:20])
    assert torch.equal(both.logits[len(ill) :], want)
    assert bool(both.logits[20].isnan().all())
    assert not bool(both.logits[len(ill) - 1].isfinite().any())  # a later row sees it, also through a window of layers
    assert both.features is not None
    assert bool(both.features.isfinite().all())
    target.truncate(seq, 20)  # rejected: nothing is left of it
    assert torch.equal(target.forward(rows(clean[20:], (seq, len(clean) - 20))).logits, want[20:])  # type: ignore[arg-type]
    target.close(seq)  # its pages go to others
    again = target.open()
    assert torch.equal(target.forward(rows(clean, (again, len(clean)))).logits, want)  # type: ignore[arg-type]
    best = target.open()
    top = target.forward(rows(ill, (best, len(ill)), top=2))
    assert top.top_values is not None
    assert all(map(math.isnan, top.top_values[20]))
    assert all(math.isfinite(x) for best in top.top_values[:20] for x in best)


@needs_kernels
def test_behind_a_window_nan_is_forgotten_alike_at_every_width(tmp_path: Path) -> None:
    """One sliding layer: rows past the window do not see the token, whoever shares their forward."""
    target = native.load(broken_dir(tmp_path, "mistral", num_hidden_layers=1), kv="float32", num_threads=1)
    ids = text(40)
    ids[ids == 9] = 8
    ids[3] = 9
    outs = []
    for widths in ([40], [1] * 40, [16, 16, 8], [5, 35]):
        seq = target.open()
        outs.append([target.forward(rows(piece, (seq, len(piece)))).logits for piece in ids.split(widths)])
        target.close(seq)
    joined = [torch.cat(out) for out in outs]  # type: ignore[arg-type]
    assert not bool(joined[0][3:11].isfinite().any())
    assert bool(joined[0][11:].isfinite().all())
    for other in joined[1:]:
        assert torch.equal(other.nan_to_num(7.0), joined[0].nan_to_num(7.0))


@needs_kernels
@pytest.mark.parametrize("bias", [{}, {9: -100.0}], ids=["greedy", "not plain"])
def test_a_request_that_meets_nan_ends_alone(tmp_path: Path, bias: dict[int, float]) -> None:
    target = native.load(broken_dir(tmp_path, "llama"), num_threads=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=bias)
    good = Request(prompt_ids=tuple(t for t in text(20).tolist() if t != 9), params=params)
    bad = Request(prompt_ids=(5, 9, 6, 7), params=params)
    engine = Engine(target, prefill_chunk=2)
    want = Engine(target).generate([good])[0].token_ids
    for _ in range(2):
        results = engine.generate([bad, good, bad])
        assert [r.finish_reason for r in results] == ["error", "length", "error"]
        assert "non-finite logits at position 4" in str(results[0].error)
        assert results[1].token_ids == want
    assert engine.generate([good])[0].token_ids == want
    assert target.kv_bytes() == 0


@needs_kernels
def test_a_request_cancelled_in_mid_prefill_leaves_the_others_as_they_are(target: NativeTarget) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    long = Request(prompt_ids=tuple(text(200).tolist()), params=params)
    short = Request(prompt_ids=tuple(text(7, seed=3).tolist()), params=params)
    want = Engine(target).generate([short])[0].token_ids
    engine = Engine(target, prefill_chunk=16)
    ids = [engine.submit(r) for r in (long, short, long)]
    for step in range(200):
        engine.step()
        if step == 4:
            engine.cancel(ids[0])
        if not engine.num_unfinished:
            break
    results = [engine.result(i) for i in ids]
    assert [r.finish_reason for r in results] == ["cancelled", "length", "length"]
    assert results[0].token_ids == ()
    assert results[1].token_ids == want
    assert target.kv_bytes() == 0


@needs_kernels
def test_capture_gives_the_features_of_the_torch_target(llama: Path) -> None:
    answers = [
        Answer(id=str(n), domain="d", prompt_ids=tuple(text(n).tolist()), answer_ids=tuple(text(9, seed=n).tolist()))
        for n in (4, 30, 11)
    ]
    made = []
    for target in (native.load(llama, kv="float32", num_threads=1), hf.load(str(llama))):
        made.append(list(capture(target, answers, taps=(0, 2, LAYERS), batch_tokens=40)))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours.features, theirs.features, atol=2e-3, rtol=2e-3)


# ------------------------------------------------------------------------------------ choice of backend


def chosen(spec: Path | str, **options: Any) -> choose.Chosen:
    return choose.load(str(spec), TargetOptions(num_threads=1, **options))


@needs_kernels
def test_auto_takes_the_kernels_and_falls_back_with_one_line(llama: Path, tmp_path: Path) -> None:
    got = chosen(llama)
    assert (got.model.describe()["backend"], got.note, got.tokenizer) == ("native", "", str(llama))
    unknown = family_dir(tmp_path, "gemma")
    got = chosen(unknown)
    assert got.model.describe()["backend"] == "torch"
    assert len(got.note.splitlines()) == 1
    assert "gemma" in got.note
    with pytest.raises(UserError, match="gemma"):
        chosen(unknown, backend="native")
    for options in ({"quant": "q8_0"}, {"kv": "int8"}):  # they would be ignored
        with pytest.raises(UserError, match="gemma"):
            chosen(unknown, **options)
    assert chosen(llama, backend="torch").model.describe()["backend"] == "torch"
    got = chosen(llama, dtype="bfloat16")
    assert (got.model.describe()["dtype"], got.note) == ("bfloat16", "")
    got = chosen(llama, quant="q4_0", kv="int8")
    assert got.model.describe() == {
        "backend": "native", "weights": "Q4_0", "kv": "int8", "isa": got.model.describe()["isa"], "num_threads": 1,
    }  # fmt: skip


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub library's cache, with no network beside it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_name_on_the_hub_is_served_by_the_kernels(llama: Path, hub_cache: Path) -> None:
    entry = hub_cache / "models--some--model"
    (entry / "snapshots").mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("0" * 40)
    shutil.copytree(llama, entry / "snapshots" / ("0" * 40))
    got, want = chosen("some/model"), chosen(llama)
    assert (got.model.describe()["backend"], got.note, got.model.info.name) == ("native", "", "some/model")
    assert got.model.info.fingerprint == want.model.info.fingerprint
    assert Path(got.tokenizer).is_dir()


def test_a_name_that_cannot_be_had_is_refused(hub_cache: Path) -> None:
    with pytest.raises(UserError, match="cannot fetch some/model from the hub: "):
        chosen("some/model", backend="native")
    with pytest.raises(UserError, match="some/model"):
        chosen("some/model")


def test_without_the_kernels_auto_says_once_what_is_missing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hyflash_kernels", None)
    got = chosen(llama)
    assert got.model.describe()["backend"] == "torch"
    assert len(got.note.splitlines()) == 1
    assert "hyflash-kernels is not installed" in got.note
    with pytest.raises(UserError, match="hyflash-kernels is not installed"):
        chosen(llama, backend="native")
    assert "not installed" in environment.kernels()["missing"]


@needs_kernels
def test_an_unknown_instruction_set_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYFLASH_KERNELS_ISA", "mmx")
    with pytest.raises(UserError, match="HYFLASH_KERNELS_ISA"):
        chosen(llama, backend="native")
    monkeypatch.setenv("HYFLASH_KERNELS_ISA", "portable")
    assert chosen(llama).model.describe()["isa"] == "portable"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "cuda"}, "backend is 'cuda'; expected auto or native or torch"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"quant": "q8"}, "Did you mean 'q8_0'"),
        ({"kv": "float61"}, "Did you mean 'float16'"),
        ({"backend": "torch", "quant": "q8_0"}, "quant is an option of the native backend"),
        ({"backend": "torch", "kv": "int8"}, "kv is an option of the native backend"),
        ({"backend": "native", "dtype": "float32"}, "dtype is an option of the torch backend"),
        ({"dtype": "float32", "quant": "q8_0"}, "does not go with quant"),
        ({"num_threads": 0}, "threads is 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TargetOptions(**options)


@needs_kernels
def test_quantising_a_gguf_file_is_refused(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "m.gguf")
    with pytest.raises(UserError, match="quantised already"):
        native.load(file, quant="q8_0")


def test_physical_cores_or_the_users_number_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment.num_threads() == 3
    for text_ in ("0", "many", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", text_)
        assert 1 <= environment.num_threads() <= (os.cpu_count() or 1)


# --------------------------------------------------------------------------- GGUF, tokenizer, command line


@needs_kernels
def test_packing_is_reported_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "cache"))
    heard: list[tuple[str, int, int]] = []
    choose.load(str(llama), TargetOptions(num_threads=1), report=lambda *what: heard.append(what))
    assert {what for what, _, _ in heard} == {"pack"}
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)
    assert heard[-1][1] == heard[-1][2]
    heard.clear()
    choose.load(str(llama), TargetOptions(num_threads=1), report=lambda *what: heard.append(what))
    assert not heard


@needs_kernels
def test_a_gguf_file_needs_no_dense_copy_and_its_tokenizer_is_read_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tiny, tmp_path / "tiny.gguf", tokenizer=True)
    loaded = api.load_target(str(file), TargetOptions(num_threads=1))
    assert loaded.model.describe()["backend"] == "native"
    ids = loaded.tokenizer.encode("Hello")
    assert loaded.tokenizer.decode(ids) == "Hello"
    assert sorted(p.name for p in (tmp_path / "cache").iterdir() if p.name != "packed") == ["tokenizers"]

    def never(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(hub, "_convert_tokenizer", never)
    api.load_target(str(file), TargetOptions(num_threads=1))
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError):
        api.load_target(str(file), TargetOptions(num_threads=1, backend="native"))


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@needs_kernels
def test_generate_says_what_computed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", "-t", str(tiny), "-n", "12", "--ignore-eos", "-d", "lookup", "--raw", "--json", "abcabcabc")
    got = run_json(capsys, *asked, "--threads", "1")
    assert (got["backend"]["backend"], got["backend"]["kv"], got["exactness"]) == ("native", "float16", "invariant")
    assert got["memory"]["weights_bytes"] > 0
    assert got["warnings"] == []
    other = run_json(capsys, *asked, "--quant", "q8_0", "--kv", "int8")
    assert (other["backend"]["weights"], other["backend"]["kv"]) == ("Q8_0", "int8")
    plain = run_json(capsys, *asked, "--backend", "torch")
    assert plain["backend"]["backend"] == "torch"
    assert plain["num_tokens"] == 12


@needs_kernels
def test_compare_finds_native_text_identical(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(
        capsys, "generate", "-t", str(tiny), "-n", "24", "-d", "lookup", "--compare", "--ignore-eos", "--json", "abab"
    )
    assert got["identical"]
    assert got["backend"]["backend"] == "native"


@needs_kernels
def test_doctor_and_bench_report_the_backend(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "doctor", "-t", str(tiny), "-d", "lookup", "--json")
    assert (found["backend"]["backend"], found["healthy"]) == ("native", True)
    assert main(["doctor", "-t", str(tiny), "-d", "lookup"]) == 0
    assert "native, F32, " in capsys.readouterr().out
    bench = run_json(
        capsys, "bench", "-t", str(tiny), "-d", "lookup", "--limit", "1", "-n", "8", "--kv", "float32", "--json"
    )
    assert bench["provenance"]["target_backend"]["kv"] == "float32"
    assert all(row["exact"] for row in bench["results"])


def test_env_tells_about_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "env", "--json")["kernels"].keys() in ({"missing"}, {"version", "isa", "num_threads"})


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "hi", "--backend", "native", "--dtype", "float32"),
        ("chat", "--quant", "q9"),
        ("doctor", "--backend", "torch", "--kv", "int8"),
        ("bench", "--dtype", "bfloat16", "--kv", "int8"),
        ("data", "regenerate", "x.jsonl", "--out", "y", "--backend", "best"),
        ("data", "capture", "x.jsonl", "--taps", "1", "--out", "y", "--backend", "torch", "--quant", "q8_0"),
    ],
)
def test_commands_refuse_options_of_the_other_backend(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("")
    assert main(list(argv)) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@needs_kernels
def test_python_loads_the_native_target_too(tiny: Path) -> None:
    engine = hyflash.load(str(tiny), "lookup", kv="float32", num_threads=1, length="fixed")
    result: Result = engine.generate([Request(prompt_ids=(5, 6, 7, 5, 6), params=SamplingParams(max_tokens=9))])[0]
    assert engine.target.describe()["kv"] == "float32"
    assert len(result.token_ids) <= 9
