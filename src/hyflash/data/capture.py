"""Run the target over its own answers and keep the features a drafter learns from.

In: a target, answers and the tapped layers. Out: `Example`s, one per answer and in the same order: tokens, features
as float16, masks, and the target's keys and values where they are asked for. `LiveSource` captures when asked and
`ShardReader` (shards.py) reads what was captured before; both are an `ExampleSource`, and training cannot
tell them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hyflash.core import Rows
from hyflash.data.answers import Answer
from hyflash.errors import NonFiniteError, UserError
from hyflash.metrics import in_loop
from hyflash.targets.base import Target, copy_kv

FEATURE_LIMIT = 65504.0
"""Largest float16; features beyond it (massive activations) are clamped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt and answer with the target's features. T counts prompt and answer tokens."""

    id: str
    domain: str
    tokens: Tensor  # (T,) int64
    prompt_len: int
    features: Tensor  # (T, C, D) float16, clamped to +-65504
    loss_mask: Tensor  # (T,) bool, True on answer tokens
    loop_mask: Tensor  # (T,) bool, True on answer tokens inside a loop of the answer
    kv: Tensor | None = None  # (T, R, 2, G, K) float16, rotated keys and values of the target; None where not captured
    start: int = 0  # position of the first token, where it is a part of a longer text


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """What a card says about the data."""

    target_name: str
    target_fingerprint: str
    taps: tuple[int, ...]
    hidden_size: int
    data_hash: str
    num_examples: int
    num_tokens: int
    num_label_tokens: int
    kv_layers: tuple[int, ...] = ()


class ExampleSource(Protocol):
    """Examples by id; `ids` are in one canonical order, so a sampler gives the same batches for every source."""

    @property
    def info(self) -> SourceInfo:
        """Facts for the card."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """The answers' side file: template, sampling and the like."""

    @property
    def ids(self) -> Sequence[str]:
        """Ids of all examples, sorted."""

    def length(self, example_id: str) -> int:
        """Tokens of the example."""

    def fetch(self, ids: Sequence[str], *, features: bool = True) -> list[Example]:
        """The examples in the order asked; without `features` they have no taps, and no target runs for them."""

    def label_counts(self, ids: Sequence[str], vocab_size: int) -> Tensor:
        """How often each token is a label in these examples: (vocab_size,) int64."""


def capture(
    target: Target,
    answers: Iterable[Answer],
    *,
    taps: Sequence[int],
    kv_layers: Sequence[int] = (),
    batch_tokens: int = 4096,
) -> Iterator[Example]:
    """Capture each answer's features at `taps`, and the target's keys and values at `kv_layers`.

    Several sequences share a forward of at most `batch_tokens` tokens; a longer one is fed in pieces of that
    size. Raises UserError for an answer longer than the target's context, NonFiniteError when features are NaN.
    """
    if batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; expected at least 1.")
    pack: list[Answer] = []
    size = 0
    for answer in answers:
        if pack and size + answer.num_tokens > batch_tokens:
            yield from _capture_pack(target, pack, tuple(taps), kv_layers, batch_tokens)
            pack, size = [], 0
        pack.append(answer)
        size += answer.num_tokens
    if pack:
        yield from _capture_pack(target, pack, tuple(taps), kv_layers, batch_tokens)


@torch.no_grad()
def _capture_pack(
    target: Target, pack: list[Answer], taps: tuple[int, ...], kv_layers: Sequence[int], batch_tokens: int
) -> list[Example]:
    """One forward for a pack; pieces of `batch_tokens` when a single long sequence is the pack."""
    check_fit(target, pack)
    seqs = [target.open() for _ in pack]
    try:
        flat = torch.tensor([t for a in pack for t in (*a.prompt_ids, *a.answer_ids)], dtype=torch.int64)
        pieces: list[Tensor] = []
        for first in range(0, len(flat), batch_tokens):
            tokens = flat[first : first + batch_tokens]
            lengths = tuple(a.num_tokens for a in pack) if len(pack) > 1 else (len(tokens),)
            out = target.forward(Rows(tokens=tokens, seqs=tuple(seqs), lengths=lengths, taps=taps, logits="none"))
            if out.features is None:
                raise UserError("a drafter without taps needs no capture; expected at least one tapped layer.")
            pieces.append(to_half(out.features))
        kv = [to_half(copy_kv(target, seq, kv_layers)) if kv_layers else None for seq in seqs]
    finally:
        for seq in seqs:
            target.close(seq)
    rows = torch.split(torch.cat(pieces), [a.num_tokens for a in pack])
    return [_example(answer, features.clone(), own) for answer, features, own in zip(pack, rows, kv, strict=True)]


def check_fit(target: Target, answers: Iterable[Answer]) -> None:
    """Refuse an answer that the target cannot read, before hours go into the others. Raises UserError."""
    for answer in answers:
        largest = max(max(answer.prompt_ids), max(answer.answer_ids))
        if largest >= target.info.vocab_size:
            raise UserError(
                f"answer {answer.id}: token {largest} is outside the vocabulary of {target.info.name}, "
                f"{target.info.vocab_size} tokens; the answers are of another target."
            )
        if answer.num_tokens > target.info.max_context:
            raise UserError(
                f"answer {answer.id}: {answer.num_tokens} tokens do not fit the context of {target.info.name}, "
                f"{target.info.max_context} tokens; regenerate with a smaller max_tokens or drop the row."
            )


def to_half(features: Tensor) -> Tensor:
    """Features clamped to +-65504 as float16 on the CPU; NaN stays NaN and is refused by the caller."""
    return features.float().clamp(-FEATURE_LIMIT, FEATURE_LIMIT).to("cpu", torch.float16)


def _example(answer: Answer, features: Tensor, kv: Tensor | None = None) -> Example:
    if not torch.isfinite(features).all() or (kv is not None and not torch.isfinite(kv).all()):
        raise NonFiniteError(
            f"the target's features of answer {answer.id} hold NaN; its weights or dtype are at fault."
        )
    num_prompt = len(answer.prompt_ids)
    loss_mask = torch.arange(answer.num_tokens) >= num_prompt
    loop_mask = torch.zeros(answer.num_tokens, dtype=torch.bool)
    loop_mask[num_prompt:] = torch.tensor(in_loop(answer.answer_ids), dtype=torch.bool)
    return Example(
        id=answer.id,
        domain=answer.domain,
        tokens=torch.tensor((*answer.prompt_ids, *answer.answer_ids), dtype=torch.int64),
        prompt_len=num_prompt,
        features=features,
        loss_mask=loss_mask,
        loop_mask=loop_mask,
        kv=kv,
    )


def no_features(num_tokens: int, info: SourceInfo) -> Tensor:
    """Features (T, 0, D) of a text whose features nobody reads."""
    return torch.zeros(num_tokens, 0, info.hidden_size, dtype=torch.float16)


def data_hash(answers: Iterable[Answer]) -> str:
    """SHA-256 over ids and tokens of the answers, whatever their order."""
    digest = hashlib.sha256()
    for a in sorted(answers, key=lambda a: a.id):
        digest.update(repr((a.id, a.prompt_ids, a.answer_ids)).encode())
    return digest.hexdigest()


def check_own_answers(target: Target, meta: Mapping[str, Any]) -> None:
    """Refuse answers whose side file names another target. Raises UserError."""
    theirs = meta.get("fingerprint", target.info.fingerprint)
    if theirs != target.info.fingerprint:
        raise UserError(
            f"the answers are of target {meta.get('target')!r} with fingerprint {theirs}, but {target.info.name} has "
            f"{target.info.fingerprint}; a drafter must learn from its own target's answers. Regenerate them."
        )


class LiveSource:
    """Captures examples when they are asked for: no disk, one target forward per use.

    `meta` is the answers' side file. Raises UserError when it names another target.
    """

    def __init__(
        self,
        target: Target,
        answers: Sequence[Answer],
        *,
        taps: Sequence[int],
        kv_layers: Sequence[int] = (),
        meta: Mapping[str, Any] | None = None,
        batch_tokens: int = 4096,
    ) -> None:
        check_own_answers(target, meta or {})
        check_fit(target, answers)
        self._target = target
        self._answers = {a.id: a for a in answers}
        self._taps, self._kv_layers = tuple(taps), tuple(kv_layers)
        self._batch_tokens = batch_tokens
        self.ids: Sequence[str] = sorted(self._answers)
        self.info = source_info(target, answers, taps=self._taps, kv_layers=self._kv_layers)
        self.meta: Mapping[str, Any] = dict(meta or {})

    def length(self, example_id: str) -> int:
        """Tokens of the example."""
        return self._answers[example_id].num_tokens

    def fetch(self, ids: Sequence[str], *, features: bool = True) -> list[Example]:
        """Capture these examples now."""
        chosen = [self._answers[i] for i in ids]
        layers = self._kv_layers
        if not features or not (self._taps or layers):
            return [_example(a, no_features(a.num_tokens, self.info)) for a in chosen]
        return list(capture(self._target, chosen, taps=self._taps, kv_layers=layers, batch_tokens=self._batch_tokens))

    def label_counts(self, ids: Sequence[str], vocab_size: int) -> Tensor:
        """Counts of the answer tokens of these examples: (vocab_size,) int64."""
        labels = torch.tensor([t for i in ids for t in self._answers[i].answer_ids], dtype=torch.int64)
        return torch.bincount(labels, minlength=vocab_size)


def source_info(
    target: Target, answers: Sequence[Answer], *, taps: tuple[int, ...], kv_layers: tuple[int, ...] = ()
) -> SourceInfo:
    """Facts of a capture of `answers` with `target`."""
    return SourceInfo(
        target_name=target.info.name,
        target_fingerprint=target.info.fingerprint,
        taps=taps,
        hidden_size=target.info.hidden_size,
        data_hash=data_hash(answers),
        num_examples=len(answers),
        num_tokens=sum(a.num_tokens for a in answers),
        num_label_tokens=sum(len(a.answer_ids) for a in answers),
        kv_layers=kv_layers,
    )
