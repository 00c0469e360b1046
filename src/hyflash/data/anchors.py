"""Sample anchors and build the `TrainBatch` of some examples.

In: `Example`s, seed and epoch. Out: a right-padded `TrainBatch`. An anchor is a position a whose next token is a
label; a drafter sees tokens before a, the anchor itself, and learns the tokens after it. Anchors depend on (seed,
epoch, example id) alone, so neither batching, nor order, nor the source of an example changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hyflash.core import TrainBatch
from hyflash.data.capture import Example
from hyflash.errors import UserError
from hyflash.options import Options


class AnchorOptions(Options):
    """How positions are drawn from an example."""

    anchors_per_sequence: int = Field(64, ge=0, description="most anchors of one sequence; 0 takes every position")
    max_tokens: int = Field(2048, ge=2, description="longer sequences are cropped to this many tokens")
    crop_context: int = Field(
        256, ge=0, description="tokens at the start of a crop that are only context (at most a quarter of max_tokens)"
    )
    far_beyond: int = Field(
        1024, ge=0, description="positions past this are far; four times the drafter's window is a good value"
    )
    far_fraction: float = Field(
        0.5, ge=0, le=1, description="at least this share of anchors is far, in sequences with far positions"
    )
    loop_keep: float = Field(
        0.15, ge=0, le=1, description="share of the positions inside loops that may become anchors"
    )


def make_rng(seed: int, epoch: int, example_id: str, purpose: str) -> np.random.Generator:
    """A generator that depends on nothing but its arguments."""
    digest = hashlib.sha256(f"{seed}:{epoch}:{purpose}:{example_id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def sample_anchors(example: Example, options: AnchorOptions, *, seed: int, epoch: int) -> list[int]:
    """Sorted positions a with loss_mask[a + 1]; empty when the example has none.

    Uniform over the supervised positions, of which those in loops are thinned out to `loop_keep` and at least
    `far_fraction` lie beyond `far_beyond` where there are enough.
    """
    rng = make_rng(seed, epoch, example.id, "anchors")
    places = np.flatnonzero(example.loss_mask[1:].numpy())
    kept = rng.random(len(places)) < options.loop_keep
    places = places[kept | ~example.loop_mask[1:].numpy()[places]]
    wanted = min(len(places), options.anchors_per_sequence or len(places))
    far = places[places > options.far_beyond]
    num_far = min(len(far), math.ceil(options.far_fraction * wanted))
    forced = rng.permutation(far)[:num_far]
    others = rng.permutation(np.setdiff1d(places, forced))[: wanted - num_far]
    return sorted(int(a) for a in (*forced, *others))


def crop(example: Example, options: AnchorOptions, *, seed: int, epoch: int) -> Example:
    """The example itself, or a part of `max_tokens` tokens that holds labels with context before them.

    The first `crop_context` tokens of a part that does not start at 0 lose their labels: a drafter would see
    less context there than it does at serving.
    """
    total, size = len(example.tokens), options.max_tokens
    labels = np.flatnonzero(example.loss_mask.numpy())
    if total <= size or len(labels) == 0:
        return example if total <= size else _slice(example, 0, size, 0)
    rng = make_rng(seed, epoch, example.id, "crop")
    context = min(options.crop_context, size // 4)
    label = int(labels[rng.integers(len(labels))])
    first = int(rng.integers(label - size + 1, max(label - context, label - size + 2)))
    first = max(0, min(first, total - size))
    return _slice(example, first, first + size, context if first > 0 else 0)


def _slice(example: Example, first: int, end: int, context: int) -> Example:
    loss_mask = example.loss_mask[first:end].clone()
    loss_mask[:context] = False
    return replace(
        example,
        tokens=example.tokens[first:end],
        prompt_len=max(0, min(example.prompt_len, end) - first),
        features=example.features[first:end],
        loss_mask=loss_mask,
        loop_mask=example.loop_mask[first:end],
        kv=None if example.kv is None else example.kv[first:end],
        start=example.start + first,
    )


def build_batch(examples: Sequence[Example], options: AnchorOptions, *, seed: int, epoch: int) -> TrainBatch:
    """Crop, sample anchors and pad on the right. Features become float32 (exactly the stored float16 values).

    An example without any anchor keeps its row with every anchor masked; A is at least 1.
    """
    if not examples:
        raise UserError("a batch needs at least one example.")
    parts = [crop(e, options, seed=seed, epoch=epoch) for e in examples]
    anchors = [sample_anchors(p, options, seed=seed, epoch=epoch) for p in parts]
    num_rows, num_tokens = len(parts), max(len(p.tokens) for p in parts)
    num_anchors = max(1, max(len(a) for a in anchors))
    tokens = torch.zeros(num_rows, num_tokens, dtype=torch.int64)
    features = torch.zeros(num_rows, num_tokens, *parts[0].features.shape[1:])
    like = parts[0].kv
    kv = None if like is None else torch.zeros(num_rows, num_tokens, *like.shape[1:])
    loss_mask = torch.zeros(num_rows, num_tokens, dtype=torch.bool)
    places = torch.zeros(num_rows, num_anchors, dtype=torch.int64)
    real = torch.zeros(num_rows, num_anchors, dtype=torch.bool)
    for row, (part, chosen) in enumerate(zip(parts, anchors, strict=True)):
        length = len(part.tokens)
        tokens[row, :length] = part.tokens
        features[row, :length] = part.features
        if kv is not None and part.kv is not None:
            kv[row, :length] = part.kv
        loss_mask[row, :length] = part.loss_mask
        places[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        real[row, : len(chosen)] = True
    return TrainBatch(
        tokens=tokens,
        features=features,
        lengths=torch.tensor([len(p.tokens) for p in parts]),
        loss_mask=loss_mask,
        anchors=places,
        anchor_mask=real,
        weights=real.float(),
        ids=tuple(p.id for p in parts),
        target_kv=kv,
        starts=torch.tensor([p.start for p in parts]),
    )


def to_device(batch: TrainBatch, device: str) -> TrainBatch:
    """The batch with its tensors on `device`; itself when it is there already."""
    if batch.tokens.device == torch.device(device):
        return batch

    def move(t: Tensor) -> Tensor:
        return t.to(device, non_blocking=True)

    return replace(
        batch,
        tokens=move(batch.tokens),
        features=move(batch.features),
        lengths=move(batch.lengths),
        loss_mask=move(batch.loss_mask),
        anchors=move(batch.anchors),
        anchor_mask=move(batch.anchor_mask),
        weights=move(batch.weights),
        target_kv=None if batch.target_kv is None else move(batch.target_kv),
        starts=None if batch.starts is None else move(batch.starts),
    )
