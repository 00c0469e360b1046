"""The benchmark: what it decodes, what it counts, and that a speed is printed only for equal text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import result_lines
from helpers import TINY_CONTEXT, tiny_target_dir, tiny_tokenizer
from hyflash.bench import costs, run, workloads
from hyflash.bench.workloads import Workload
from hyflash.cli import main
from hyflash.cli.flags import parse_tokens
from hyflash.core import Result, Rows, SamplingParams, TargetOutput
from hyflash.drafters import load_class
from hyflash.drafters.base import Drafter
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.errors import UserError
from hyflash.targets import hf
from hyflash.targets.hf import HFTarget
from hyflash.text import Tokenizer

ROW_FIELDS = {
    "drafter",
    "domain",
    "context",
    "tau",
    "tau_mean_of_requests",
    "tau_loop_free",
    "acceptance_by_position",
    "tokens_per_sec",
    "speedup",
    "draft_ms_per_round",
    "commit_ms_per_round",
    "computed_bytes",
    "committed_by_prompt",
    "rounds_by_prompt",
    "loop_free_committed_by_prompt",
    "loop_free_rounds_by_prompt",
    "verify_ms_per_round",
    "ttft_sec",
    "state_bytes",
    "kv_bytes_per_token",
    "exact",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_dir(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def target(path: Path) -> HFTarget:
    return hf.load(str(path))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_dir(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "hyflash-cache"))


def lookup(target: HFTarget) -> Drafter:
    method = load_class("lookup")
    return method(method.Config(), target.hooks()).eval()


def toy_workload(num_prompts: int = 3) -> Workload:
    prompts = tuple((5 + i, 6, 7, 5 + i, 6, 7, 5 + i) for i in range(num_prompts))
    return Workload(domain="toy", context=None, prompts=prompts, ids=tuple(map(str, range(num_prompts))))


# ------------------------------------------------------------------------------------------ workloads


def test_demo_has_twelve_prompts_in_three_domains() -> None:
    got = workloads.read(["demo"], limit=None)
    assert {domain: len(prompts) for domain, prompts in got.items()} == {"chat": 4, "math": 4, "code": 4}
    assert [len(p) for p in workloads.read(["demo"], limit=2).values()] == [2, 2, 2]


def test_domain_comes_from_the_file_name_and_files_add_up(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(3)))
    got = workloads.read([str(tmp_path / "alpha.jsonl"), "demo", str(tmp_path / "beta.jsonl")], limit=1)
    assert list(got) == ["alpha", "chat", "math", "code", "beta"]
    assert got["alpha"][0].messages[-1]["content"] == "alpha 0"


def test_sample_depends_on_the_seed_only(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(40)))
    first, again, other = (workloads.read([str(file)], limit=5, seed=s)["many"] for s in (1, 1, 2))
    assert [p.id for p in first] == [p.id for p in again]
    assert [p.id for p in first] != [p.id for p in other]


@pytest.mark.parametrize("context", [60, 128, 250])
def test_stretched_prompts_have_exactly_the_asked_length(tokenizer: Tokenizer, context: int) -> None:
    prompts = workloads.read(["demo"], limit=None)["math"]
    got = workloads.stretched("math", prompts, tokenizer, context=context)
    assert [len(p) for p in got.prompts] == [context] * 4
    assert got.context == context
    natural = workloads.natural("math", prompts, tokenizer)
    for long, short in zip(got.prompts, natural.prompts, strict=True):
        assert long[-30:] == short[-30:]  # the question and the template's end stand last
        assert long[:6] == short[:6]  # <|im_start|>user


def test_stretched_prompts_repeat_by_seed_and_filler_is_of_others(tokenizer: Tokenizer) -> None:
    prompts = workloads.read(["demo"], limit=None)["chat"]
    one, same, other = (workloads.stretched("chat", prompts, tokenizer, context=200, seed=s) for s in (0, 0, 1))
    assert one.prompts == same.prompts
    assert one.sha256 == same.sha256
    assert one.sha256 != other.sha256
    assert tokenizer.decode(one.prompts[0]).count("Why is the sky blue") == 1


def test_a_token_that_begins_texts_stands_at_the_beginning_of_stretched_prompts_only() -> None:
    own = tiny_tokenizer(template=None)
    begin = own.convert_tokens_to_ids("<|im_start|>")
    processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", begin)])
    own.backend_tokenizer.post_processor = processor
    tokenizer = Tokenizer(own, "toy")
    got = workloads.stretched("chat", workloads.read(["demo"], limit=None)["chat"], tokenizer, context=500)
    assert [(ids[0], ids.count(begin)) for ids in got.prompts] == [(begin, 1)] * 4


def test_context_shorter_than_the_template_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="template alone"):
        workloads.stretched("chat", workloads.read(["demo"], limit=1)["chat"], tokenizer, context=3)


@pytest.mark.parametrize(("text", "expected"), [("512", 512), ("2k", 2048), ("8K", 8192), (" 1.5k ", 1536)])
def test_context_counts_are_read(text: str, expected: int) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "1.5", "nan", "inf", "2m"])
def test_bad_context_counts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a token count"):
        parse_tokens(text)


# ----------------------------------------------------------------------------------------------- runs


def test_timed_run_is_exact_and_counts_every_token(target: HFTarget) -> None:
    plain = Engine(target, max_rows=1)
    engine = Engine(target, lookup(target), policy=FixedLength(3), max_rows=1)
    seen: list[tuple[int, int]] = []
    (row,) = run.timed(
        plain,
        [("lookup", engine)],
        [toy_workload()],
        SamplingParams(max_tokens=20),
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert row.exact is True
    assert row.forks == ()
    assert row.acceptance.num_tokens == sum(len(r.token_ids) for r in row.results)
    assert row.tokens_per_sec is not None
    assert row.speedup is not None
    assert row.speedup.p10 <= row.speedup.median <= row.speedup.p90
    assert seen == [(i, 6) for i in range(1, 7)]


def test_rounds_are_split_into_drafting_and_verifying(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("hyflash.engine.decode.time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))
    engine = Engine(target, lookup(target), policy=FixedLength(3), max_rows=1)
    (row,) = run.timed(
        Engine(target, max_rows=1), [("lookup", engine)], [toy_workload()], SamplingParams(max_tokens=20)
    )
    # The clock is read once each round between proposal and forward, between forward and verdict, around the commit.
    assert row.draft_ms_per_round == pytest.approx(2.0)
    assert row.commit_ms_per_round == pytest.approx(1.0)
    assert row.verify_ms_per_round == pytest.approx(1.0)


def test_acceptance_only_gives_the_same_acceptance_and_no_speed(target: HFTarget) -> None:
    drafter, params = lookup(target), SamplingParams(max_tokens=20, ignore_eos=True)
    engine = Engine(target, drafter, policy=FixedLength(3), max_rows=1)
    (slow,) = run.timed(Engine(target, max_rows=1), [("lookup", engine)], [toy_workload()], params)
    (fast,) = run.acceptance_only(Engine(target), [("lookup", drafter)], [toy_workload()], params, num_draft_tokens=3)
    assert fast.acceptance == slow.acceptance
    assert (fast.exact, fast.tokens_per_sec, fast.speedup, fast.ttft_sec) == (None, None, None, None)
    assert (fast.draft_ms_per_round, fast.verify_ms_per_round) == (None, None)


def test_speed_is_withheld_when_one_answer_differs(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(target, max_rows=1)
    engine = Engine(target, lookup(target), policy=FixedLength(3), max_rows=1)
    honest = engine.generate

    def lying(requests: Any) -> list[Result]:
        from dataclasses import replace

        return [
            replace(r, token_ids=(*r.token_ids[:-1], (r.token_ids[-1] + 1) % 260)) if r.prompt_ids[0] == 6 else r
            for r in honest(requests)
        ]

    monkeypatch.setattr(engine, "generate", lying)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (row,) = run.timed(plain, [("lookup", engine)], [toy_workload()], params)
    assert row.exact is False
    assert row.tokens_per_sec is None
    assert row.speedup is None
    (fork,) = row.forks
    assert (fork.prompt_id, fork.index) == ("1", 7)
    assert fork.margin > 0
    assert row.acceptance.num_tokens == 24  # acceptance is still told


@pytest.mark.parametrize("exact", ["recheck", "off"])
def test_drafters_that_decode_in_earnest_are_as_exact_as_asked(
    target: HFTarget, exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []

    def engine(*args: Any, **options: Any) -> Engine:
        made.append(Engine(*args, **options))
        return made[-1]

    monkeypatch.setattr(run, "Engine", engine)
    recycle = load_class("recycle")(load_class("recycle").Config(), target.hooks())
    params = SamplingParams(max_tokens=4)
    plain = Engine(target, exact=exact)
    run.acceptance_only(plain, [("recycle", recycle)], [toy_workload()], params, num_draft_tokens=3)
    assert [engine.exactness for engine in made] == [exact]


def test_drafter_hash_follows_options_and_weights(target: HFTarget) -> None:
    method = load_class("dflash")
    torch.manual_seed(0)
    one = method(method.Config.tiny(), target.hooks())
    torch.manual_seed(0)
    same = method(method.Config.tiny(), target.hooks())
    assert run.drafter_sha256(one) == run.drafter_sha256(same)
    with torch.no_grad():
        next(same.parameters()).view(-1)[0] += 1
    assert run.drafter_sha256(one) != run.drafter_sha256(same)
    assert run.drafter_sha256(lookup(target)) != run.drafter_sha256(one)


def test_differences_are_paired_against_the_first_drafter(target: HFTarget) -> None:
    drafters = [("a", lookup(target)), ("b", lookup(target))]
    rows = run.acceptance_only(
        Engine(target), drafters, [toy_workload()], SamplingParams(max_tokens=12), num_draft_tokens=3
    )
    (got,) = run.differences(rows)
    assert (got["drafter"], got["against"], got["tau_difference"], got["interval"]) == ("b", "a", 0.0, [0.0, 0.0])


# ---------------------------------------------------------------------------------------------- costs


def test_costs_are_relative_to_width_one_and_leave_no_sequence_open(target: HFTarget) -> None:
    table = costs.measure(target, widths=(2, 4), context_tokens=16, num_repeats=3)
    assert list(table.seconds) == [1, 2, 4]
    assert table.relative[1] == 1.0
    assert target.kv_bytes() == 0


def test_costs_fit_into_a_short_context(target: HFTarget) -> None:
    table = costs.measure(target, widths=(16,), context_tokens=10 * TINY_CONTEXT, num_repeats=2)
    assert table.context_tokens == TINY_CONTEXT - 16


def test_costs_refuse_a_width_of_zero(target: HFTarget) -> None:
    with pytest.raises(UserError, match="widths"):
        costs.measure(target, widths=(0, 1))


def test_costs_are_measured_once_and_a_damaged_cache_is_measured_again(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path))
    first = costs.measured(target)
    monkeypatch.setattr(costs, "measure", lambda target: pytest.fail("measured twice"))
    assert costs.measured(target) == first
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text("{")
    monkeypatch.undo()
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path))
    assert costs.measured(target).seconds.keys() == first.seconds.keys()
    assert json.loads(file.read_text())["seconds"]


def test_costs_without_a_writable_cache_still_work(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYFLASH_CACHE", str(tmp_path / "file"))
    assert 1 in costs.measured(target).seconds


# -------------------------------------------------------------------------------------------- command


def bench_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code = main(["bench", *argv, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_bench_json_has_the_fields_of_the_contract(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    argv = ["-t", str(path), "-d", "lookup", "--limit", "1", "-n", "8", "--context", "60,100", "--out", str(out)]
    argv += ["--length", "fixed"]  # which alone gives the same tau each time
    got = bench_json(capsys, *argv)
    assert {"target", "settings", "provenance", "results"} <= set(got)
    assert len(got["results"]) == 6
    for row in got["results"]:
        assert set(row) >= ROW_FIELDS
        assert row["exact"] is True
        assert row["tokens_per_sec"] > 0
    assert {row["context"] for row in got["results"]} == {60, 100}
    provenance = got["provenance"]
    assert {"argv", "versions", "git_commit", "hardware", "threads", "target_fingerprint"} <= set(provenance)
    assert set(provenance["drafters_sha256"]) == {"lookup"}
    assert got["settings"]["max_tokens"] == 8
    bench_json(capsys, *argv)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2
    taus = [[row["tau"] for row in line["results"]] for line in lines]
    assert lines[0]["provenance"]["prompts_sha256"] == lines[1]["provenance"]["prompts_sha256"]
    assert taus[0] == taus[1]


def test_earlier_run_is_compared_with_what_was_unequal_first(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    argv = ["-t", str(path), "-d", "lookup", "--limit", "1", "--length", "fixed", "--out", str(out)]
    bench_json(capsys, *argv, "-n", "8")
    got = bench_json(capsys, *argv, "-n", "8", "--against", str(out))["against"]
    assert got["unequal"] == []
    assert len(got["changes"]) == 3
    got = bench_json(capsys, *argv, "-n", "6", "--against", str(out))["against"]
    assert got["unequal"] == ["settings.max_tokens was 8, is 6"]
    assert main(["bench", *argv, "-n", "4", "--against", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.index("unequal: settings.max_tokens was 6, is 4") < text.index("changes: lookup chat")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"nonsense\n", b"[1]\n", b'{"results": 3}\n', b'{"results": [], "differences": []}\n',
     json.dumps(result_lines.costs()).encode()],
)  # fmt: skip
def test_results_file_that_is_none_is_refused_before_the_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(content)
    assert main(["bench", "-t", str(path / "not-looked-for-yet"), "-d", "lookup", "--against", str(file)]) == 1
    err = capsys.readouterr().err
    assert str(file) in err
    assert "expected" in err


def test_fixed_length_runs_repeat_their_acceptance(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-t", str(path), "-d", "lookup", "--limit", "2", "-n", "16", "--length", "fixed", "--temperature", "0.7"]
    first, second = (bench_json(capsys, *argv)["results"] for _ in range(2))
    assert [row["tau"] for row in first] == [row["tau"] for row in second]
    assert all(row["exact"] for row in first)


def test_acceptance_only_command_has_null_speeds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = bench_json(
        capsys, "-t", str(path), "-d", "lookup", "-d", "dflash", "--limit", "1", "-n", "8", "--acceptance-only"
    )
    assert all(row["tokens_per_sec"] is None and row["speedup"] is None for row in got["results"])
    assert got["settings"]["length"] == "fixed"
    assert len(got["differences"]) == 3


def test_context_beyond_the_target_is_cut_and_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-t", str(path), "-d", "lookup", "-d", "ngram", "--limit", "1", "-n", "8", "--acceptance-only"]
    got = bench_json(capsys, *argv, "--context", "8k,4k,100")
    rows = [(row["domain"], row["prompt_tokens_median"]) for row in got["results"] if row["drafter"] == "lookup"]
    assert rows == [(domain, length) for domain in ("chat", "math", "code") for length in (TINY_CONTEXT - 8, 100)]
    assert {(one["drafter"], one["against"]) for one in got["differences"]} == {("ngram", "lookup")}
    assert ["8192 tokens were cut to 248" in got["warnings"][0], "4096 tokens" in got["warnings"][1]] == [True, True]


def test_prompts_named_twice_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-t", str(path), "-d", "lookup", "--prompts", "demo", "--prompts", "demo"]) == 1
    assert "prompts demo are named twice" in capsys.readouterr().err


def test_bench_table_is_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-t", str(path), "-d", "lookup", "--limit", "1", "-n", "4"]) == 0
    out = capsys.readouterr().out
    assert "passed" in out
    assert "tok/s" in out


def test_target_that_fails_stops_the_bench_with_a_sentence(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = HFTarget.forward

    def broken(self: HFTarget, rows: Rows) -> TargetOutput:
        out = forward(self, rows)
        if out.logits is not None and self.length(rows.seqs[0]) > 80:
            out.logits.fill_(float("nan"))
        return out

    monkeypatch.setattr(HFTarget, "forward", broken)
    asked = ["bench", "-t", str(path), "--backend", "torch", "-d", "lookup", "--limit", "1", "-n", "4"]
    assert main([*asked, "--length", "fixed"]) == 1
    assert "non-finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--acceptance-only", "--num-draft-tokens", "0"], "num_draft_tokens is 0"),
        (["--acceptance-only", "--num-draft-tokens", "9999"], "at most"),
        (["--context", ""], "not a token count"),
        (["--context", "64", "-n", "256"], "no context has room"),
    ],
    ids=str,
)
def test_numbers_that_would_be_ignored_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert main(["bench", "-t", str(path), "-d", "lookup", "--limit", "1", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_prompt_that_does_not_fit_is_named_before_anything_is_decoded(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "x" * TINY_CONTEXT}) + "\n")
    assert main(["bench", "-t", str(path), "-d", "lookup", "--prompts", str(prompts)]) == 1
    assert f"holds {TINY_CONTEXT}" in capsys.readouterr().err


def test_results_that_cannot_be_kept_are_shown_all_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "-t", str(path), "-d", "lookup", "--limit", "1", "-n", "4", "--length", "fixed", "--json"]
    assert main([*argv, "--out", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)["results"]) == 3
    assert "/dev/full: the results could not be kept there" in err
