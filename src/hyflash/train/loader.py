"""The order of training: which examples are held out, and which batch comes next.

In: an `ExampleSource` and the [data] table. Out: batches. The order of an epoch follows from (seed, epoch) alone, so
the position of a run is two numbers and a resumed run sees the very batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from hyflash.core import TrainBatch
from hyflash.data.anchors import build_batch, make_rng
from hyflash.data.capture import Example, ExampleSource, SourceInfo
from hyflash.data.prompts import held_out_rank
from hyflash.errors import UserError
from hyflash.train.recipe import DataTable

_POOL_BATCHES = 16
"""Batches are cut from pools of this many, sorted by length: little padding, still random."""


class LayerSelection:
    """An `ExampleSource` that gives only some of the captured taps and of the layers' keys and values, in a drafter's
    order."""

    def __init__(self, source: ExampleSource, taps: Sequence[int], kv_layers: Sequence[int]) -> None:
        have, held = source.info.taps, source.info.kv_layers
        missing = [t for t in taps if t not in have]
        if missing:
            raise UserError(
                f"the data has taps {list(have)}, the drafter reads {list(taps)}: {missing} are missing; "
                "capture again with the drafter's taps."
            )
        missing = [layer for layer in kv_layers if layer not in held]
        if missing:
            found = f"has those of layers {list(held)}" if held else "has none"
            raise UserError(
                f"the drafter reads keys and values of the target's layers {list(kv_layers)}, and the data {found}; "
                f"capture again with the drafter's recipe, or --kv-layers {','.join(map(str, kv_layers))}."
            )
        self._source = source
        self._places = [have.index(t) for t in taps]
        self._kv_places = [held.index(layer) for layer in kv_layers]
        self.ids = source.ids
        self.meta = source.meta
        self.info: SourceInfo = replace(source.info, taps=tuple(taps), kv_layers=tuple(kv_layers))

    def length(self, example_id: str) -> int:
        """Tokens of the example."""
        return self._source.length(example_id)

    def fetch(self, ids: Sequence[str], *, features: bool = True) -> list[Example]:
        """The examples with what was chosen."""
        examples = self._source.fetch(ids, features=features)
        return [self._select(e) for e in examples] if features else examples

    def _select(self, example: Example) -> Example:
        kv = example.kv[:, self._kv_places] if example.kv is not None and self._kv_places else None
        return replace(example, features=example.features[:, self._places], kv=kv)

    def label_counts(self, ids: Sequence[str], vocab_size: int) -> Tensor:
        """As the source's."""
        return self._source.label_counts(ids, vocab_size)


def select_layers(source: ExampleSource, taps: Sequence[int], kv_layers: Sequence[int] = ()) -> ExampleSource:
    """The source itself when its layers are those of the drafter, else a selection. Raises UserError."""
    same = source.info.taps == tuple(taps) and source.info.kv_layers == tuple(kv_layers)
    return source if same else LayerSelection(source, taps, kv_layers)


def hold_out(ids: Sequence[str], count: int, *, seed: int) -> tuple[list[str], list[str]]:
    """Split ids into (training, held out) by hash; the order of both is that of `ids`."""
    chosen = set(sorted(ids, key=lambda i: held_out_rank(i, seed))[:count])
    return [i for i in ids if i not in chosen], [i for i in ids if i in chosen]


def epoch_batches(
    ids: Sequence[str], lengths: Sequence[int], *, batch_sequences: int, seed: int, epoch: int
) -> list[list[str]]:
    """All ids once, shuffled, in batches of near lengths; the last batch of a pool may be smaller."""
    rng = make_rng(seed, epoch, "", "order")
    order = rng.permutation(len(ids))
    batches: list[list[str]] = []
    pool_size = batch_sequences * _POOL_BATCHES
    for first in range(0, len(order), pool_size):
        pool = order[first : first + pool_size]
        pool = pool[np.argsort([lengths[i] for i in pool], kind="stable")]
        batches += [[ids[i] for i in pool[k : k + batch_sequences]] for k in range(0, len(pool), batch_sequences)]
    return [batches[i] for i in rng.permutation(len(batches))]


class BatchStream:
    """Endless training batches; (`epoch`, `index`) is the next one's place. Without `features` they have no taps."""

    def __init__(
        self, source: ExampleSource, ids: Sequence[str], options: DataTable, *, seed: int, features: bool = True
    ) -> None:
        if not ids:
            raise UserError("no example is left to train on; add data or lower data.held_out.")
        self._source, self._ids, self._options, self._seed = source, list(ids), options, seed
        self._features = features
        self._lengths = [source.length(i) for i in self._ids]
        self.epoch = 0
        self.index = 0
        self._plan = self._plan_epoch()

    def seek(self, epoch: int, index: int) -> None:
        """Go to a place of an earlier run."""
        self.epoch, self.index = epoch, index
        self._plan = self._plan_epoch()

    def next(self) -> TrainBatch:
        """The next batch; after the last of an epoch the next epoch begins."""
        if self.index == len(self._plan):
            self.seek(self.epoch + 1, 0)
        chosen = self._plan[self.index]
        batch = build_batch(self._fetch(chosen), self._options, seed=self._seed, epoch=self.epoch)
        self.index += 1
        return batch

    def first(self, max_tokens: int) -> list[TrainBatch]:
        """Batches of the first epoch with every position an anchor, up to about `max_tokens` tokens."""
        options = self._options.model_copy(update={"anchors_per_sequence": 0})
        batches: list[TrainBatch] = []
        total = 0
        for chosen in self._plan_epoch(0):
            if total >= max_tokens:
                break
            batches.append(build_batch(self._fetch(chosen), options, seed=self._seed, epoch=0))
            total += int(batches[-1].lengths.sum())
        return batches

    def _fetch(self, ids: Sequence[str]) -> list[Example]:
        return self._source.fetch(ids, features=self._features)

    def _plan_epoch(self, epoch: int | None = None) -> list[list[str]]:
        return epoch_batches(
            self._ids,
            self._lengths,
            batch_sequences=self._options.batch_sequences,
            seed=self._seed,
            epoch=self.epoch if epoch is None else epoch,
        )
