"""Token recycling: what the target said after rejected drafts is drafted again, in bounded memory."""

from __future__ import annotations

import random

import pytest
import torch

from hyflash.core import (
    Commit,
    Draft,
    DraftRequest,
    Request,
    SamplingParams,
    TargetOutput,
    Verdict,
)
from hyflash.drafters.recycle import DrafterImpl, RecycleConfig, RecycleState
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.engine.replay import Recording, measure
from hyflash.engine.verify import replies
from hyflash.errors import HyflashError
from toys import ScriptDrafter, ToyTarget, weightless_hooks

NONE = Draft()


def make(**options: int) -> DrafterImpl:
    return DrafterImpl(RecycleConfig.parse(options, where="test"), weightless_hooks())


def feed(
    drafter: DrafterImpl,
    state: RecycleState,
    text: list[int],
    *,
    draft: Draft = NONE,
    accepted: int = 0,
    replies: list[tuple[int, int]] | None = None,
) -> None:
    verdict = None if replies is None else Verdict([draft], [accepted], replies=[replies])
    drafter.commit(state, Commit(rows=[0], tokens=[text], features=None, verdict=verdict))


def ask(drafter: DrafterImpl, state: RecycleState, anchor: int, count: int = 5) -> Draft:
    return drafter.propose(state, DraftRequest(rows=[0], anchors=[anchor], num_tokens=[count])).drafts[0]


def test_what_the_target_said_after_a_rejected_draft_is_drafted() -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [7, 8])
    feed(drafter, state, [9], draft=Draft([20, 21, 22]), replies=[(20, 31), (21, 32), (22, 33)])
    assert list(ask(drafter, state, 21).tokens) == [32], "the draft 21 was wrong where it stood, and here it stands"
    assert list(ask(drafter, state, 50).tokens) == []


def test_a_context_of_two_tokens_goes_before_one_and_the_text_before_a_reply() -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [1, 5, 10, 2, 5, 20, 1])
    assert list(ask(drafter, state, 5, 1).tokens) == [10], "after 1 5"
    assert ask(drafter, state, 5).kind == 2
    feed(drafter, state, [9])
    assert list(ask(drafter, state, 5, 1).tokens) == [20], "9 5 never came; after 5 came 20 last"
    assert ask(drafter, state, 5).kind == 1
    feed(drafter, state, [5, 40], draft=Draft([40, 41]), accepted=1, replies=[(40, 77), (41, 78)])
    feed(drafter, state, [60], draft=NONE, replies=[])
    assert list(ask(drafter, state, 40, 1).tokens) == [60], "what followed 40 in the text, not the reply 77"


def test_the_table_is_what_a_plain_search_of_all_that_was_seen_gives() -> None:
    rng, drafter = random.Random(0), make()
    for _ in range(20):
        text = [rng.randrange(6) for _ in range(60)]
        state = drafter.new_state(1)
        feed(drafter, state, text)
        anchor = rng.randrange(6)
        seen, want = [*text, anchor], list[int]()
        for _ in range(5):
            last = [*seen, *want][-2:]
            pairs = [i for i in range(2, len(text)) if text[i - 2 : i] == last]
            ones = [i for i in range(1, len(text)) if text[i - 1] == last[1]]
            if not pairs and not ones:
                break
            want.append(text[(pairs or ones)[-1]])
        assert list(ask(drafter, state, anchor).tokens) == want


def test_the_table_keeps_the_latest_contexts_and_never_more_than_it_may() -> None:
    drafter = make(max_entries=6)
    state = drafter.new_state(1)
    feed(drafter, state, list(range(40)))
    assert len(state.rows[0].after) == 6
    assert list(ask(drafter, state, 38).tokens) == [39]
    assert list(ask(drafter, state, 10).tokens) == []
    assert state.nbytes(0) == drafter.cost(10**6).state_bytes


def test_rates_follow_how_chains_fared_by_the_size_of_the_context() -> None:
    drafter = make()
    state = drafter.new_state(1)
    feed(drafter, state, [1, 2, 3, 1])
    before = ask(drafter, state, 2)
    assert list(before.confidence)[:1] == [0.5]
    for _ in range(30):
        feed(drafter, state, [1], draft=ask(drafter, state, 2)._replace(notes=(2,), tokens=[3]), accepted=0, replies=[])
    assert ask(drafter, state, 2).confidence[0] < 0.2


def test_an_empty_row_drafts_nothing_and_one_token_teaches_nothing() -> None:
    drafter = make()
    state = drafter.new_state(1)
    assert list(ask(drafter, state, 3).tokens) == []
    feed(drafter, state, [3])
    feed(drafter, state, [])
    assert list(ask(drafter, state, 3).tokens) == []
    feed(drafter, state, [3])
    assert list(ask(drafter, state, 3).tokens) == [3] * 5


@pytest.mark.parametrize("has_top", [False, True])
def test_replies_pair_each_draft_with_the_likeliest_token_of_its_own_row(has_top: bool) -> None:
    ids = [[4], [5], [6], [7], [8], [9]]
    logits = torch.zeros(6, 12)
    logits[range(6), [i[0] for i in ids]] = 1.0
    out = TargetOutput(
        logits=None if has_top else logits,
        features=None,
        top_ids=ids if has_top else None,
        top_values=[[1.0]] * 6 if has_top else None,
    )
    assert replies(out, [Draft([1, 2]), Draft(), Draft([3])]) == [[(1, 5), (2, 6)], [], [(3, 9)]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_brings_replies_of_rejected_drafts_to_those_who_recycle(temperature: float) -> None:
    for recycles in (False, True):
        target = ToyTarget.chain([], vocab_size=16, eos=())
        drafter = ScriptDrafter(lambda text, n: [3, 9, 4][:n], target.info)
        drafter.recycles = recycles
        params = SamplingParams(max_tokens=6, temperature=temperature)
        Engine(target, drafter, policy=FixedLength(3)).generate([Request(prompt_ids=(5,), params=params)])
        verdicts = [c.verdict for c in drafter.commits if c.verdict is not None]
        if recycles:
            after = dict(pair for v in verdicts for pair in v.replies[0])
            assert after == {3: 4, 9: 10, 4: 5}, "the toy target counts on"
        else:
            assert all(not v.replies for v in verdicts)


def test_a_replay_refuses_what_it_cannot_tell() -> None:
    recording = Recording(prompt_ids=(1,), answer_ids=(2, 3), features=None)
    with pytest.raises(HyflashError, match="cannot be replayed"):
        measure(make(), [recording], 3)
