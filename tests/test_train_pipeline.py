"""The whole path on a tiny real model: prompts, answers, shards, a shipped recipe, a drafter that serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import tiny_target_dir
from hyflash import checkpoint
from hyflash.data.answers import read_answers
from hyflash.data.prompts import load_prompts
from hyflash.data.regenerate import Sampling, regenerate
from hyflash.data.shards import write_shards
from hyflash.engine.replay import measure, record
from hyflash.errors import UserError
from hyflash.metrics import summarize
from hyflash.targets import hf
from hyflash.text import Tokenizer
from hyflash.train.loader import hold_out
from hyflash.train.recipe import load_recipe
from hyflash.train.trainer import make_drafter, run

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny-test.toml"


def test_from_prompts_to_a_drafter_that_keeps_its_measured_acceptance(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    rows = [{"prompt": f"Count to {n}.", "domain": "odd" if n % 2 else "even"} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    target, tokenizer = hf.load(str(path)), Tokenizer.from_dir(str(path))
    prompts = load_prompts([tmp_path / "prompts.jsonl"]).prompts
    answers_path = tmp_path / "answers.jsonl"
    regenerate(target, tokenizer, prompts, answers_path, sampling=Sampling(max_tokens=24, greedy_share=0.5))
    file = read_answers(answers_path)
    assert len(file.answers) == 12
    overrides = [
        f"target.name={path}",
        f"data.shards={tmp_path / 'shards'}",
        "drafter.draft_vocab_size=64",
        "train.precision=float32",
    ]
    recipe = load_recipe(RECIPE, overrides)
    taps = make_drafter(recipe, target.hooks()).target_layer_ids
    write_shards(target, file.answers, tmp_path / "shards", taps=taps, meta=file.meta)
    best = run(RECIPE, out_dir=tmp_path / "run", overrides=overrides, quiet=True)

    drafter = checkpoint.load(str(best), target.hooks())
    card = checkpoint.read_card(best)
    assert card["target"]["fingerprint"] == target.info.fingerprint
    assert card["tau_by_domain"].keys() <= {"odd", "even"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines if r["kind"] == "eval"] == [0, 10, 20]
    best_tau = max(r["tau"] for r in lines if r["kind"] == "eval")
    assert card["tau"] == best_tau >= 1.0
    _, held_out = hold_out(sorted(a.id for a in file.answers), 4, seed=0)
    recordings = [record(target, taps, a.prompt_ids, a.answer_ids) for a in file.answers if a.id in held_out]
    again = summarize(measure(drafter, recordings, 3)).tau
    assert again == pytest.approx(best_tau, abs=0.05), "float16 weights and fresh features say the same"
    with pytest.raises(UserError, match="holds a run"):
        run(RECIPE, out_dir=tmp_path / "run", overrides=overrides, quiet=True)
