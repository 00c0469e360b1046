"""Several captures as one: short answers beside long ones, new ones beside old ones.

In: `ExampleSource`s of one target with the same taps and no example in common. Out: one `ExampleSource`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyflash.data.capture import Example, ExampleSource, SourceInfo
from hyflash.errors import UserError


class JoinedSource:
    """The examples of all `sources`, (name, source) pairs. Raises UserError where two hold an example of the same id,
    differ in taps or are of different targets."""

    def __init__(self, sources: Sequence[tuple[str, ExampleSource]]) -> None:
        first_name, first = sources[0]
        self._home: dict[str, ExampleSource] = {}
        for name, source in sources:
            for fact in ("target_fingerprint", "taps", "kv_layers", "hidden_size"):
                want, found = getattr(first.info, fact), getattr(source.info, fact)
                if want != found:
                    raise UserError(
                        f"{name}: {fact} is {found}, in {first_name} it is {want}; captures that are joined must be "
                        "of one target with the same taps."
                    )
            twice = next((i for i in source.ids if i in self._home), None)
            if twice is not None:
                raise UserError(f"{name}: example {twice} is in another capture too; leave one of them out.")
            self._home.update(dict.fromkeys(source.ids, source))
        infos = [source.info for _, source in sources]
        self.ids: Sequence[str] = sorted(self._home)
        self.meta: Mapping[str, Any] = first.meta
        """The first capture's."""
        self.info: SourceInfo = replace(
            first.info,
            data_hash=hashlib.sha256(" ".join(info.data_hash for info in infos).encode()).hexdigest(),
            num_examples=sum(info.num_examples for info in infos),
            num_tokens=sum(info.num_tokens for info in infos),
            num_label_tokens=sum(info.num_label_tokens for info in infos),
        )

    def length(self, example_id: str) -> int:
        """Tokens of the example."""
        return self._home[example_id].length(example_id)

    def fetch(self, ids: Sequence[str], *, features: bool = True) -> list[Example]:
        """The examples in the order asked."""
        return [self._home[i].fetch([i], features=features)[0] for i in ids]

    def label_counts(self, ids: Sequence[str], vocab_size: int) -> Tensor:
        """Sums of the captures' counts."""
        by_source: dict[int, tuple[ExampleSource, list[str]]] = {}
        for i in ids:
            by_source.setdefault(id(self._home[i]), (self._home[i], []))[1].append(i)
        counts = [source.label_counts(own, vocab_size) for source, own in by_source.values()]
        return sum(counts, start=torch.zeros(vocab_size, dtype=torch.int64))
