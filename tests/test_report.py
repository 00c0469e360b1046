"""Reports: every number is that of its line, every kind of line has its place, and bad input leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import result_lines as made
from hyflash.bench.report import groups, lines, make
from hyflash.bench.report.page import Chart, Report, Table
from hyflash.cli import main
from hyflash.errors import UserError

RESULTS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.jsonl"))
EVERY_KIND: dict[str, Any] = {
    "acceptance": made.bench(made.bench_row(), made.bench_row("other")),
    "speed": made.bench(made.timed_row(), made.timed_row("other", "math")),
    "contexts": made.bench(*(made.timed_row(context=c) for c in (512, 2048))),
    "costs": made.costs(),
    "exactness": made.sweep(),
    "exactness of one target": made.sweep(family=None),
    "draft pass": made.draft_pass(),
    "length policies": made.length_policies(),
    "perplexity": made.perplexity(),
}


def report_of(tmp_path: Path, *values: Any) -> Report:
    return make.gather(lines.read([made.write(tmp_path / "results.jsonl", *values)]))


def markdown_of(tmp_path: Path, *values: Any) -> str:
    path = made.write(tmp_path / "results.jsonl", *values)
    return make.render([path], ["md"])["report.md"].decode()


def tables(report: Report, anchor: str) -> dict[str, Table]:
    section = next(s for s in report.sections if s.anchor == anchor)
    return {block.caption: block for block in section.blocks if isinstance(block, Table)}


def as_dicts(table: Table) -> list[dict[str, str]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def run_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["report", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


class Page(HTMLParser):
    """Links, ids and text of a page, and whether its elements are closed in order."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "data", "poster")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# ------------------------------------------------------------------------------------- what stands in it


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_every_line_of_our_own_results_has_its_provenance(path: Path) -> None:
    report = make.gather(lines.read([path]))
    rows = as_dicts(tables(report, "provenance")["Runs"])
    values = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["line"] for row in rows] == [f"{path}:{n}" for n in range(1, len(values) + 1)]
    assert [row["time (UTC)"] for row in rows] == [value["provenance"]["time_utc"] for value in values]
    assert len(report.sections) >= 2


def test_our_own_acceptance_stands_in_the_table_and_lookup_once() -> None:
    path = next(p for p in RESULTS if p.stem.startswith("acceptance"))
    got = as_dicts(
        tables(make.gather(lines.read([path])), "acceptance")["Tau by domain; the mean counts every domain alike"]
    )
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for row in json.loads(line)["results"]:
            (cells,) = [c for c in got if c["drafter"] == row["drafter"] and str(number) in c["runs"].split(", ")]
            low, high = row["tau_interval"]
            assert cells[f"{row['domain']}: tau [95 %]"] == f"{row['tau']:.3f} [{low:.2f}, {high:.2f}]"
            assert cells[f"{row['domain']}: loop-free"] == f"{row['tau_loop_free']:.3f}"
    assert [c["runs"] for c in got if c["drafter"] == "lookup"] == ["1, 2, 3"]


def test_length_policies_are_held_against_the_best_fixed_length(tmp_path: Path) -> None:
    got = as_dicts(tables(report_of(tmp_path, made.length_policies()), "lengths")["Length policies, per cent"])
    assert got == [
        {
            "trace": "chat, batch 1",
            "best": "1",
            "tokens/s": "100.0",
            "phases": "+1.0",
            "nightjar": "-1.0",
            "adaptive": "-5.0",
        }
    ]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_of_line_renders_in_every_format(kind: str, tmp_path: Path) -> None:
    path = made.write(tmp_path / "one.jsonl", EVERY_KIND[kind])
    files = make.render([path], make.FORMATS)
    assert {"report.md", "report.html"} <= set(files)
    markdown = files["report.md"].decode()
    drawn = set(re.findall(r"\]\((plots/[^)]*)\)", markdown))
    assert drawn == {name for name in files if name.endswith(".png")}
    assert all(files[name].startswith(b"\x89PNG") for name in drawn)
    page = Page(files["report.html"].decode())
    assert files["report.html"].count(b"<svg") == sum(len(c.panels) for c in make.gather(lines.read([path])).charts)
    assert "2026-01-02T03:04:05+00:00" in page.text
    assert "2026-01-02T03:04:05+00:00" in markdown


def test_numbers_of_a_speed_row_are_those_of_the_line(tmp_path: Path) -> None:
    (table,) = tables(report_of(tmp_path, made.bench(made.timed_row())), "speed").values()
    (row,) = as_dicts(table)
    assert row["tokens/s [10 %, 90 %]"] == "20.0 [18.0, 25.0]"
    assert row["speed-up [10 %, 90 %]"] == "2.00 [1.80, 2.50]"
    assert (row["draft, ms"], row["verify, ms"]) == ("7.65", "54.32")
    assert (row["most held, bytes"], row["equal to plain"]) == ("1,234,567", "yes")


def test_lines_from_before_the_parts_of_a_round_were_measured_leave_those_columns_out(tmp_path: Path) -> None:
    old = made.timed_row()
    del old["draft_ms_per_round"], old["verify_ms_per_round"]
    (table,) = tables(report_of(tmp_path, made.bench(old)), "speed").values()
    assert not {"draft, ms", "verify, ms"} & {column.name for column in table.columns}


def test_one_prompt_has_no_interval(tmp_path: Path) -> None:
    report = report_of(tmp_path, made.bench(made.timed_row(num_prompts=1)))
    (row,) = as_dicts(next(iter(tables(report, "speed").values())))
    assert row["speed-up [10 %, 90 %]"] == "2.00"
    points = [p for chart in report.charts for panel in chart.panels for s in panel.series for p in s.points]
    assert points
    assert all(p.low is None and p.high is None for p in points)


def test_answers_that_differ_have_no_speed_and_are_listed(tmp_path: Path) -> None:
    forks = [{"prompt_id": "q7", "index": 31, "margin": 0.00123}]
    row = made.timed_row(exact=False, forks=forks, tokens_per_sec=None, speedup=None)
    got = tables(report_of(tmp_path, made.bench(row)), "speed")
    (listed,) = as_dicts(got["Answers that differ from plain decoding"])
    assert (listed["prompt"], listed["token"], listed["margin of the best two logits"]) == ("q7", "31", "0.0012")
    (speeds,) = as_dicts(next(iter(got.values())))
    assert speeds["equal to plain"] == "no: 1 of 3 differ"
    assert "tokens/s [10 %, 90 %]" not in speeds


def test_stretched_prompts_stand_in_contexts_and_not_among_natural_ones(tmp_path: Path) -> None:
    report = report_of(tmp_path, EVERY_KIND["contexts"])
    assert [section.anchor for section in report.sections] == ["contexts", "provenance"]
    (table,) = tables(report, "contexts").values()
    assert [row["context"] for row in as_dicts(table)] == ["512", "2,048"]
    charts = {chart.name: chart for chart in report.charts}
    assert set(charts) == {"contexts-1-tau", "contexts-1-speed", "contexts-1-bytes"}
    (panel,) = charts["contexts-1-tau"].panels
    assert [(p.x, p.y, p.low, p.high) for p in panel.series[0].points] == [
        (512, 1.23456, 1.1111, 1.9999),
        (2048, 1.23456, 1.1111, 1.9999),
    ]


def test_costs_show_floors_and_c_of_q(tmp_path: Path) -> None:
    report = report_of(tmp_path, made.costs())
    rows = as_dicts(tables(report, "costs")["Forwards"])
    assert rows[2] == {
        "context": "128",
        "engine": "ours",
        "weights": "Q8_0",
        "width": "8",
        "median, ms": "32.00",
        "fastest, ms": "4.00",
        "floor, ms": "3.20",
        "over floor": "10.00",
        "c(q)": "8.00",
        "ms per row": "4.00",
    }
    times = report.charts[0].panels[0]
    assert [(s.label, s.is_reference) for s in times.series] == [
        ("ours Q8_0", False),
        ("theirs Q8_0", False),
        ("floor", True),
    ]


def test_engines_with_other_floors_have_a_line_each(tmp_path: Path) -> None:
    line = made.costs()
    for row in line["results"]:
        row["floor_ms"] = 5.0 if row["engine"] == "theirs" else 3.2
    labels = [s.label for s in report_of(tmp_path, line).charts[0].panels[0].series if s.is_reference]
    assert labels == ["floor of ours Q8_0", "floor of theirs Q8_0"]


def test_exactness_adds_up_over_lines_and_lists_forks(tmp_path: Path) -> None:
    report = report_of(tmp_path, made.sweep(), made.sweep(forks=2, note="another run"), made.sweep(family=None))
    got = tables(report, "exactness")
    assert [(r["model"], r["texts"], r["rechecks"], r["forks"], r["runs"]) for r in as_dicts(got["By model"])] == [
        ("tiny llama", "100", "14", "2", "1, 2"),
        ("toy", "50", "7", "0", "3"),
    ]
    assert [(r["prompt"], r["token"], r["runs"]) for r in as_dicts(got["Texts that differ"])] == [
        ("0", "12", "2"),
        ("1", "12", "2"),
    ]
    assert "2 differ" in markdown_of(tmp_path, made.sweep(forks=2))
    assert "all are identical" in markdown_of(tmp_path, made.sweep())


def test_warnings_commands_and_commits_close_the_report(tmp_path: Path) -> None:
    text = markdown_of(tmp_path, made.costs(provenance=made.provenance(argv=["hyflash", "bench", "-t", "my model"])))
    assert "Run 1: context 8192 was cut to 128." in text
    assert "hyflash bench -t 'my model'" in text
    assert "0123456789ab+dirty" in text


# ------------------------------------------------------------------------------- what may share a table


def test_acceptance_runs_with_equal_settings_share_a_table(tmp_path: Path) -> None:
    one, two = made.bench(made.bench_row()), made.bench(made.bench_row(), made.bench_row("other"))
    path = made.write(tmp_path / "r.jsonl", one, two)
    (group,) = groups.group(lines.read([path]))
    assert [(entry.label, entry.runs) for entry in group.entries] == [("lookup", [1, 2]), ("other", [2])]


@pytest.mark.parametrize("change", [{"max_tokens": 64}, {"num_draft_tokens": 3}, {"temperature": 0.7}], ids=str)
def test_acceptance_runs_with_other_settings_stand_apart(change: dict[str, Any], tmp_path: Path) -> None:
    one = made.bench(made.bench_row())
    path = made.write(tmp_path / "r.jsonl", one, {**one, "settings": one["settings"] | change})
    assert len(groups.group(lines.read([path]))) == 2


def test_timed_runs_stand_apart(tmp_path: Path) -> None:
    one = made.bench(made.timed_row())
    path = made.write(tmp_path / "r.jsonl", one, {**one, "provenance": made.provenance(time_utc="later")})
    assert [group.title[-7:] for group in groups.group(lines.read([path]))] == ["(run 1)", "(run 2)"]


def test_other_weights_under_one_name_are_told_apart(tmp_path: Path) -> None:
    one = made.bench(made.bench_row("mine"))
    other = made.bench(made.bench_row("mine", tau=2.0), provenance=made.provenance(drafters_sha256={"mine": "new"}))
    path = made.write(tmp_path / "r.jsonl", one, other)
    (group,) = groups.group(lines.read([path]))
    assert [entry.label for entry in group.entries] == ["mine (run 1)", "mine (run 2)"]


def test_other_prompts_under_one_domain_are_told_apart(tmp_path: Path) -> None:
    one = made.bench(made.bench_row(), made.bench_row("other"))
    two = made.bench(made.bench_row(prompts_sha256="beefcafe"), made.bench_row("other", prompts_sha256="beefcafe"))
    two["differences"][0]["tau_difference"] = 0.1
    got = tables(report_of(tmp_path, one, two), "acceptance")
    (row,) = as_dicts(got["Paired differences of tau [95 %]"])
    assert row["chat (prompts hash o)"].startswith("+0.432")
    assert row["chat (prompts beefca)"].startswith("+0.100")


def test_a_mean_needs_all_domains(tmp_path: Path) -> None:
    rows = [made.bench_row(domain="chat", tau=1.0), made.bench_row(domain="math", tau=2.0), made.bench_row("other")]
    table = tables(report_of(tmp_path, made.bench(*rows)), "acceptance")[
        "Tau by domain; the mean counts every domain alike"
    ]
    assert [row["mean tau"] for row in as_dicts(table)] == ["1.500", "-"]


def test_many_drafters_become_panels_and_few_become_lines(tmp_path: Path) -> None:
    def positions(num: int) -> Chart:
        rows = [made.bench_row(f"d{i}", domain) for i in range(num) for domain in ("chat", "math")]
        return next(c for c in report_of(tmp_path, made.bench(*rows)).charts if c.name.endswith("positions"))

    assert [panel.title for panel in positions(2).panels] == ["chat", "math"]
    assert [panel.title for panel in positions(8).panels] == [f"d{i}" for i in range(8)]


def test_positions_judged_a_few_times_are_in_the_table_and_not_in_the_chart(tmp_path: Path) -> None:
    report = report_of(tmp_path, made.bench(made.bench_row(num_judged_by_position=[1000, 19])))
    chart = next(c for c in report.charts if c.name.endswith("positions"))
    assert [p.x for p in chart.panels[0].series[0].points] == [1]
    rows = as_dicts(tables(report, "acceptance")["Rounds, and acceptance rate by position (how many were judged)"])
    assert (rows[0]["position 1"], rows[0]["position 2"]) == ("0.500 (1,000)", "0.250 (19)")


# --------------------------------------------------------------------------------- how it is written


def test_the_page_needs_nothing_else_and_its_anchors_lead_somewhere(tmp_path: Path) -> None:
    path = made.write(tmp_path / "r.jsonl", *EVERY_KIND.values())
    page = Page(make.render([path], ["html"])["report.html"].decode())
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "img", "iframe", "object"} & page.tags


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    name = '<b>a|b</b> & $x$ `c` *d* "e"</svg><script>alert(1)</script>'
    value = made.bench(made.bench_row(name), made.bench_row("lookup"), target=name)
    files = make.render([made.write(tmp_path / "r.jsonl", value)], make.FORMATS)
    text = files["report.html"].decode()
    page = Page(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert name in page.text
    assert len(re.findall(re.escape("&lt;b&gt;a|b&lt;/b&gt; &amp; $x$"), text)) >= 3
    markdown = files["report.md"].decode()
    cells = next(line for line in markdown.splitlines() if line.startswith(r"| \<b\>a\|b"))
    assert r"\</svg\>\<script\>" in cells
    assert len(re.findall(r"(?<!\\)\|", cells)) == 5  # around drafter, tau, loop-free and runs


def test_a_command_cannot_end_its_listing(tmp_path: Path) -> None:
    value = made.bench(made.bench_row(), provenance=made.provenance(argv=["hyflash", "bench", "```\n# not a title"]))
    text = markdown_of(tmp_path, value)
    assert "````sh\n# run 1\n" in text
    assert "# not a title'\n````" in text


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    path = made.write(tmp_path / "r.jsonl", EVERY_KIND["acceptance"], EVERY_KIND["costs"])
    first = make.render([path], make.FORMATS)
    code = (
        "import sys, hashlib; from pathlib import Path; from hyflash.bench.report import make\n"
        "files = make.render([Path(sys.argv[1])], make.FORMATS)\n"
        "print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())"
    )
    taste = tmp_path / "matplotlibrc"
    taste.write_text("axes.facecolor: red\nfont.size: 30\n")
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(taste)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == hashlib.sha256(repr(sorted(first.items())).encode()).hexdigest()


def test_markdown_alone_names_no_plots_and_loads_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    path = made.write(tmp_path / "r.jsonl", *EVERY_KIND.values())
    code = (
        "import sys; from hyflash.cli import main\n"
        "code = main(['report', sys.argv[1], '--out', sys.argv[2], '--format', 'md'])\n"
        "sys.exit(code or str({'torch', 'matplotlib', 'numpy'} & set(sys.modules) or ''))"
    )
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", code, str(path), str(out)], capture_output=True, text=True)
    assert done.stderr.strip() == ""
    assert [p.name for p in out.iterdir()] == ["report.md"]
    assert "plots/" not in (out / "report.md").read_text()


# ------------------------------------------------------------------------------------- files and errors


def test_files_and_lines_are_merged_and_equal_ones_count_once(tmp_path: Path) -> None:
    first = made.write(tmp_path / "a" / "costs.jsonl", made.costs())
    same_name = made.write(tmp_path / "b" / "costs.jsonl", made.costs(threads=1), made.costs())
    runs = lines.read([first, same_name, tmp_path / "a" / ".." / "a" / "costs.jsonl"])
    assert [(run.number, run.source) for run in runs] == [(1, f"{first}:1"), (2, f"{same_name}:1")]
    names = [chart.name for chart in make.gather(runs).charts]
    assert len(names) == len(set(names)) == 4


def test_one_object_over_many_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps(made.costs(), indent=2))
    assert [run.source for run in lines.read([path])] == [f"{path}:1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["bad.jsonl: empty", "expected lines of `hyflash bench --json`"]),
        (b" \n\n", ["bad.jsonl: empty"]),
        (b"{}\n", ["bad.jsonl:1: an object with nothing"]),
        (b'{"text": "hi", "token_ids": []}\n', ["bad.jsonl:1: an object with text, token_ids", "is no kind of result"]),
        (b"[1]\n", ["bad.jsonl:1: no object"]),
        (b"nonsense\n", ["bad.jsonl:1: no JSON", "(character 1: Expecting value)"]),
        (b"\xff\xfe\n", ["bad.jsonl: not UTF-8 (byte 0)"]),
        (json.dumps(made.costs(target="\ud800")).encode(), ["bad.jsonl:1: no JSON in valid Unicode"]),
        (json.dumps(made.bench(made.bench_row(tau="much"))).encode(), ["results.0.tau is 'much'", "`hyflash bench`"]),
        (json.dumps(made.bench(made.bench_row(tau=float("nan")))).encode(), ["results.0.tau is nan", "finite"]),
        (json.dumps(made.costs(results=[])).encode(), ["bad.jsonl:1: results is []", "`hyflash bench --costs`"]),
        (json.dumps(made.bench(made.bench_row(num_judged_by_position=[1]))).encode(), ["has 2 values", "position 1"]),
        (json.dumps(made.costs() | {"threads": 10**20}).encode(), ["threads is beyond any count"]),
        (json.dumps(made.bench(made.bench_row(), made.bench_row("b")) | {"results": [made.bench_row()]}).encode(),
         ["bad.jsonl:1: the line is", "differences name 'b', of which there is no result"]),
    ],
    ids=["empty", "blank", "no fields", "generate", "array", "text", "bytes", "surrogate", "word", "NaN", "no rows",
         "lengths", "huge", "differences"],
)  # fmt: skip
def test_a_file_that_holds_no_results_is_refused_and_nothing_is_written(
    content: bytes, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = made.write(tmp_path / "good.jsonl", made.costs()), tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    err = run_error(capsys, str(good), str(bad), "--out", str(tmp_path / "out"))
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()


def test_the_error_names_the_line(tmp_path: Path) -> None:
    path = made.write(tmp_path / "r.jsonl", made.costs(), {"who": "knows"})
    with pytest.raises(UserError, match=r"r\.jsonl:2: an object with who is no kind of result"):
        lines.read([path])


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    line = made.sweep()
    del line["results"][0]["forks"]
    with pytest.raises(UserError, match=r"r\.jsonl:1: results\.0\.forks: Field required; .*exactness_sweep\.py"):
        lines.read([made.write(tmp_path / "r.jsonl", line)])


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_a_file_that_cannot_be_read_is_named(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "input"
    if what == "folder":
        path.mkdir()
    assert f"{path}: cannot be read" in run_error(capsys, str(path), "--out", str(tmp_path / "out"))


def test_missing_matplotlib_says_what_to_install_and_markdown_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path, out = made.write(tmp_path / "r.jsonl", made.costs()), tmp_path / "out"
    err = run_error(capsys, str(path), "--out", str(out))
    assert "pip install 'hyflash[report]'" in err
    assert "--format md" in err
    assert not out.exists()
    assert main(["report", str(path), "--out", str(out), "--format", "md"]) == 0


def test_an_earlier_report_is_replaced_with_all_its_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "deep" / "out"
    made.write(path, made.bench(made.bench_row()))
    assert main(["report", str(path), "--out", str(out)]) == 0
    before = {p.name for p in (out / "plots").iterdir()}
    made.write(path, made.costs())
    capsys.readouterr()
    assert main(["report", str(path), "--out", str(out), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    after = {p.name for p in (out / "plots").iterdir()}
    assert before == {"acceptance-1.png", "acceptance-1-positions.png"}
    assert after == {"costs-1-ms.png", "costs-1-relative.png"}
    assert sorted(files) == sorted(str(p) for p in out.rglob("*") if p.is_file())
    assert main(["report", str(path), "--out", str(out), "--format", "md"]) == 0
    assert [p.name for p in out.iterdir()] == ["report.md"]


@pytest.mark.parametrize("name", ["notes.txt", "report.md", "plots/mine.png", ".hidden"])
def test_a_folder_with_other_things_is_left_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = made.write(tmp_path / "r.jsonl", made.costs()), tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    err = run_error(capsys, str(path), "--out", str(out))
    assert f"holds {name}, which is no part of a report" in err
    assert [p for p in out.rglob("*") if p.is_file()] == [out / name]
    assert (out / name).read_text() == "precious"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made.write(tmp_path / "r.jsonl", made.costs())
    assert "is a file; expected a folder" in run_error(capsys, str(path), "--out", str(path))


def test_an_empty_folder_is_used_and_a_failure_while_writing_leaves_it_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    honest = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "second":
            raise OSError(28, "No space left on device")
        return honest(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        make.write({"first": b"1", "second": b"2"}, out)
    assert list(out.iterdir()) == []
    monkeypatch.undo()
    make.write({"first": b"1", "plots/second": b"2"}, out)
    assert sorted(p.name for p in out.rglob("*")) == ["first", "plots", "second"]


def test_results_without_a_chart_are_refused_as_plots_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made.write(tmp_path / "r.jsonl", made.sweep())
    assert "nothing to plot" in run_error(capsys, str(path), "--out", str(tmp_path / "out"), "--format", "png")


def test_an_unknown_format_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made.write(tmp_path / "r.jsonl", made.costs())
    err = run_error(capsys, str(path), "--out", str(tmp_path / "out"), "--format", "md,htm")
    assert "format 'htm' is none; expected some of md,png,html. Did you mean 'html'?" in err
