"""The recall probe (`benchmarks/recall.py`): its texts, and that it feeds every kind of drafter."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import recall

from helpers import tiny_target_dir
from hyflash import api
from hyflash.core import TargetOptions


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> api.LoadedTarget:
    return api.load_target(str(tiny_target_dir(tmp_path_factory.mktemp("recall"))), TargetOptions(backend="torch"))


def test_drafters_that_read_keys_and_values_are_probed_beside_those_that_read_taps(target: api.LoadedTarget) -> None:
    drafters = {name: recall._loaded(name, target) for name in ("hspec", "dflash", "lookup")}
    texts = [recall.make_text(target, 16, random.Random(n), told=True) for n in range(2)]
    recorded = recall.recordings(target, drafters.values(), texts)
    for name, drafter in drafters.items():
        first, run = recall.score(drafter, recorded, [len(text.fact) for text in texts])
        assert len(first) == len(run) == 2, name
        assert all(0.0 <= share <= 1.0 for share in (*first, *run)), name
    first, _ = recall.score(drafters["lookup"], recorded, [len(text.fact) for text in texts])
    assert max(first) == 1.0, "lookup finds what stands in the text"


def test_without_the_fact_nothing_of_it_is_in_the_text(target: api.LoadedTarget) -> None:
    told, untold = (recall.make_text(target, 16, random.Random(1), told=told) for told in (True, False))
    assert told.fact == untold.fact
    words = target.tokenizer.decode(told.fact).strip()
    assert words in target.tokenizer.decode(told.prompt)
    assert words not in target.tokenizer.decode(untold.prompt)


def test_a_token_that_begins_texts_stands_at_the_beginning_only() -> None:
    def encode(text: str, *, begins: bool = True) -> list[int]:
        return [*([1] if begins else []), *(ord(c) for c in text)]

    target: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))
    text = recall.make_text(target, 200, random.Random(0), told=True)
    assert text.prompt[0] == 1
    assert 1 not in (*text.prompt[1:], *text.fact)


@pytest.mark.parametrize("bad", [["--texts", "0"], ["--distances", "64", "-1"]])
def test_counts_that_make_no_sense_are_refused(bad: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["recall.py", *bad])
    with pytest.raises(SystemExit):
        recall.arguments()
