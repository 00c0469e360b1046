"""A target's embedding and head drawn at random, and batches of random features, for the block drafters' tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyflash.core import Commit, DraftRequest, TargetHooks, TargetInfo, TrainBatch
from hyflash.drafters.base import Drafter, State

VOCAB, DIM, LAYERS = 61, 32, 2
torch.set_num_threads(1)  # matrices this small only wait for one another on more


def fake_info(**changes: object) -> TargetInfo:
    facts: dict[str, object] = {
        "name": "fake",
        "fingerprint": "f00d",
        "family": "fake",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": 48,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_context": 4096,
        "eos_token_ids": (0,),
        "dtype": "float32",
    }
    return TargetInfo(**{**facts, **changes})  # type: ignore[arg-type]


def fake_hooks(*, dtype: torch.dtype = torch.float32, **changes: object) -> TargetHooks:
    info = fake_info(**changes)
    random = torch.Generator().manual_seed(7)
    embedding = torch.randn(info.vocab_size, info.hidden_size, generator=random).to(dtype)
    head = torch.randn(info.vocab_size, info.hidden_size, generator=random).to(dtype)
    return TargetHooks(
        info=info, embed=lambda t: embedding[t], head=lambda h: h @ head.T, head_rows=lambda ids: head[ids]
    )


def fake_batch(
    drafter: Drafter,
    *,
    lengths: tuple[int, ...] = (23,),
    anchors: int = 6,
    seed: int = 0,
    pad: int = 0,
    first_answer: int = 0,
) -> TrainBatch:
    """Random tokens and features; the first anchors are 0 and 1, the others spread to the last token."""
    random = torch.Generator().manual_seed(seed)
    size = max(lengths) + pad
    taps, dim = len(drafter.target_layer_ids), drafter.hooks.info.hidden_size
    tokens = torch.randint(1, drafter.hooks.info.vocab_size - 1, (len(lengths), size), generator=random)
    features = torch.randn(len(lengths), size, taps, dim, generator=random)
    length = torch.tensor(lengths)
    valid = torch.arange(size) < length[:, None]
    spread = torch.stack([torch.linspace(0, max(n - 1, 0), anchors).long() for n in lengths])
    if anchors > 1:
        spread[:, 1] = torch.clamp(length - 1, min=0, max=1)
    return TrainBatch(
        tokens=tokens * valid,
        features=features * valid[..., None, None],
        lengths=length,
        loss_mask=valid & (torch.arange(size) >= first_answer),
        anchors=spread,
        anchor_mask=(length > 0)[:, None].expand(-1, anchors).clone(),
        weights=torch.ones(len(lengths), anchors),
    )


def commit_prefix(drafter: Drafter, state: State, batch: TrainBatch, upto: list[int], *, pieces: int = 1) -> None:
    """Commit tokens 0..upto[b]-1 of every sequence b into row b, in `pieces` ragged pieces."""
    done = [0] * len(upto)
    for piece in range(pieces):
        stops = [n if piece == pieces - 1 else n * (piece + 1) // pieces for n in upto]
        commit_rows(drafter, state, batch, list(zip(done, stops, strict=True)))
        done = stops


def commit_rows(drafter: Drafter, state: State, batch: TrainBatch, spans: list[tuple[int, int]]) -> None:
    tokens = [batch.tokens[b, start:stop].tolist() for b, (start, stop) in enumerate(spans)]
    features = torch.zeros(len(spans), max(map(len, tokens)), *batch.features.shape[2:])
    for b, (start, stop) in enumerate(spans):
        features[b, : stop - start] = batch.features[b, start:stop]
    drafter.commit(state, Commit(rows=range(len(spans)), tokens=tokens, features=features))


def ask(anchors: Tensor | Sequence[int], *, num_tokens: int = 64) -> DraftRequest:
    anchors = torch.as_tensor(anchors).tolist()
    return DraftRequest(rows=range(len(anchors)), anchors=anchors, num_tokens=[num_tokens] * len(anchors))
