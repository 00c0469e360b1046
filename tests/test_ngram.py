"""The n-gram table: counted by hand, thinned, chained, saved, and made by its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hyflash import checkpoint
from hyflash.core import Commit, DraftRequest, TargetHooks
from hyflash.drafters.ngram import DrafterImpl, NgramConfig, NgramState, count, pack
from hyflash.errors import UserError
from toys import toy_info

Text = tuple[list[int], list[int]]


def hooks(vocab_size: int = 100) -> TargetHooks:
    def none(ids: Tensor) -> Tensor:
        raise AssertionError("an n-gram table uses no weights of the target")

    return TargetHooks(info=toy_info(vocab_size), embed=none, head=none, head_rows=none)


def counted(*texts: Text, max_context: int = 3) -> DrafterImpl:
    return count(texts, NgramConfig(max_context=max_context), hooks())


def entries(drafter: DrafterImpl) -> dict[int, tuple[int, float]]:
    shares = (drafter.shares.double() / 255).tolist()
    return dict(zip(drafter.keys.tolist(), zip(drafter.tokens.tolist(), shares, strict=True), strict=True))


def drafts(drafter: DrafterImpl, text: list[int], num: int = 5) -> tuple[list[int], list[float]]:
    state = drafter.new_state(1)
    assert isinstance(state, NgramState)
    tokens = torch.tensor([text[:-1]], dtype=torch.int64).view(1, -1)
    drafter.commit(state, Commit(rows=(0,), tokens=tokens, features=None, lengths=(len(text) - 1,)))
    proposal = drafter.propose(state, DraftRequest(rows=(0,), anchors=torch.tensor(text[-1:]), num_tokens=(num,)))
    assert proposal.confidence is not None
    length = proposal.lengths[0]
    return proposal.tokens[0, :length].tolist(), proposal.confidence[0, :length].tolist()


def test_a_context_maps_to_its_most_frequent_next_token_and_a_shrunken_share() -> None:
    drafter = counted(([7], [1, 7, 1, 7, 2]), max_context=1)
    assert entries(drafter) == {
        pack([7]): (1, pytest.approx(1.5 / 3.5, abs=1 / 255)),  # 1 twice, 2 once
        pack([1]): (7, pytest.approx(1.5 / 2.5, abs=1 / 255)),
    }


def test_among_equals_the_lower_token_is_kept() -> None:
    assert entries(counted(([7], [9, 7, 4]), max_context=1))[pack([7])][0] == 4


def test_longer_contexts_need_two_sightings() -> None:
    once = counted(([1], [2, 3]), max_context=2)
    assert sorted(entries(once)) == sorted([pack([1]), pack([2])])
    twice = counted(([1], [2, 3]), ([1], [2, 3]), ([5], [2, 4]), ([6], [2, 4]), ([8], [2, 4]), max_context=2)
    assert entries(twice)[pack([1, 2])] == (3, pytest.approx(1.5 / 2.5, abs=1 / 255))
    assert entries(twice)[pack([2])][0] == 4


def test_a_longer_context_that_says_no_more_is_left_out() -> None:
    drafter = counted(*[([1], [2, 3])] * 4)
    assert sorted(entries(drafter)) == sorted([pack([1]), pack([2])])


def test_prompts_are_context_but_not_counted_as_answers() -> None:
    drafter = counted(([8, 9], [1]), ([8, 9], [1]), ([4, 9], [2]), ([5, 9], [2]), ([6, 9], [2]))
    found = entries(drafter)
    assert pack([8]) not in found
    assert found[pack([9])][0] == 2
    assert found[pack([8, 9])][0] == 1


def test_answers_shorter_than_a_context_are_counted_as_far_as_they_go() -> None:
    assert entries(counted(([3], [4]))) == {pack([3]): (4, pytest.approx(0.5 / 1.5, abs=1 / 255))}


@pytest.mark.parametrize("texts", [(), (([1, 2], []),)])
def test_nothing_to_count_is_refused(texts: tuple[Text, ...]) -> None:
    with pytest.raises(UserError, match="no answer token"):
        counted(*texts)


def test_a_vocabulary_too_large_for_a_key_is_refused() -> None:
    with pytest.raises(UserError, match="2097152"):
        DrafterImpl(NgramConfig(), hooks(1 << 21))
    largest = (1 << 21) - 2
    assert pack([largest] * 3) < 2**63
    assert len({pack(c) for c in ([0], [0, 0], [0, 0, 0], [1], [0, 1], [1, 0])}) == 6


def test_a_chain_follows_the_longest_context_and_feeds_itself() -> None:
    drafter = counted(*[([1], [2, 3, 4])] * 3, *[([9], [2, 5, 6])] * 4)
    assert drafts(drafter, [1])[0] == [2, 3, 4]  # after 4 nothing is known
    assert drafts(drafter, [1, 2])[0] == [3, 4]
    assert drafts(drafter, [8, 2])[0] == [5, 6]
    assert drafts(drafter, [8, 2], num=1) == ([5], [pytest.approx(3.5 / 7.5, abs=1 / 255)])
    assert drafts(drafter, [77]) == ([], [])
    assert drafts(drafter, [1], num=0) == ([], [])


def test_an_empty_table_proposes_nothing() -> None:
    assert drafts(DrafterImpl(NgramConfig(), hooks()), [1, 2]) == ([], [])


def test_rows_of_a_batch_draft_each_for_itself() -> None:
    drafter, state = counted(*[([1], [2, 3])] * 2), NgramState(3, 3)
    state.rows[1] = [1]
    request = DraftRequest(rows=(0, 1, 2), anchors=torch.tensor([50, 2, 1]), num_tokens=(5, 5, 1))
    proposal = drafter.propose(state, request)
    assert proposal.lengths == (0, 1, 1)
    assert proposal.tokens[:, 0].tolist() == [0, 3, 2]
    assert drafter.buckets(state, request) == (0, 4, 4)  # (1.5 / 2.5) of eighths, rounded down


def test_a_saved_table_is_read_back(tmp_path: Path) -> None:
    drafter = counted(*[([1], [2, 3, 4])] * 3)
    checkpoint.save(drafter, tmp_path / "a")
    again = checkpoint.load(str(tmp_path / "a"), hooks())
    assert isinstance(again, DrafterImpl)
    assert entries(again) == entries(drafter)
    assert drafts(again, [1]) == drafts(drafter, [1])


def test_the_command_counts_answers_and_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyflash.cli import loading
    from hyflash.cli.main import app

    class Loaded:
        class model:
            info = toy_info(100)
            hooks = staticmethod(hooks)

    monkeypatch.setattr(loading, "load_target", lambda *_args, **_options: Loaded)
    rows: list[dict[str, Any]] = [{"id": str(i), "prompt_ids": [1], "answer_ids": [2, 3]} for i in range(2)]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n".join(map(json.dumps, [*rows, {"id": "bad"}])), encoding="utf-8")
    out = tmp_path / "table"
    first = CliRunner().invoke(app, ["data", "ngrams", str(answers), "--out", str(out), "--json"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout) == {
        "out": str(out), "num_answers": 2, "num_tokens": 4, "num_entries": 2, "num_bad_rows": 1, "num_duplicates": 0,
    }  # fmt: skip
    assert checkpoint.read_card(out)["training"]["num_entries"] == 2
    again = CliRunner().invoke(app, ["data", "ngrams", str(answers), "--out", str(out)])
    assert again.exit_code != 0
