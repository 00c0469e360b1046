"""The words of a context: which tokens beside the static list a drafter may say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from block_fakes import fake_hooks
from drafting import tiny_drafter
from hyflash.core import Commit, DraftRequest
from hyflash.drafters.vocab import outside_of, use_words, words_of

VOCAB = 40
STATIC = torch.tensor([0, 3, 7, 39])
OUTSIDE = outside_of(STATIC, VOCAB)


def last_used(text: list[int], most: int) -> list[int]:
    """The obvious version: walk back from the end and take each token once."""
    found = dict.fromkeys(token for token in reversed(text) if OUTSIDE[token])
    return list(found)[:most]


@pytest.mark.parametrize("most", [0, 1, 5, VOCAB])
def test_words_are_the_last_used_tokens_however_they_came(most: int) -> None:
    rng = random.Random(most)
    for size in (0, 1, 2, 17, 300):
        text = [rng.randrange(VOCAB) for _ in range(size)]
        words, done = torch.zeros(most, dtype=torch.int32), 0
        while done < size:
            step = rng.choice((1, 2, 3, 50))
            use_words(words, text[done : done + step], OUTSIDE)
            done += step
        expected = last_used(text, most)
        assert [word - 1 for word in words.tolist() if word] == expected
        assert words.tolist()[len(expected) :] == [0] * (most - len(expected))


def test_a_head_has_the_words_in_order_and_the_anchor_once() -> None:
    words = torch.tensor([6, 21, 2, 0, 0], dtype=torch.int32)  # 5, 20, 1
    assert words_of(words, 5, OUTSIDE).tolist() == [1, 5, 20]
    assert words_of(words, 39, OUTSIDE).tolist() == [1, 5, 20]
    assert words_of(words, 9, OUTSIDE).tolist() == [1, 5, 9, 20]
    assert words_of(words, 38, OUTSIDE).tolist() == [1, 5, 20, 38]
    assert words_of(torch.zeros(3, dtype=torch.int32), 0, OUTSIDE).tolist() == []
    assert np.all([token not in STATIC.tolist() for token in range(VOCAB)] == OUTSIDE)


def test_tokens_that_left_the_words_are_not_drafted() -> None:
    """Words of two contexts in one batch: each draws from its own, and from the static list."""
    hooks = fake_hooks()
    drafter = tiny_drafter("dflash", hooks, draft_vocab_size=4, context_vocab_size=3, num_draft_tokens=3)
    state, rows = drafter.new_state(2), (0, 1)
    texts = [[10, 11, 12, 13, 14, 10], [20, 21, 20]]
    features = torch.randn(2, 6, len(drafter.target_layer_ids), hooks.info.hidden_size)
    drafter.commit(state, Commit(rows=rows, tokens=texts, features=features))
    head = drafter._serving_head(state, DraftRequest(rows=rows, anchors=(15, 21), num_tokens=(3, 3)))
    static = drafter.draft_ids.tolist()
    allowed = [sorted(set(head.ids[row].tolist()) - set(static)) for row in head.allowed]
    assert allowed == [[10, 13, 14, 15], [20, 21]]
