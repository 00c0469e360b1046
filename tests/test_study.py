"""The long-context study's plan, its stages and its tables (`benchmarks/study*.py`), without a model."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import study
import study_report
from study_plan import keep_plan, read_plan

from hyflash.data.prompts import load_prompts
from hyflash.errors import UserError

TOML = (Path(study.__file__).parent / "study.toml").read_text(encoding="utf-8")
SMALL = """
target = "smollm2-135m"
contexts = [512, 1024]
answer_tokens = 32
draft_tokens = 5
short_prompts = 4
long_prompts = 4
per_kind = 2
tune_prompts = 2
per_cell = 2
base = "full"
capture = "recipes/smol-hspec.toml"
training = ["train.steps=2", "train.max_sec=0"]

[[arm]]
name = "full"
recipe = "recipes/smol-dflash.toml"
seeds = [0, 1]

[[arm]]
name = "window"
recipe = "recipes/smol-window.toml"

[[arm]]
name = "fold"
over = "fold:full"
"""


def plan_of(tmp_path, text=SMALL):
    path = tmp_path / "study.toml"
    path.write_text(text, encoding="utf-8")
    return read_plan(path, tmp_path, tmp_path / "out")


def test_the_shipped_plan_is_valid(tmp_path):
    plan = plan_of(tmp_path, TOML)
    assert [arm.name for arm in plan.arms] == [arm["name"] for arm in tomllib.loads(TOML)["arm"]]
    assert plan.drafters()["fold-1-1"] == f"fold:{plan.out / 'dflash-1-1' / 'best'}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('target = "smollm2-135m"\n', "", "target is missing"),
        ("contexts =", "context =", "unknown option 'context'. Did you mean 'contexts'?"),
        ("contexts = [512, 1024]", "contexts = 512", "contexts is 512"),
        ("contexts = [512, 1024]", "contexts = [64]", "has no room for 32"),
        ('over = "fold:full"', 'ovr = "fold:full"', "arm fold: unknown option 'ovr'. Did you mean 'over'?"),
        ('over = "fold:full"', "", "arm fold: expected either recipe or over, found neither"),
        ('over = "fold:full"', 'over = "fold:full"\nrecipe = "recipes/smol-window.toml"', "found both"),
        ('over = "fold:full"', 'over = "fold:ful"', "over is 'fold:ful'"),
        ('over = "fold:full"', 'over = "full"', "over is 'full'"),
        ('over = "fold:full"', 'over = "fold:full"\nseeds = [2]', "seeds full has been trained with, [0, 1]"),
        ('over = "fold:full"', 'over = "fold:full"\noptions = ["drafter.window=1"]', "has no options"),
        ("recipes/smol-window.toml", "recipes/nope.toml", "nope.toml: cannot be read"),
        ("train.steps=2", "train.stps=2", "unknown option 'stps'. Did you mean 'steps'?"),
        ('base = "full"', 'base = "ful"', "base is 'ful', which is no arm. Did you mean 'full'?"),
        ('name = "window"', 'name = "full"', "two arms have the same name"),
        ('name = "window"', 'name = "../window"', "arm ../window: name is '../window'"),
        ("seeds = [0, 1]", "seeds = []", "seeds is []"),
        ("seeds = [0, 1]", "seeds = 0", "seeds is 0"),
        ("per_cell = 2", "per_cell = 2\ndata = 'x'", "has data; expected"),
        ("[[arm]]", "[[arms]]", "has arms; expected [[arm]] tables"),
        ("[[arm]]", "[arm", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_plan_is_said_before_anything_runs(tmp_path, old, new, said):
    assert old in SMALL
    with pytest.raises(UserError) as caught:
        plan_of(tmp_path, SMALL.replace(old, new))
    assert said in str(caught.value)


def test_a_plan_without_arms_or_without_a_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no \\[\\[arm\\]\\] table"):
        plan_of(tmp_path, SMALL.partition("[[arm]]")[0])
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "nope.toml", tmp_path, tmp_path)


def test_results_of_another_plan_are_not_taken_for_this_ones(tmp_path):
    plan = plan_of(tmp_path)
    plan.out.mkdir()
    keep_plan(plan)
    keep_plan(plan_of(tmp_path, SMALL.replace("seeds = [0, 1]", "seeds = [0, 1, 2]") + MORE))
    keep_plan(plan)
    with pytest.raises(UserError, match="answer_tokens was 32, is 48"):
        keep_plan(plan_of(tmp_path, SMALL.replace("answer_tokens = 32", "answer_tokens = 48")))
    with pytest.raises(UserError, match=r"arm\.more\.options was"):
        keep_plan(plan_of(tmp_path, SMALL + MORE.replace("=2", "=3")))


MORE = """
[[arm]]
name = "more"
recipe = "recipes/smol-window.toml"
options = ["drafter.num_layers=2"]
"""


def test_output_appears_under_its_name_only_when_its_command_ended_well(tmp_path):
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="stopped with 3"):
        study.run(sys.executable, "-c", "print('half'); raise SystemExit(3)", to=out)
    assert not out.exists()
    study.run(sys.executable, "-c", "print('whole')", to=out)
    assert out.read_text() == "whole\n"


def test_training_free_arms_are_tuned_on_prompts_that_nothing_was_trained_on(tmp_path, monkeypatch):
    plan = plan_of(tmp_path)
    plan.out.mkdir()
    said = [[{"role": "user", "content": f"Question {i}"}] for i in range(4)]
    rows = [json.dumps({"messages": messages, "domain": "book"}) + "\n" for messages in said]
    (plan.out / "train.jsonl").write_text("".join(rows))
    answered = load_prompts([str(plan.out / "train.jsonl")]).prompts[1]
    (plan.out / "long-answers.jsonl").write_text(json.dumps({"id": answered.id}) + "\n")
    asked = []
    monkeypatch.setattr(study, "hyflash", lambda *words: asked.append([str(word) for word in words]))
    study.tune(plan)
    study.tune(plan)  # is done
    assert [words[1] for words in asked] == [f"fold:{plan.out / 'full-0' / 'best'}"]
    assert (plan.out / "tune.jsonl").read_text() == rows[0] + rows[2]
    assert plan.drafters()["fold-0"] == f"fold:{plan.out / 'full-0' / 'best'}"  # no option made a difference
    (plan.out / "fold-0").mkdir()
    assert plan.drafters()["fold-0"] == str(plan.out / "fold-0")


def test_results_that_lack_a_drafter_are_measured_again(tmp_path):
    path = tmp_path / "acceptance.json"
    assert not study._measured(path, ["a"])
    path.write_text('{"results": [{"drafter": "a"}, {"drafter": "b"}]}')
    assert study._measured(path, ["a", "b"])
    assert not study._measured(path, ["a", "c"])


def test_two_studies_never_work_in_one_folder_even_after_a_kill(tmp_path):
    """The command of a killed study holds the lock on; a second study says so, and runs once it has ended."""
    code = (
        "import sys, study; from pathlib import Path\n"
        "with study.alone(Path(sys.argv[1])):\n"
        "    study.run(sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)')\n"
    )
    where = os.pathsep.join([str(Path(study.__file__).parent), *sys.path])
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": where},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    while first.stdout.readline() != "1\n":
        assert first.poll() is None
    try:
        first.kill()
        first.wait()
        with pytest.raises(UserError, match="is at work there"), study.alone(tmp_path):
            pass
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()
    for _ in range(200):
        try:
            with study.alone(tmp_path):
                return
        except UserError:
            time.sleep(0.05)
    pytest.fail("the lock outlives its holders")


# ----------------------------------------------------------------------------------------- tables


def rows_of(plan, numbers):
    """Bench rows: (arm-seed, domain) -> counts."""
    return [
        {
            "drafter": plan.drafters()[name],
            "domain": domain,
            "committed_by_prompt": [n for n, _ in counts],
            "rounds_by_prompt": [r for _, r in counts],
        }
        for (name, domain), counts in numbers.items()
    ]


NUMBERS = {
    ("full-0", "book-512"): [(10, 5), (20, 10)],
    ("full-0", "code-512"): [(30, 10)],
    ("full-1", "book-512"): [(14, 5), (22, 10)],
    ("full-1", "code-512"): [(40, 10)],
    ("window-0", "book-512"): [(10, 5), (20, 10)],
    ("window-0", "code-512"): [(30, 10)],
    ("fold-0", "book-512"): [(15, 5), (20, 10)],
    ("fold-0", "code-512"): [(30, 10)],
}


def test_differences_pair_the_same_prompts_of_the_same_seeds(tmp_path):
    """The window arm has the base's very numbers of seed 0, so they differ by nothing in any resample."""
    plan = plan_of(tmp_path)
    cells = study_report.by_arm(rows_of(plan, NUMBERS), plan)
    table = study_report.difference_table(plan, cells).split("\n")
    assert table[2] == "| window | +0.000 [+0.000, +0.000] | - |"
    assert table[3].startswith("| fold | +0.200 [")


def test_seeds_are_summed_by_prompt_and_do_not_multiply_prompts(tmp_path):
    plan = plan_of(tmp_path)
    cells = study_report.by_arm(rows_of(plan, NUMBERS), plan)
    assert study_report.pooled(cells["full"], (0, 1)) == {
        ("book", 512): [(24, 10), (42, 20)],
        ("code", 512): [(70, 20)],
    }
    assert study_report.tau_table(plan, cells).split("\n")[2].startswith("| full | 2.720 [")  # 136 / 50


def test_a_report_needs_results_of_every_arm(tmp_path):
    plan = plan_of(tmp_path)
    with pytest.raises(UserError, match="run the stages before"):
        study_report.report(plan)
    rows = rows_of(plan, {key: counts for key, counts in NUMBERS.items() if key[0] != "full-1"})
    with pytest.raises(UserError, match="lacks full-1"):
        study_report.by_arm(rows, plan)


def test_acceptance_by_position_pools_cells_and_seeds_as_far_as_drafts_were_judged(tmp_path):
    plan = plan_of(tmp_path)
    full, again = (plan.drafters()[name] for name in ("full-0", "full-1"))
    rows = [
        {"drafter": full, "acceptance_by_position": [0.5, 1.0], "num_judged_by_position": [10, 5]},
        {"drafter": again, "acceptance_by_position": [0.9], "num_judged_by_position": [30]},
    ]
    assert study_report.position_table(plan, rows).split("\n")[2] == "| full | 0.800 | 1.000 | - | - | - |"


def test_results_of_drafters_that_left_the_plan_are_left_out(tmp_path):
    plan = plan_of(tmp_path)
    gone = [{"drafter": "old", "domain": "book-512", "committed_by_prompt": [1], "rounds_by_prompt": [1]}]
    assert study_report.by_arm([*rows_of(plan, NUMBERS), *gone], plan).keys() == {"full", "window", "fold"}


def test_the_cost_table_has_what_was_measured_so_far_in_order_of_contexts(tmp_path):
    plan = plan_of(tmp_path)
    plan.out.mkdir()
    assert study_report.cost_table(plan) == ""
    row = (
        '{{"drafter": "{0}", "domain": "chat", "draft_ms_per_round": 3.0, "commit_ms_per_round": 1.0, '
        '"verify_ms_per_round": 9.0, "measured_bytes": 1024}}'
    )
    for context in (1024, 512):
        text = '{"results": [' + row.format(plan.first_drafters()[0]) + "]}"
        (plan.out / f"cost-{context}.json").write_text(text)
    lines = study_report.cost_table(plan).split("\n")
    assert lines[2:] == [f"| full | {context} | chat | 2.00 | 1.00 | 9.00 | 1,024 |" for context in (512, 1024)]
