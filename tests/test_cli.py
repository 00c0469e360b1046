"""The command line as scripts and people use it: output, exit codes, one sentence for every mistake."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import hyflash
from helpers import THINKING, TINY_CONTEXT, tiny_target_dir
from hyflash import hub
from hyflash.cli import main
from hyflash.cli.main import explain
from hyflash.engine.decode import Engine
from hyflash.errors import HyflashError, UserError

FIELDS = {
    "text",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_tokens",
    "num_rounds",
    "acceptance_length",
    "tokens_per_sec",
    "ttft_sec",
    "draft_state_bytes",
    "exact",
    "target",
    "drafter",
    "warnings",
}
COMMANDS = ["generate", "chat", "pull", "train", "calibrate", "bench", "report", "drafters", "doctor", "env"]
DATA_COMMANDS = [["data", "regenerate"], ["data", "capture"], ["data", "inspect"], ["data", "ngrams"]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target on disk."""
    return str(tiny_target_dir(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for the whole session, so that widths are timed once; never the user's."""
    cache = tmp_path_factory.getbasetemp() / "hyflash-cache"
    monkeypatch.setenv("HYFLASH_CACHE", str(cache))


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """The JSON object a command prints; it must succeed and print nothing else on stdout."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert len(out.splitlines()) == 1
    return json.loads(out)


def run_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence of a command that must fail with 1 and print nothing on stdout."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Pipe bytes to stdin."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# ----------------------------------------------------------------------------------------------- help


def test_help_imports_nothing_but_the_command_line() -> None:
    code = (
        "import sys; old = set(sys.modules); from hyflash.cli import main; assert main(['--help']) == 0;"
        "print(*{m.split('.')[0] for m in set(sys.modules) - old} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()[-1].split()) <= {"hyflash", "typer", "rich", "shellingham", "annotated_doc"}


@pytest.mark.parametrize("command", [*([c] for c in COMMANDS), *DATA_COMMANDS], ids=" ".join)
def test_every_command_explains_itself_with_examples_first(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Examples:\n    hyflash {' '.join(command)}" in out or "Examples:\n    HYFLASH" in out
    assert out.index("Examples:") < out.index("Options:")


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "hyflash pull smollm2-135m" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyflash {hyflash.__version__}\n"


def test_package_offers_its_names_without_importing_torch() -> None:
    code = (
        "import sys, hyflash; names = dir(hyflash); assert 'torch' not in sys.modules;"
        "hyflash.UserError, hyflash.SamplingParams; assert 'torch' not in sys.modules; print(names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'load'" in done.stdout
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        hyflash.lod  # noqa: B018


# ------------------------------------------------------------------------------------------- generate


def test_generate_json_has_the_fields_of_the_contract(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "generate", "-t", tiny, "-d", "lookup", "-n", "12", "--json", "hello hello")
    assert set(got) >= FIELDS
    assert got["num_tokens"] == len(got["token_ids"]) <= 12
    assert got["finish_reason"] in ("stop", "length")
    assert got["acceptance_length"] == pytest.approx(got["num_tokens"] / got["num_rounds"], abs=1e-4)
    assert (got["target"], got["drafter"], got["exact"]) == (tiny, "lookup", True)


def test_generate_streams_the_same_text_to_stdout(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "generate", "-t", tiny, "-n", "20", "--json", "-q", "abc abc")
    assert main(["generate", "-t", tiny, "-n", "20", "abc abc"]) == 0
    out, err = capsys.readouterr()
    assert out == got["text"] + "\n"
    assert "tok/s" in err
    assert len(err.splitlines()) == 1


def test_quiet_leaves_stderr_empty(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-t", tiny, "-d", "none", "-n", "4", "-q", "hi"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "7"]], ids=["greedy", "sampled"])
def test_compare_shows_plain_decoding_and_equality(
    tiny: str, capsys: pytest.CaptureFixture[str], sampling: list[str]
) -> None:
    got = run_json(
        capsys, "generate", "-t", tiny, "-d", "lookup", "-n", "24", "--compare", "--json", *sampling, "ab ab ab"
    )
    assert got["identical"] is True
    assert got["plain"]["token_ids"] == got["token_ids"]
    assert got["plain"]["drafter"] == "none"
    assert got["plain"]["num_rounds"] == got["plain"]["num_tokens"]
    assert got["speedup"] == pytest.approx(got["tokens_per_sec"] / got["plain"]["tokens_per_sec"], rel=1e-3)
    assert set(got["plain"]) >= FIELDS


def test_compare_prints_one_comparison_line(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-t", tiny, "-d", "lookup", "-n", "8", "--compare", "hi hi"]) == 0
    assert "x plain decoding" in capsys.readouterr().err


@pytest.mark.parametrize("argument", [["-"], []], ids=["dash", "absent"])
def test_prompt_from_stdin_equals_the_argument(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: list[str]
) -> None:
    direct = run_json(capsys, "generate", "-t", tiny, "-n", "6", "--json", "naïve 漢")
    feed(monkeypatch, "naïve 漢\n".encode())
    piped = run_json(capsys, "generate", "-t", tiny, "-n", "6", "--json", *argument)
    assert piped["token_ids"] == direct["token_ids"]


def test_raw_skips_the_template(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    raw = run_json(capsys, "generate", "-t", tiny, "--raw", "-n", "2", "--json", "hello")
    chat = run_json(capsys, "generate", "-t", tiny, "-n", "2", "--json", "hello")
    assert raw["num_prompt_tokens"] == 5
    assert chat["num_prompt_tokens"] > 20


def test_drafter_width_and_length_do_not_change_the_text(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = run_json(capsys, "generate", "-t", tiny, "-d", "none", "-n", "30", "--json", "la la la")
    for more in (
        ["--length", "fixed", "--num-draft-tokens", "3"],
        ["--length", "fixed"],
        ["--num-draft-tokens", "2"],
        ["--length", "nightjar"],
        ["--length", "nightjar", "--num-draft-tokens", "1"],
    ):
        got = run_json(capsys, "generate", "-t", tiny, "-d", "lookup", "-n", "30", "--json", *more, "la la la")
        assert got["token_ids"] == base["token_ids"]


def test_offloading_a_drafter_without_weights_is_a_warning_not_silence(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--length", "nightjar", "--offload-below", "1.5G"]
    got = run_json(capsys, "generate", "-t", tiny, "-d", "lookup", "-n", "2", "--json", *more, "hi")
    assert got["warnings"] == ["offloading does nothing: the drafter has no weights."]
    with pytest.warns(UserWarning, match="no weights"):
        hyflash.load(tiny, "lookup", length="nightjar", offload_below=10**9)
    with pytest.raises(UserError, match="length nightjar"):
        hyflash.load(tiny, "none", offload_below=10**9)


def test_seed_without_sampling_is_a_warning_not_silence(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "generate", "-t", tiny, "-n", "2", "--seed", "3", "--top-k", "5", "--json", "hi")
    assert got["warnings"] == [
        "--seed has no effect at temperature 0 (greedy)",
        "--top-k has no effect at temperature 0 (greedy)",
    ]
    assert main(["generate", "-t", tiny, "-n", "2", "--seed", "3", "hi"]) == 0
    assert "warning: --seed" in capsys.readouterr().err


def test_exact_off_says_so_in_the_result(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "generate", "-t", tiny, "-n", "2", "--exact", "off", "--json", "hi")
    assert got["exact"] is False
    assert "exactness is off" in got["warnings"][0]


def test_logprobs_are_reported_per_token(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "generate", "-t", tiny, "-n", "3", "--logprobs", "2", "--json", "hi")
    assert [item["token_id"] for item in got["logprobs"]] == got["token_ids"]
    assert all(len(item["top"]) == 2 for item in got["logprobs"])


def test_drafter_option_reaches_the_drafter(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = run_error(capsys, "generate", "-t", tiny, "-d", "lookup", "-o", "no_such=1", "hi")
    assert "no_such" in err
    assert "lookup" in err


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        (["-n", "7"], "max_tokens", 7),
        (["--min-tokens", "2"], "min_tokens", 2),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-k", "4"], "top_k", 4),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--min-p", "0.1"], "min_p", 0.1),
        (["--repetition-penalty", "1.2"], "repetition_penalty", 1.2),
        (["--presence-penalty", "0.3"], "presence_penalty", 0.3),
        (["--frequency-penalty", "0.4"], "frequency_penalty", 0.4),
        (["--logit-bias", "7=-5", "--logit-bias", "8=1.5"], "logit_bias", {7: -5.0, 8: 1.5}),
        (["--logprobs", "3"], "logprobs", 3),
        (["--seed", "11"], "seed", 11),
        (["--stop", "x", "--stop", "yz"], "stop", ("x", "yz")),
        (["--stop-token-id", "9"], "stop_token_ids", (9,)),
        (["--ignore-eos"], "ignore_eos", True),
    ],
)
def test_every_sampling_flag_reaches_the_engine(
    tiny: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: list[str],
    field: str,
    value: object,
) -> None:
    seen: list[Any] = []
    submit = Engine.submit

    def spy(self: Engine, request: Any) -> int:
        seen.append(request.params)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit", spy)
    run_json(capsys, "generate", "-t", tiny, "-d", "none", "--json", "-n", "3", *flag, "hi")
    assert getattr(seen[0], field) == value


def test_python_load_gives_the_same_tokens_as_the_command(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "generate", "-t", tiny, "--raw", "-n", "9", "--json", "abcabc")
    engine = hyflash.load(tiny, "lookup", length="fixed", num_draft_tokens=4)
    assert engine.tokenizer is not None
    request = hyflash.Request(
        prompt_ids=tuple(engine.tokenizer.encode("abcabc")), params=hyflash.SamplingParams(max_tokens=9)
    )
    (result,) = engine.generate([request])
    assert list(result.token_ids) == got["token_ids"]
    with pytest.raises(UserError, match="length"):
        hyflash.load(tiny, "lookup", length="longest")


# ------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "hi", "--temperature", "nan"], ["temperature", "finite"]),
        (["generate", "hi", "--temperature", "inf"], ["temperature", "finite"]),
        (["generate", "hi", "--temperature", "-1"], ["temperature"]),
        (["generate", "hi", "--temperature", "warm"], ["--temperature", "number"]),
        (["generate", "hi", "-n", "0"], ["max_tokens", "at least 1"]),
        (["generate", "hi", "--top-p", "0"], ["top_p"]),
        (["generate", "hi", "--min-p", "2"], ["min_p"]),
        (["generate", "hi", "--top-k", "-3"], ["top_k"]),
        (["generate", "hi", "--repetition-penalty", "0"], ["repetition_penalty"]),
        (["generate", "hi", "--presence-penalty", "nan"], ["presence_penalty"]),
        (["generate", "hi", "--seed", "-1"], ["seed"]),
        (["generate", "hi", "--stop", ""], ["stop"]),
        (["generate", "hi", "--logit-bias", "seven"], ["ID=BIAS"]),
        (["generate", "hi", "--logit-bias", "7="], ["ID=BIAS"]),
        (["generate", "hi", "--logit-bias", "7=nan"], ["logit_bias"]),
        (["generate", "hi", "--min-tokens", "999"], ["min_tokens"]),
        (["generate", "hi", "--length", "adaptve"], ["length", "Did you mean 'adaptive'"]),
        (["generate", "hi", "--exact", "yes"], ["exact", "auto"]),
        (["generate", "hi", "--dtype", "int8"], ["dtype"]),
        (["generate", "hi", "--logprobs", "2"], ["--json"]),
        (["generate", ""], ["empty"]),
        (["generate", "  \n "], ["empty"]),
        (["generate", "hi", "--system", " "], ["system message", "empty"]),
        (["generate", "hi", "--raw", "--system", "be kind"], ["--raw", "--system"]),
        (["generate", "hi", "--raw", "--thinking"], ["--raw", "--thinking"]),
        (["generate", "hi", "--compare", "-d", "none"], ["--compare", "none"]),
        (["generate", "hi", "--num-draft-tokens", "3", "-d", "none"], ["--num-draft-tokens", "none"]),
        (["generate", "hi", "--length", "fixed", "-d", "none"], ["--length", "none"]),
        (["generate", "hi", "--length", "nightjr"], ["length", "Did you mean 'nightjar'"]),
        (["generate", "hi", "--offload-below", "1G"], ["--offload-below", "--length nightjar", "adaptive"]),
        (["chat", "--length", "nightjar", "--offload-below", "much"], ["--offload-below", "'much'", "500M"]),
        (["chat", "--length", "nightjar", "--offload-below", "0M"], ["--offload-below", "'0M'"]),
        (["generate", "hi", "--length", "nightjar", "--offload-below", "infG"], ["--offload-below", "'infG'"]),
        (["generate", "hi", "-t", "~nobody-of-that-name/m"], ["no such home directory"]),
        (["generate", "hi", "-t", ""], ["target", "no name"]),
        (["generate", "hi", "-t", "smollm2-135"], ["smollm2-135", "Did you mean 'smollm2-135m'"]),
        (["generate", "hi", "-t", "smollm2-135m"], ["hyflash pull smollm2-135m"]),
        (["generate", "hi", "-t", "./nowhere"], ["unknown target"]),
        (["generate", "hi", "extra"], ["extra"]),
        (["generate", "hi", "--temprature", "1"], ["--temprature"]),
        (["generte", "hi"], ["generte"]),
        (["bench", "-d", "none"], ["none"]),
        (["bench", "-d", "lookup", "-d", "lookup"], ["twice"]),
        (["bench", "-d", "lookup", "--context", "2q"], ["2q"]),
        (["bench", "-d", "lookup", "--costs"], ["--costs", "--drafter"]),
        (["bench", "--costs", "-n", "128", "--seed", "0"], ["--costs", "--max-tokens, --seed"]),
        (["bench", "-d", "lookup", "--acceptance-only", "--length", "adaptive"], ["adaptive"]),
        (["bench", "-d", "lookup", "--acceptance-only", "--length", "nightjar"], ["--length nightjar"]),
        (["bench", "-d", "lookup", "--out", "/no/such/dir/file"], ["/no/such/dir/file"]),
        (["doctor", "-d", "none"], ["none"]),
        (["pull", "smollm3"], ["Did you mean 'smollm2-135m'"]),
        (["data", "capture", "a.jsonl", "--out", "x"], ["--recipe or --taps"]),
        (["data", "inspect", "no-such-file"], ["no-such-file"]),
        (["data", "ngrams", "no-such.jsonl", "--out", "x"], ["no-such.jsonl"]),
        (["data", "ngrams", "no-such.jsonl", "--out", "x", "--max-context", "4"], ["max_context"]),
        (["data", "regenerate", "no-such.jsonl", "--out", "x"], ["no-such.jsonl"]),
        (["data", "regenerate", "a.jsonl", "--out", "x", "--greedy-share", "2"], ["greedy_share"]),
        (["data", "regenerate", "a.jsonl", "--out", "x", "--limit", "0"], ["limit is 0"]),
        (["data", "regenerate", "a.jsonl", "--out", "x", "--limit", "-1"], ["limit is -1"]),
        (["train", "no-such.toml", "--out", "x"], ["no-such.toml"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_mistake_is_one_sentence_and_exit_1(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path))
    err = run_error(capsys, *argv)
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-d", "lokup"], ["lokup", "lookup"]),
        (["--thinking"], ["thinking"]),
        (["--threads", "0"], ["threads"]),
        (["--threads", "1000000000"], ["threads", "1024"]),
        (["-d", "~nobody-of-that-name/d"], ["no such home directory"]),
        (["--num-draft-tokens", "0"], ["num_draft_tokens"]),
        (["--num-draft-tokens", "9999"], ["num_draft_tokens", "at most"]),
        (["-o", "nonsense"], ["nonsense", "key=value"]),
        (["-d", "none", "-o", "a=1"], ["none"]),
        (["--logit-bias", "99999=1"], ["99999", "vocabulary"]),
        (["--stop-token-id", "99999"], ["99999", "vocabulary"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistake_that_needs_the_target_is_one_sentence_too(
    tiny: str, capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    err = run_error(capsys, "generate", "-t", tiny, *argv, "hi")
    for word in words:
        assert word in err


def test_prompt_longer_than_the_context_is_refused_with_numbers(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    exact_fit = "x" * (TINY_CONTEXT - 1)
    got = run_json(capsys, "generate", "-t", tiny, "--raw", "-n", "5", "--json", exact_fit)
    assert (got["num_tokens"], got["finish_reason"]) == (1, "length")
    assert got["warnings"] == [f"only 1 of 5 new tokens fit the context of {tiny}"]
    err = run_error(capsys, "generate", "-t", tiny, "--raw", exact_fit + "x")
    assert f"{TINY_CONTEXT} tokens" in err


def test_thinking_is_taken_where_the_template_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tiny_target_dir(tmp_path, template=THINKING))
    on = run_json(capsys, "generate", "-t", target, "-n", "1", "--thinking", "--json", "hi")
    off = run_json(capsys, "generate", "-t", target, "-n", "1", "--no-thinking", "--json", "hi")
    assert off["num_prompt_tokens"] > on["num_prompt_tokens"]


def test_target_without_template_points_to_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tiny_target_dir(tmp_path, template=None))
    assert "--raw" in run_error(capsys, "generate", "-t", target, "hi")
    run_json(capsys, "generate", "-t", target, "--raw", "-n", "1", "--json", "hi")


def test_truncated_weights_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target_dir(tmp_path)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "weights" in run_error(capsys, "generate", "-t", str(target), "hi")


@pytest.mark.parametrize("data", [b"\xff\xfe\xfa", b"", b"\n\n"], ids=["not utf-8", "empty", "blank"])
def test_bad_stdin_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    feed(monkeypatch, data)
    run_error(capsys, "generate", "-")


def test_interrupt_ends_with_130_after_the_text_so_far(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Engine) -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", stop)
    assert main(["generate", "-t", tiny, "-d", "none", "hi"]) == 130


def test_reader_that_goes_away_ends_quietly(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        code = main(["generate", "-t", tiny, "-d", "none", "-n", "20", "--ignore-eos", "-q", "hi"])
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
    assert code == 1
    assert capsys.readouterr().err == ""


def test_known_faults_have_a_sentence_and_unknown_ones_keep_their_traceback() -> None:
    assert "disk is full" in str(explain(OSError(errno.ENOSPC, "No space left on device")))
    assert explain(FileNotFoundError(2, "No such file or directory", "a.txt")) == "a.txt: No such file or directory."
    assert explain(UserError("found x; expected y.")) == "found x; expected y."
    assert explain(HyflashError("the target failed.")) == "the target failed."
    assert "memory" in str(explain(MemoryError()))
    assert "out of memory" in str(explain(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")))
    assert "JSON" in str(explain(json.JSONDecodeError("bad", "", 0)))
    assert explain(TypeError("ours")) is None
    with pytest.raises(TypeError, match="ours"):
        main_raising(TypeError("ours"))


def main_raising(err: Exception) -> None:
    """Run a command whose work raises `err`."""
    with pytest.MonkeyPatch.context() as patch:

        def fail(*args: object, **kwargs: object) -> None:
            raise err

        patch.setattr("hyflash.hub.pull", fail)
        main(["pull", "-q"])


def test_target_that_fails_is_a_sentence_not_a_result(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyflash.engine import decode

    def broken(progress: Any, *args: object, **kwargs: object) -> Any:
        progress.finish("error", "the target gave non-finite logits at position 9.")
        return decode_outcome()

    def decode_outcome() -> Any:
        from hyflash.engine.verify import Outcome

        return Outcome(num_accepted=0, num_committed=0, num_near_ties=0, num_rechecks=0)

    monkeypatch.setattr(decode, "verify", broken)
    assert "non-finite" in run_error(capsys, "generate", "-t", tiny, "-d", "none", "--json", "hi")


# ----------------------------------------------------------------------------------------------- chat


def test_chat_remembers_turns_until_reset(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"hi\n\nhi\n/reset\nhi\n/exit\nnever\n")
    assert main(["chat", "-t", tiny, "-d", "lookup", "-n", "4", "--json", "-q"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(turns) == 3
    assert turns[1]["num_prompt_tokens"] > turns[0]["num_prompt_tokens"]
    assert turns[2]["token_ids"] == turns[0]["token_ids"]


def test_chat_that_outgrows_the_context_says_so_and_goes_on(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"x" * TINY_CONTEXT + b"\nhi\n")
    assert main(["chat", "-t", tiny, "-d", "none", "-n", "2", "-q"]) == 0
    out, err = capsys.readouterr()
    assert "/reset starts over" in err
    assert len(out.splitlines()) >= 1


def test_chat_refuses_what_generate_refuses(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "temperature" in run_error(capsys, "chat", "-t", tiny, "--temperature", "nan")
    assert "thinking" in run_error(capsys, "chat", "-t", tiny, "-q", "--thinking")


def test_chat_refuses_a_line_that_is_not_utf8_and_goes_on(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"hi\n\xff\xfe\nhi\n")
    assert main(["chat", "-t", tiny, "-d", "none", "-n", "2", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "not valid UTF-8" in err


# ------------------------------------------------------------------------------------------- streams


def hyflash_process(*argv: str, setup: str = "pass", **streams: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command line in a process of its own, after `setup`."""
    code = f"import sys; {setup}; from hyflash.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *argv], check=False, timeout=120, **streams)


def test_streams_that_the_caller_closed_are_no_fault_of_ours() -> None:
    closed = "sys.stdin = sys.stdout = None"
    done = hyflash_process("generate", setup=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"error: the prompt is empty; expected some text.\n")
    assert hyflash_process("--version", setup=closed).returncode == 0
    assert hyflash_process("generate", setup="sys.stdin = sys.stderr = None").returncode == 1


def test_text_that_the_encoding_of_stdout_lacks_does_not_end_the_run(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in (["--json"], []):
        sink = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding="ascii"))
            assert main(["generate", "-t", tiny, "-d", "none", "-n", "9", "-q", *argv, "hi"]) == 0
            sys.stdout.flush()
            text = sink.getvalue().decode("ascii")
        if argv:
            assert "\N{REPLACEMENT CHARACTER}" in json.loads(text)["text"]
        else:
            assert "?" in text


def test_terminal_with_redirected_answers_keeps_its_mark_out_of_them(tiny: str, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    os.write(ours, b"hi\n\x04")
    answers = tmp_path / "answers"
    with answers.open("wb") as out:
        done = hyflash_process("chat", "-t", tiny, "-d", "none", "-n", "2", "--json", stdin=theirs, stdout=out)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0
    assert json.loads(answers.read_text())["num_tokens"] <= 2


def test_sigterm_tidies_up_and_ends_with_143(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object, **kwargs: object) -> None:
        with hub._scratch(tmp_path / "cache", need_bytes=0):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(hub, "pull", killed)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["pull", "-q"]) == 143
    assert list((tmp_path / "cache").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------- look-ups


def test_drafters_json_lists_every_drafter_with_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "drafters", "--json")
    by_name = {entry["name"]: entry for entry in got}
    assert {"lookup", "dflash", "hyflash"} <= set(by_name)
    for entry in got:
        assert set(entry) == {
            "name",
            "summary",
            "source",
            "trainable",
            "kv_bytes_per_token",
            "state_bytes",
            "options",
        }
        assert all(set(option) == {"name", "type", "default", "help"} for option in entry["options"])
    assert by_name["hyflash"]["kv_bytes_per_token"] == 0
    assert by_name["hyflash"]["state_bytes"] > 0
    assert by_name["dflash"]["kv_bytes_per_token"] > 0
    assert by_name["lookup"]["trainable"] is False


def test_drafters_table_names_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafters"]) == 0
    assert "hyflash" in capsys.readouterr().out


def test_env_json_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "env", "--json")
    assert got["versions"]["hyflash"] == hyflash.__version__
    assert got["threads"]["num_threads"] >= 1
    assert isinstance(got["row_invariance"]["holds"], bool)
    assert {"cpu", "num_cores", "memory_bytes", "os"} <= set(got["hardware"])
    assert main(["env"]) == 0
    assert "torch" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------- data


def test_data_regenerate_inspect_and_capture_work_in_a_row(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(5)))
    banned = tmp_path / "banned.jsonl"
    banned.write_text(json.dumps({"prompt": "Question  3"}) + "\n")
    answers, shards = tmp_path / "answers.jsonl", tmp_path / "shards"
    base = ["data", "regenerate", str(prompts), "-t", tiny, "--out", str(answers), "-n", "6", "--json", "-q"]
    got = run_json(capsys, *base, "--without", str(banned))
    assert (got["num_success"], got["num_errors"], got["num_skipped"]) == (4, 0, 0)
    again = run_json(capsys, *base)
    assert (again["num_success"], again["num_skipped"]) == (1, 4)
    seen = run_json(capsys, "data", "inspect", str(answers), "--json")
    assert seen["num_answers"] == 5
    assert seen["answers_by_domain"] == {tmp_path.name: 5}
    caught = run_json(
        capsys,
        *("data", "capture", str(answers), "-t", tiny, "--taps", "0,2", "--kv-layers", "1,0"),
        *("--out", str(shards), "--json"),
    )
    assert (caught["num_examples"], caught["taps"], caught["kv_layers"]) == (5, [0, 2], [1, 0])
    assert run_json(capsys, "data", "inspect", str(shards), "--json")["num_examples"] == 5


@pytest.mark.parametrize("taps", ["0,0", "5", "-1", "a", ""])
def test_bad_taps_are_refused(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], taps: str) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"id": "a", "prompt_ids": [5], "answer_ids": [6]}) + "\n")
    run_error(capsys, "data", "capture", str(answers), "-t", tiny, f"--taps={taps}", "--out", str(tmp_path / "s"))
    rest = ("-t", tiny, "--taps", "0", f"--kv-layers={taps}", "--out", str(tmp_path / "s"))
    run_error(capsys, "data", "capture", str(answers), *rest)


def test_a_recipe_says_itself_whose_keys_and_values_are_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--recipe", "r.toml", "--kv-layers", "1", "--out", str(tmp_path / "s"))
    assert "leave --kv-layers out" in run_error(capsys, "data", "capture", "a.jsonl", *asked)


@pytest.fixture
def asked(tiny: str, tmp_path: Path) -> list[str]:
    """A regeneration of five prompts into answers.jsonl."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(5)))
    return ["data", "regenerate", str(prompts), "-t", tiny, "--out", str(tmp_path / "a" / "answers.jsonl"), "-n", "4"]


@pytest.mark.parametrize("left", [b"", b'{"id": "0123", "pro'], ids=["nothing", "half a line"])
def test_regeneration_goes_on_when_it_was_killed_before_the_first_whole_answer(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], left: bytes
) -> None:
    run_json(capsys, *asked, "--json", "-q")
    (tmp_path / "a" / "answers.jsonl").write_bytes(left)
    assert run_json(capsys, *asked, "--json", "-q")["num_success"] == 5
    assert run_json(capsys, "data", "inspect", str(tmp_path / "a" / "answers.jsonl"), "--json")["num_bad_rows"] == 0


def test_regeneration_keeps_a_whole_last_answer_without_line_end_and_drops_half_of_one(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "a" / "answers.jsonl"
    run_json(capsys, *asked, "--json", "-q")
    whole = answers.read_bytes()
    for cut, num_new in ((1, 0), (9, 1)):
        answers.write_bytes(whole[:-cut])
        got = run_json(capsys, *asked, "--json", "-q")
        assert (got["num_success"], got["num_skipped"]) == (num_new, 5 - num_new)
        seen = run_json(capsys, "data", "inspect", str(answers), "--json")
        assert (seen["num_answers"], seen["num_bad_rows"], seen["num_duplicates"]) == (5, 0, 0)
        assert sorted(answers.read_bytes().splitlines()) == sorted(whole.splitlines()), "the same answers again"


def test_regeneration_leaves_a_foreign_file_as_it_is(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    before = prompts.read_bytes()
    argv = [prompts.as_posix() if part.endswith("answers.jsonl") else part for part in asked]
    assert "no usable answer" in run_error(capsys, *argv, "-q")
    assert prompts.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_regeneration_does_not_take_answers_of_nobody_knows_whom_for_its_own(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, *asked, "--json", "-q")
    (tmp_path / "a" / "answers.jsonl.meta.json").unlink()
    before = (tmp_path / "a" / "answers.jsonl").read_bytes()
    assert "answers.jsonl.meta.json beside it, which says whose they are, is gone" in run_error(capsys, *asked, "-q")
    assert (tmp_path / "a" / "answers.jsonl").read_bytes() == before
    assert not (tmp_path / "a" / "answers.jsonl.meta.json").exists()


@pytest.mark.parametrize("side", [b"", b"[]", b"null", b"\xff", b"{"])
def test_damaged_side_file_of_a_regeneration_is_named(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], side: bytes
) -> None:
    run_json(capsys, *asked, "--json", "-q")
    (tmp_path / "a" / "answers.jsonl.meta.json").write_bytes(side)
    assert "answers.jsonl.meta.json" in run_error(capsys, *asked, "-q")


def test_regeneration_that_answers_nothing_fails_with_the_reason(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny_target_dir(tmp_path / "bare", template=None)
    asked[asked.index("-t") + 1] = str(bare)
    err = run_error(capsys, *asked, "-q")
    assert "none of the 5 prompts" in err
    assert "no chat template" in err


def test_regeneration_on_a_full_disk_says_so_and_goes_on_later(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "a" / "answers.jsonl"
    run_json(capsys, *asked, "--json", "-q")
    whole = answers.read_bytes()
    answers.unlink()
    old, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        err = run_error(capsys, *asked, "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert "answers.jsonl: no space left" in err
    assert "the answers so far are kept" in err
    got = run_json(capsys, *asked, "--json", "-q")
    assert got["num_success"] + got["num_skipped"] == 5
    assert 0 < got["num_skipped"] < 5
    assert sorted(answers.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_sampling_options_of_an_all_greedy_regeneration_are_a_warning(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, "--greedy-share", "1", "--temperature", "0.9", "-q"]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert warned == ["warning: --temperature has no effect: at --greedy-share 1 every answer is greedy"]


def test_a_warning_of_the_library_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warns(**_: object) -> None:
        warnings.simplefilter("default")
        warnings.warn("the disk is full.", stacklevel=1)

    monkeypatch.setattr(sys.modules["hyflash.cli.main"], "app", warns)
    assert main([]) == 0
    assert capsys.readouterr().err == "warning: the disk is full.\n"
