"""A target that replays recorded texts: its next token is the recorded one, its features were captured before.

In: recordings (prompt, answer, features). Out: a `Target` whose greedy text is the recording, so the engine
measures a drafter's acceptance on known answers without running the model. Rows behind a wrong draft are
garbage, as they are in a real forward; nothing reads them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from hyflash.core import Rows, TargetHooks, TargetOutput
from hyflash.errors import UserError
from hyflash.ops.online_softmax import look
from hyflash.targets.base import Exactness, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One answered prompt with the features of its tokens."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    features: Tensor | None  # (T, C, D) of prompt + answer, at `taps`
    taps: tuple[int, ...] = ()
    kv: Tensor | None = None  # (T, R, 2, G, K) keys and values of prompt + answer, at `kv_layers`
    kv_layers: tuple[int, ...] = ()

    def read(self, row: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """As a `TargetKV` of this text, whatever the row. Raises UserError for a layer that was not recorded."""
        if self.kv is None or layer not in self.kv_layers:
            raise UserError(f"the recording has no keys and values of layer {layer}, but {list(self.kv_layers)}.")
        both = self.kv[first:last, self.kv_layers.index(layer)].float()
        return both[:, 0], both[:, 1]

    def attend(self, row: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """As a `TargetKV`; raises as `read`."""
        return look(queries, *self.read(row, layer, first, last))


class ReplayTarget(Target):
    """Sequences are recordings, in the order in which they are opened."""

    def __init__(self, hooks: TargetHooks, recordings: list[Recording]) -> None:
        self._hooks = hooks
        self.info = hooks.info
        self.exactness: Exactness = "invariant"
        self.epsilon = 0.0
        self._queue = deque(recordings)
        self._open: dict[int, Recording] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    def open(self) -> int:
        """Start the next recording."""
        self._open[self._next] = self._queue.popleft()
        self._lengths[self._next] = 0
        self._next += 1
        return self._next - 1

    def close(self, seq: int) -> None:
        """Forget a recording."""
        del self._open[seq], self._lengths[seq]

    def length(self, seq: int) -> int:
        """Tokens replayed so far."""
        return self._lengths[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Step back."""
        self._lengths[seq] = length

    def kv_view(self, seq: int, layer: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Recorded keys and values; see `Target.kv_view`."""
        first, last = self._kv_span(seq, layer, first, last)
        return self._open[seq].read(0, layer, first, last)

    def forward(self, rows: Rows) -> TargetOutput:
        """Recorded features, and logits that are 1 at the recorded next token."""
        nexts: list[int] = []
        features: list[Tensor] = []
        for seq, n in zip(rows.seqs, rows.lengths, strict=True):
            recording, start = self._open[seq], self._lengths[seq]
            text = recording.prompt_ids + recording.answer_ids
            # Behind the end (rejected drafts only) the last token stands in.
            last = len(text) - 1
            positions = [min(p, last) for p in range(start, start + n)]
            nexts += [text[min(p + 1, last)] for p in positions]
            if rows.taps:
                assert recording.features is not None
                select = [recording.taps.index(tap) for tap in rows.taps]
                available = recording.features.shape[0] - 1
                features.append(recording.features[[min(p, available) for p in positions]][:, select].float())
            self._lengths[seq] = start + n
        logits = None
        if rows.logits != "none":
            logits = torch.zeros(len(nexts), self.info.vocab_size)
            logits[torch.arange(len(nexts)), torch.tensor(nexts)] = 1.0
        return TargetOutput(logits=logits, features=torch.cat(features) if features else None)

    def hooks(self) -> TargetHooks:
        """The recorded target's own embedding and head."""
        return self._hooks

    def kv_bytes(self) -> int:
        """A replay holds no KV."""
        return 0
