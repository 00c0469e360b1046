"""The n-gram table: counted by hand, thinned, chained, saved, and made by its command."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hyflash import checkpoint
from hyflash.core import Commit, DraftRequest, TargetHooks
from hyflash.drafters.ngram import LEAST_RUN, DrafterImpl, NgramConfig, NgramState, count, pack
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
    drafter.commit(state, Commit(rows=[0], tokens=[text[:-1]], features=None))
    (found,) = drafter.propose(state, DraftRequest(rows=[0], anchors=text[-1:], num_tokens=[num])).drafts
    assert len(found.tokens) == len(found.confidence)
    return list(found.tokens), list(found.confidence)


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


def table(found: dict[tuple[int, ...], int], share: int = 250) -> DrafterImpl:
    """A drafter with this table, of contexts and next tokens."""
    drafter = DrafterImpl(NgramConfig(num_entries=len(found)), hooks())
    rows = sorted((pack(context), token) for context, token in found.items())
    drafter.load_state_dict({
        "keys": torch.tensor([key for key, _ in rows], dtype=torch.int64),
        "tokens": torch.tensor([token for _, token in rows], dtype=torch.int32),
        "shares": torch.full((len(rows),), share, dtype=torch.uint8),
    })  # fmt: skip
    return drafter


def test_a_chain_goes_through_contexts_of_each_length_from_the_last_key_to_the_first() -> None:
    found = {
        (9, 9, 9): 5,  # the last key
        (9, 5): 4,
        (5, 4): 7,
        (4,): 1,  # not reached: the longer one is
        (7,): 0,
        (0,): 3,  # the first key
    }
    drafter = table(found)
    assert drafter.keys.tolist()[0] == pack([0])
    assert drafter.keys.tolist()[-1] == pack([9, 9, 9])
    want = [5, 4, 7, 0, 3]
    assert drafts(drafter, [9, 9, 9]) == (want, [250 / 255] * 5)
    for done in range(1, 6):
        assert drafts(drafter, [9, 9, 9, *want[:done]]) == (want[done:], [250 / 255] * (5 - done))
    for strange in ([9, 9, 10], [9, 10], [10], [99, 99, 99], [6, 6, 6], [1]):  # behind the last key, between, no end
        assert drafts(drafter, strange) == ([], [])
    assert drafts(drafter, [99, 99, 0]) == ([3], [250 / 255])
    assert drafts(drafter, [98, 9, 9]) == ([], []), "contexts of two and one that end so are not there"


def test_chains_equal_a_plain_search_on_random_tables() -> None:
    rng = random.Random(4)
    for _ in range(60):
        contexts = {tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 25))}
        found = {context: rng.randrange(4) for context in contexts}
        drafter = table(found, share=255)
        for _ in range(20):
            text = [rng.randrange(5) for _ in range(rng.randint(1, 6))]
            grown = list(text)
            while len(grown) < len(text) + 5:
                ends = [tuple(grown[-n:]) for n in (3, 2, 1) if n <= len(grown)]
                known = next((found[end] for end in ends if end in found), None)
                if known is None:
                    break
                grown.append(known)
            assert drafts(drafter, text)[0] == grown[len(text) :]


def test_a_table_that_is_loaded_after_a_proposal_is_the_one_that_is_read() -> None:
    drafter, other = table({(1,): 2}), table({(1,): 3})
    assert drafts(drafter, [1])[0] == [2]
    drafter.load_state_dict(other.state_dict())
    assert drafts(drafter, [1])[0] == [3]


@pytest.mark.parametrize(("share", "num"), [(0, 1), (50, 2), (100, 4), (140, 5), (255, 5)])
def test_a_chain_ends_where_it_is_hardly_ever_right(share: int, num: int) -> None:
    tokens, shares = drafts(table({(1,): 1}, share), [1])
    assert (tokens, shares) == ([1] * num, [share / 255] * num)
    assert math.prod(shares[:-1]) > LEAST_RUN
    assert num == 5 or math.prod(shares) <= LEAST_RUN


def test_an_empty_table_proposes_nothing() -> None:
    assert drafts(DrafterImpl(NgramConfig(), hooks()), [1, 2]) == ([], [])


def test_rows_of_a_batch_draft_each_for_itself() -> None:
    drafter, state = counted(*[([1], [2, 3])] * 2), NgramState(3, 3)
    state.rows[1] = [1]
    made = drafter.propose(state, DraftRequest(rows=(0, 1, 2), anchors=(50, 2, 1), num_tokens=(5, 5, 1))).drafts
    assert [draft.tokens for draft in made] == [[], [3], [2]]
    assert [draft.kind for draft in made] == [0, 4, 4]  # (1.5 / 2.5) of eighths, rounded down


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
