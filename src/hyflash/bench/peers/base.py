"""What an engine must do to have its forwards timed: feed a context, verify rows, forget them again.

In: a model file and a thread count. Out: an `Engine`. Ours and the peers are measured through this one contract, so
that all of them do the same: one forward of some rows after some context, with logits of every row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hyflash.bench.floors import Work

PIECE = 512
"""Tokens of a prompt that every engine feeds at once."""


class MissingPeer(Exception):
    """A peer that is not here or cannot run this model; the message says why and what to do."""


class Engine(ABC):
    """One model in one engine with one sequence. `verify` is what is timed."""

    name: str
    """As printed: hyflash native, llama.cpp, ..."""
    weights: str
    """Type of the weights, by GGUF's names."""
    work: Work
    """What one of its forwards reads and computes."""
    about: dict[str, str]
    """Version and how it was built."""
    max_tokens: int
    """Longest context it can hold."""

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Where all of the methods below are called: llama.cpp sets AMX up once a thread and expects to stay alone."""
        return ThreadPoolExecutor(max_workers=1)

    def end(self) -> None:
        """Close, and end the thread."""
        self.thread.submit(self.close).result()
        self.thread.shutdown()

    @abstractmethod
    def start(self, ids: Sequence[int]) -> None:
        """Forget everything, then feed these tokens as a prompt, as fast as the engine can."""

    @abstractmethod
    def verify(self, ids: Sequence[int]) -> None:
        """One forward of these tokens after the prompt; logits of every row are ready when it returns."""

    @abstractmethod
    def logits(self) -> NDArray[np.float32]:
        """Logits (rows, vocabulary) of the last `verify`."""

    @abstractmethod
    def rewind(self) -> None:
        """Forget the rows of the last `verify`; the prompt stays."""

    @abstractmethod
    def close(self) -> None:
        """Give memory and threads back."""
