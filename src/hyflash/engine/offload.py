"""A drafter's weights leave memory while it is short and nobody drafts, and come back when there is room.

In: free memory, read now and then, and whether rounds draft. Out: whether the drafter may run. From Nightjar
(arXiv 2512.22420), which moves the weights of a drafter that is switched off from a GPU to the host when free memory
stays below a threshold. Weights on a CPU have nowhere to go, so there (ours) they are dropped and read from their file
again; a drafter that is not from a file stays. What the drafter knows of the texts goes as well, and is read again.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hyflash import checkpoint, environment
from hyflash.core import Rows
from hyflash.drafters.base import Drafter
from hyflash.errors import HyflashError, UserError
from hyflash.ops.kernels import Kernels
from hyflash.targets.base import Target

PATIENCE_SEC = 2.0
"""For so long memory must be short, or have room, without a break."""
READ_SEC = 0.25
"""Free memory is read no more often."""


def unfit(drafter: Drafter | None) -> str:
    """Why the weights of this drafter cannot leave memory, in a sentence; empty where they can."""
    parts = _parts(drafter) if drafter is not None else []
    if not parts:
        return "offloading does nothing: the drafter has no weights."
    for part in parts:
        if _device(part).type == "cpu" and part.loaded_from is None:
            name = type(part).__module__.rpartition(".")[2]
            return f"offloading does nothing: {name} is not wholly from a checkpoint, to read it from again."
    if free_bytes(_device(parts[0])) is None:
        return "offloading does nothing: this system does not say how much memory is free."
    return ""


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return environment.free_memory_bytes()


class Offload:
    """Watches free memory for one drafter. `free` and `clock` are given by tests.

    `low_bytes`: weights leave when less is free. They come back when as much is free with them in place. `kernels` are
    those that the drafter serves on, if any.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        low_bytes: int,
        kernels: Kernels | None = None,
        free: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if low_bytes < 1:
            raise UserError(f"offload_below is {low_bytes} bytes; expected at least 1.")
        self.is_away = False
        self.num_released = self.num_restored = 0
        self._parts = [_Weights(part, kernels) for part in _parts(drafter)]
        self._low = low_bytes
        # Packed copies are smaller than what they are made from, so twice is room enough.
        self._high = low_bytes + 2 * sum(part.num_bytes for part in self._parts)
        home = next((part.device for part in self._parts), torch.device("cpu"))  # also while they are away
        self._free, self._clock = free if free is not None else partial(free_bytes, home), clock
        self._read_at = float("-inf")
        self._short_since: float | None = None
        self._room_since: float | None = None
        self._is_lost = False

    def may_draft(self) -> bool:
        """Whether the weights are here, or there is room for them again."""
        if not self.is_away:
            return True
        self._look()
        return not self._is_lost and self._lasts(self._room_since)

    def bring_back(self) -> bool:
        """Restore the weights if they are away; whether they are here now.

        A file that cannot be read any more is warned about once; text goes on without drafts.
        """
        if not self.is_away:
            return True
        try:
            for part in self._parts:
                part.restore()
        except (HyflashError, OSError) as err:
            warnings.warn(f"the drafter's weights cannot be restored; no more drafts: {err}", stacklevel=2)
            self._is_lost = True
            return False
        self.is_away = False
        self.num_restored += 1
        return True

    def after_round(self, *, drafted: bool) -> bool:
        """Release the weights if memory has been short for long enough and the round went without drafting.

        Whether they have left by this: then the caller lets go of the drafter's state as well.
        """
        if self.is_away:
            return False
        self._look()
        if drafted or not self._lasts(self._short_since):
            return False
        for part in self._parts:
            part.release()
        environment.return_freed_memory()
        torch.cuda.empty_cache()  # the same of what torch keeps on a GPU; nothing without one
        self.is_away = True
        self.num_released += 1
        self._room_since = None
        return True

    def _lasts(self, since: float | None) -> bool:
        return since is not None and self._clock() - since >= PATIENCE_SEC

    def _look(self) -> None:
        now = self._clock()
        if now - self._read_at < READ_SEC:
            return
        self._read_at, free = now, self._free()
        short, room = free is not None and free < self._low, free is not None and free >= self._high
        self._short_since = (self._short_since if self._short_since is not None else now) if short else None
        self._room_since = (self._room_since if self._room_since is not None else now) if room else None


class _Weights:
    """The weights of one drafter, here or away."""

    def __init__(self, drafter: Drafter, kernels: Kernels | None) -> None:
        self._drafter, self._kernels = drafter, kernels
        self.device = _device(drafter)
        self._unsaved: dict[str, Tensor] = {}
        self.num_bytes = sum(t.nbytes for t in (*drafter.parameters(), *drafter.buffers()))

    def release(self) -> None:
        if self.device.type != "cpu":
            self._drafter.to("cpu")
            return
        saved = self._drafter.state_dict()
        self._unsaved = {name: t.clone() for name, t in self._drafter.named_buffers() if name not in saved}
        del saved
        self._drafter.to("meta")  # shapes without memory; packed copies go with what they were made from

    def restore(self) -> None:
        """Raises HyflashError or OSError where the file is not what it was."""
        if self.device.type != "cpu":
            self._drafter.to(self.device)
            return
        self._drafter.to_empty(device=self.device)
        checkpoint.refill(self._drafter)
        buffers = dict(self._drafter.named_buffers())
        for name, tensor in self._unsaved.items():
            buffers[name].copy_(tensor)
        self._drafter.use_kernels(self._kernels)


def read_again(
    target: Target, text: Sequence[int], *, taps: tuple[int, ...], chunk: int
) -> Iterator[tuple[Sequence[int], Tensor | None]]:
    """A text in chunks with the target's features (N, C, D) of each, through a sequence of its own."""
    seq = target.open()
    try:
        for begin in range(0, len(text), chunk):
            part = text[begin : begin + chunk]
            rows = Rows(tokens=torch.tensor(part), seqs=(seq,), lengths=(len(part),), taps=taps, logits="none")
            yield part, target.forward(rows).features
    finally:
        target.close(seq)


def _parts(drafter: Drafter) -> list[Drafter]:
    """The drafters within that have weights of their own."""
    found = [module for module in drafter.modules() if isinstance(module, Drafter)]
    leaves = [d for d in found if not any(isinstance(m, Drafter) for m in d.modules() if m is not d)]
    return [d for d in leaves if next(d.parameters(), None) is not None]


def _device(drafter: Drafter) -> torch.device:
    return next(drafter.parameters()).device
