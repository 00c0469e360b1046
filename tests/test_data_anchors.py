"""Anchors are supervised positions, drawn by seed, epoch and id alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fake_training import FakeTarget, make_answers
from hyflash.data.anchors import AnchorOptions, build_batch, crop, sample_anchors
from hyflash.data.capture import Example, capture
from hyflash.errors import UserError


def example(total: int, prompt: int, *, loops: slice | None = None, name: str = "e") -> Example:
    loop_mask = torch.zeros(total, dtype=torch.bool)
    if loops is not None:
        loop_mask[loops] = True
    return Example(
        id=name,
        domain="d",
        tokens=torch.arange(total),
        prompt_len=prompt,
        features=torch.arange(total, dtype=torch.float16)[:, None, None].expand(total, 2, 3),
        loss_mask=torch.arange(total) >= prompt,
        loop_mask=loop_mask,
    )


def test_every_anchor_has_a_supervised_label_and_all_are_reachable() -> None:
    e = example(20, 7)
    everything = sample_anchors(e, AnchorOptions(anchors_per_sequence=0), seed=0, epoch=0)
    assert everything == list(range(6, 19)), "from the last prompt token to the last but one of the answer"
    seen: Counter[int] = Counter()
    for epoch in range(300):
        chosen = sample_anchors(e, AnchorOptions(anchors_per_sequence=4), seed=0, epoch=epoch)
        assert len(set(chosen)) == 4
        assert chosen == sorted(chosen)
        seen.update(chosen)
    assert set(seen) == set(everything)
    assert max(seen.values()) < 2 * min(seen.values()), "uniform"


def test_anchors_depend_on_seed_epoch_and_id_only() -> None:
    options = AnchorOptions(anchors_per_sequence=5)

    def draw(name: str, seed: int, epoch: int) -> list[int]:
        return sample_anchors(example(60, 3, name=name), options, seed=seed, epoch=epoch)

    assert draw("a", 0, 0) == draw("a", 0, 0)
    assert len({tuple(draw(*x)) for x in (("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1))}) == 4


def test_at_least_half_of_the_anchors_are_far_on_long_sequences() -> None:
    options = AnchorOptions(anchors_per_sequence=9, far_beyond=90, far_fraction=0.5)
    for epoch in range(20):
        chosen = sample_anchors(example(100, 2), options, seed=0, epoch=epoch)
        assert len(chosen) == 9
        assert sum(a > 90 for a in chosen) >= 5
    few = sample_anchors(example(93, 2), options, seed=0, epoch=0)
    assert sum(a > 90 for a in few) == 1
    assert len(few) == 9, "near positions fill what far ones cannot"
    assert len(sample_anchors(example(50, 2), options, seed=0, epoch=0)) == 9


def test_loops_are_thinned_out() -> None:
    e = example(4000, 1, loops=slice(2001, 4000))
    options = AnchorOptions(anchors_per_sequence=0, max_tokens=4000)
    chosen = sample_anchors(e, options, seed=0, epoch=0)
    inside = sum(a >= 2000 for a in chosen)
    assert len(chosen) - inside == 2000, "positions outside loops all stay"
    assert 0.12 < inside / 1999 < 0.18
    none = sample_anchors(e, AnchorOptions(anchors_per_sequence=0, loop_keep=0), seed=0, epoch=0)
    assert none == list(range(2000))


@pytest.mark.parametrize(("total", "prompt"), [(1, 1), (1, 0), (2, 2), (30, 30)])
def test_a_sequence_without_anchors_is_masked_not_fatal(total: int, prompt: int) -> None:
    options = AnchorOptions(anchors_per_sequence=4)
    batch = build_batch([example(total, prompt), example(9, 2, name="f")], options, seed=0, epoch=0)
    assert batch.anchors.shape == (2, 4)
    assert batch.anchor_mask.tolist() == [[False] * 4, [True] * 4]
    assert batch.weights.tolist() == [[0.0] * 4, [1.0] * 4]
    lonely = build_batch([example(total, prompt)], options, seed=0, epoch=0)
    assert lonely.anchors.shape == (1, 1)
    assert not lonely.anchor_mask.any()


def test_batches_pad_right_and_mask_padding() -> None:
    parts = list(capture(FakeTarget(), make_answers(5), taps=(1,)))
    batch = build_batch(parts, AnchorOptions(anchors_per_sequence=3), seed=0, epoch=0)
    assert batch.features.dtype == torch.float32
    for row, part in enumerate(parts):
        n = len(part.tokens)
        assert batch.lengths[row] == n
        assert torch.equal(batch.tokens[row, :n], part.tokens)
        assert torch.equal(batch.features[row, :n], part.features.float())
        assert not batch.loss_mask[row, n:].any()
        assert not batch.features[row, n:].any()
        real = batch.anchors[row][batch.anchor_mask[row]]
        assert batch.loss_mask[row, real + 1].all()
    assert batch.ids == tuple(p.id for p in parts)
    with pytest.raises(UserError, match="at least one"):
        build_batch([], AnchorOptions(), seed=0, epoch=0)


@pytest.mark.parametrize("size", [2, 5, 40, 99, 100, 101])
def test_crops_hold_labels_with_context_before_them(size: int) -> None:
    e = example(100, 60)
    options = AnchorOptions(max_tokens=size, crop_context=16)
    starts = set()
    for epoch in range(50):
        part = crop(e, options, seed=0, epoch=epoch)
        first = int(part.tokens[0])
        starts.add(first)
        assert len(part.tokens) == min(size, 100)
        assert torch.equal(part.features[:, 0, 0], part.tokens.half()), "features move with their tokens"
        assert part.loss_mask.any()
        assert sample_anchors(part, replace_all(options), seed=0, epoch=0)
        context = min(16, size // 4) if first > 0 else 0
        assert not part.loss_mask[:context].any()
        assert torch.equal(part.loss_mask[context:], (part.tokens >= 60)[context:])
        assert part.prompt_len == max(0, 60 - first)
    assert len(starts) > 1 or size >= 100


def replace_all(options: AnchorOptions) -> AnchorOptions:
    return options.model_copy(update={"anchors_per_sequence": 0})


def test_a_crop_of_a_sequence_without_labels_is_its_start() -> None:
    part = crop(example(50, 50), AnchorOptions(max_tokens=8), seed=0, epoch=0)
    assert part.tokens.tolist() == list(range(8))


def test_equal_examples_with_equal_ids_get_equal_rows_in_any_batch() -> None:
    options = AnchorOptions(anchors_per_sequence=3, max_tokens=24)
    parts = [example(40 + i, 5, name=f"e{i}") for i in range(4)]
    together = build_batch(parts, options, seed=1, epoch=2)
    for row, part in enumerate(parts):
        alone = build_batch([replace(part)], options, seed=1, epoch=2)
        assert torch.equal(together.anchors[row], alone.anchors[0])
        assert torch.equal(together.tokens[row], alone.tokens[0])


def test_senseless_options_are_refused_by_name() -> None:
    for bad in ({"max_tokens": 1}, {"far_fraction": 1.5}, {"loop_keep": -0.1}, {"anchors_per_sequence": -1}):
        with pytest.raises(UserError, match=next(iter(bad))):
            AnchorOptions.parse(bad, where="[data]")
