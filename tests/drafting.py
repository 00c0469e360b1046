"""What the tests of all drafters share: tiny drafters by name, random texts with features, drafts of known quality."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyflash import drafters
from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Proposal, TargetHooks, TrainBatch, Verdict
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.drafters.compose import Composite
from hyflash.ops.online_softmax import look

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lookup": ("lookup", {}),
    "dflash": ("dflash", {}),
    "dflash-window": ("dflash", {"window": 8}),
    **{f"hyflash-{core}": ("hyflash", {"memory_core": core}) for core in ("none", "mean", "gla", "delta", "mamba2")},
    "hyflash-all-parts": ("hyflash", {"draft_vocab_size": 32, "correction": "gru", "start": "ridge"}),
    "dflash-from-anchor": ("dflash", {"sample_from_anchor": True, "draft_vocab_size": 32}),
    "domino": ("domino", {}),
    "domino-hyflash": ("domino", {"window": 8, "memory_core": "delta", "draft_vocab_size": 32, "start": "ridge"}),
    "dspark": ("dspark", {"draft_vocab_size": 32}),
    "dspark-hyflash": ("dspark", {"window": 8, "memory_core": "delta", "markov": "rnn"}),
    "dels": ("dels", {}),
    "dels-folded": ("dels", {"draft_vocab_size": 32, "correction": "gru", "expert_width": 12}),
    "dels-hyflash": ("dels", {"window": 8, "memory_core": "delta", "draft_vocab_size": 32, "start": "ridge"}),
    "dflash2": ("dflash2", {}),
    "dflash2-memory": ("dflash2", {"window": 8, "memory_core": "delta", "draft_vocab_size": 32}),
    "dcoco": ("dcoco", {}),
    "dcoco-memory": ("dcoco", {"window": 8, "memory_core": "delta", "draft_vocab_size": 32, "start": "ridge"}),
    "eagle": ("eagle", {}),
    "eagle-window": ("eagle", {"window": 8, "draft_vocab_size": 32, "tap_norm": False, "norm_output": False}),
    "eagle-own-head": ("eagle", {"own_head": True, "draft_vocab_size": 32, "loss": "ce"}),
    "eagle-slots": ("eagle", {"window": 8, "sink": 2, "slot_ratio": 4, "draft_vocab_size": 32}),
    "lookup+hyflash": ("lookup+hyflash", {}),
    "fold": ("fold", {}),
    "fold-window": ("fold", {"far_weight": 0.0}),
}
"""Every kind of drafter there is: name -> what `tiny_drafter` builds."""


def tiny_drafter(spec: str, hooks: TargetHooks, *, seed: int = 0, **options: Any) -> Drafter:
    """The drafter `NAME` or `A+B` in its tiny config, every parameter moved so that no zero start hides a part."""
    names = spec.split("+")
    if len(names) > 1:
        return Composite([(name, tiny_drafter(name, hooks, seed=seed)) for name in names]).eval()
    method = drafters.load_class(spec)
    config = method.Config.parse({**method.Config.tiny().model_dump(), **options}, where=spec)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = method(config, hooks)
        for parameter in drafter.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


def random_batch(drafter: Drafter, lengths: Sequence[int], *, num_anchors: int = 1, seed: int = 0) -> TrainBatch:
    """Random tokens and features, every token an answer; anchors spread from 0 to the last token."""
    info, random_ = drafter.hooks.info, torch.Generator().manual_seed(seed)
    size = max(lengths)
    valid = torch.arange(size) < torch.tensor(lengths)[:, None]
    shape = (len(lengths), size, len(drafter.target_layer_ids), info.hidden_size)
    return TrainBatch(
        # Few different tokens, so that texts repeat themselves as real ones do.
        tokens=torch.randint(3, min(info.vocab_size, 12), valid.shape, generator=random_) * valid,
        features=torch.randn(shape, generator=random_) * valid[..., None, None],
        lengths=torch.tensor(lengths),
        loss_mask=valid,
        anchors=torch.stack([torch.linspace(0, n - 1, num_anchors).long() for n in lengths]),
        anchor_mask=torch.ones(len(lengths), num_anchors, dtype=torch.bool),
        weights=torch.ones(len(lengths), num_anchors),
        target_kv=_random_kv(drafter, valid, random_),
    )


def _random_kv(drafter: Drafter, valid: Tensor, random_: torch.Generator) -> Tensor | None:
    """Keys and values of the layers that the drafter reads, if it reads any."""
    if not drafter.target_kv_layers:
        return None
    info = drafter.hooks.info
    shape = (*valid.shape, len(drafter.target_kv_layers), 2, info.num_kv_heads, info.head_dim)
    return torch.randn(shape, generator=random_) * valid[..., None, None, None, None]


class BatchKV:
    """A `TargetKV` of a batch's sequences: state row -> sequence of the batch."""

    def __init__(self, drafter: Drafter, batch: TrainBatch, seqs: Mapping[int, int]) -> None:
        self.layers, self.batch, self.seqs = drafter.target_kv_layers, batch, seqs

    def read(self, row: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        assert self.batch.target_kv is not None
        seq = self.seqs[row]
        assert 0 <= first <= last <= int(self.batch.lengths[seq])
        both = self.batch.target_kv[seq, first:last, self.layers.index(layer)]
        return both[:, 0], both[:, 1]

    def attend(self, row: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        return look(queries, *self.read(row, layer, first, last))


def commit_spans(
    drafter: Drafter, state: State, batch: TrainBatch, spans: Mapping[int, tuple[int, int]], rows: Mapping[int, int]
) -> None:
    """Commit tokens start..stop-1 of each sequence in `spans` into its state row."""
    tokens = [batch.tokens[b, start:stop].tolist() for b, (start, stop) in spans.items()]
    features = batch.features.new_zeros(len(spans), max(map(len, tokens)), *batch.features.shape[2:])
    for at, (b, (start, stop)) in enumerate(spans.items()):
        features[at, : stop - start] = batch.features[b, start:stop]
    kv = BatchKV(drafter, batch, {row: b for b, row in rows.items()})
    taps = features if drafter.target_layer_ids else None
    drafter.commit(state, Commit(rows=[rows[b] for b in spans], tokens=tokens, features=taps, kv=kv))


def filled(drafter: Drafter, batch: TrainBatch, upto: Sequence[int], *, pieces: Sequence[int] = ()) -> State:
    """A state whose row b holds the first `upto[b]` tokens of sequence b, committed in pieces of the given sizes."""
    state, rows = drafter.new_state(len(upto)), {b: b for b in range(len(upto))}
    done, sizes = [0] * len(upto), list(pieces)
    while any(d < u for d, u in zip(done, upto, strict=True)):
        size = sizes.pop(0) if sizes else max(upto)
        spans = {b: (done[b], min(done[b] + size, upto[b])) for b in rows}
        commit_spans(drafter, state, batch, spans, rows)
        done = [stop for _, stop in spans.values()]
    return state


def ask(
    drafter: Drafter,
    state: State,
    rows: Sequence[int],
    anchors: Sequence[int],
    num: int = 99,
    *,
    batch: TrainBatch | None = None,
    seqs: Mapping[int, int] | None = None,
) -> Proposal:
    """A proposal of rows that hold sequences `seqs` of a batch, each the one of its number unless said otherwise."""
    kv = None if batch is None else BatchKV(drafter, batch, seqs or {row: row for row in rows})
    return drafter.propose(state, DraftRequest(rows=rows, anchors=anchors, num_tokens=[num] * len(rows), kv=kv))


def drafts(proposal: Proposal) -> list[list[int]]:
    """The proposed tokens of each row."""
    return [list(draft.tokens) for draft in proposal.drafts]


def num_drafted(proposal: Proposal) -> list[int]:
    """How many tokens each row was given."""
    return [len(draft.tokens) for draft in proposal.drafts]


def stated(proposal: Proposal) -> list[list[float]]:
    """The confidence of each row's drafts."""
    return [list(draft.confidence) for draft in proposal.drafts]


def cut(draft: Draft, verified: int) -> Draft:
    """The first tokens of a draft, as the engine cuts one that it does not verify to its end."""
    return draft._replace(tokens=draft.tokens[:verified], confidence=draft.confidence[:verified])


def judged(proposal: Proposal, *accepted: int, verified: int = 99) -> Verdict:
    """The verdict on a proposal of which at most `verified` tokens of each row came to the target.

    What the target says instead of a rejected draft is no token of any proposal, -1.
    """
    verified_drafts = [cut(draft, verified) for draft in proposal.drafts]
    rejected = [n < len(draft.tokens) for n, draft in zip(accepted, verified_drafts, strict=True)]
    return Verdict(verified_drafts, accepted, [-1 if is_rejected else None for is_rejected in rejected])


def assert_same_snapshot(got: Any, want: Any, *, exact: bool = True) -> None:
    """Equal nests of tensors and plain values; tensors to the bit, or to rounding."""
    if isinstance(want, Tensor):
        if exact or not want.is_floating_point():
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same_snapshot(got[key], want[key], exact=exact)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same_snapshot(a, b, exact=exact)
    else:
        assert got == want


def assert_training_is_serving(drafter: Drafter) -> None:
    """Teacher forcing with the drafter's own drafts predicts exactly those, at every position and context.

    With a reduced vocabulary a draft is the best of those that are in it.
    """
    depth, static = drafter.max_draft_tokens, drafter.state_dict().get("draft_ids")
    for seed, upto in enumerate([(0, 1, 2), (7, 8, 9), (22, 39, 16)]):
        batch = random_batch(drafter, tuple(n + 1 + depth + 2 for n in upto), seed=seed)
        state = filled(drafter, batch, upto, pieces=[3, 1, 5])
        anchors = [int(batch.tokens[b, n]) for b, n in enumerate(upto)]
        proposal = drafts(ask(drafter, state, range(3), anchors, batch=batch))
        tokens = batch.tokens.clone()
        for b, (n, row) in enumerate(zip(upto, proposal, strict=True)):
            assert len(row) == depth
            tokens[b, n + 1 : n + 1 + depth] = torch.tensor(row)
        with torch.no_grad():
            given = replace(batch, tokens=tokens, anchors=torch.tensor(upto)[:, None])
            out = drafter(given)
            predicted = drafter.predict(out, given)[:, 0]
            logits = drafter.logits(out)[:, 0]
        if static is not None and type(drafter).predict is Drafter.predict:
            for b, n in enumerate(upto):
                known = {*static.tolist(), *tokens[b, : n + 1].tolist()}
                logits[b, :, [i for i in range(logits.shape[-1]) if i not in known]] = float("-inf")
            predicted = logits.argmax(-1)
        assert predicted.tolist() == proposal
        assert out.labels[:, 0].tolist() == proposal
        assert out.mask.all()


class HalfRight(Drafter):
    """A drafter whose first few drafts are made right, so that blocks of every accepted length occur.

    `texts` are the whole texts of the requests (prompt and answer); a row's text is known from its committed tokens.
    The inner drafter sees every commit and makes every proposal; only tokens are replaced, and it hears how its own
    drafts fared with those tokens in them, as far as it had made any.
    """

    Config = DrafterConfig

    def __init__(self, inner: Drafter, texts: Sequence[Sequence[int]], *, seed: int = 0) -> None:
        super().__init__(inner.config, inner.hooks)
        self.inner = inner
        self.texts = [list(t) for t in texts]
        self.target_layer_ids, self.target_kv_layers = inner.target_layer_ids, inner.target_kv_layers
        self.max_draft_tokens = 16
        self.max_positions = inner.max_positions
        self._random = random.Random(seed)
        self._seen: dict[int, list[int]] = {}

    def new_state(self, num_rows: int) -> State:
        return self.inner.new_state(num_rows)

    def commit(self, state: State, new: Commit) -> None:
        for b, row in enumerate(new.rows):
            old, more = self._seen.get(row, []), list(new.tokens[b])
            if new.verdict is None and not self._continues(old, more):
                old = []  # the first chunk of a new request
            self._seen[row] = old + more
        self.inner.commit(state, new if new.verdict is None else replace(new, verdict=self._of_inner(new.verdict)))

    @staticmethod
    def _of_inner(verdict: Verdict) -> Verdict:
        own = []
        for draft in verdict.drafts:
            made = draft.notes if isinstance(draft.notes, Draft) else Draft()
            tokens = draft.tokens[: len(made.tokens)]
            own.append(cut(made, len(tokens))._replace(tokens=tokens))
        hits = [min(n, len(draft.tokens)) for n, draft in zip(verdict.num_accepted, own, strict=True)]
        return Verdict(own, hits)

    def _continues(self, old: list[int], more: list[int]) -> bool:
        return any(t[: len(old) + len(more)] == old + more for t in self.texts)

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        asked = replace(request, num_tokens=[max(1, min(n, self.inner.max_draft_tokens)) for n in request.num_tokens])
        made = []
        for b, own in enumerate(self.inner.propose(state, asked).drafts):
            text = [*self._seen.get(request.rows[b], []), request.anchors[b]]
            right = next((t[len(text) :] for t in self.texts if t[: len(text)] == text), [])
            right = right[: self._random.randint(0, request.num_tokens[b])]
            made.append(Draft([*right, *own.tokens[len(right) :]][: request.num_tokens[b]], notes=own))
        return Proposal(made)

    def cost(self, context_tokens: int) -> DraftCost:
        return self.inner.cost(context_tokens)
