"""The head of a block drafter: the target's own, or a few of its rows.

On a small target the head is most of a draft pass. A reduced head has a static list of frequent tokens and adds the
tokens that this context used last, which covers more than a list twice as long (FR-Spec, arXiv 2502.14856, has the
static part). In: hidden states and each row's words. Out: logits and the ids they stand for. A drafter's own low-rank
addition to the logits is computed for the same ids.

The words of a context are a fixed number of different tokens outside the static list, so that neither the state nor
the time of a pass grows with the context: (N,) int32 on the CPU, the last used first, ids + 1 and 0 where empty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyflash.core import TargetHooks
from hyflash.layers import GRUCorrection, MarkovCorrection

# Finite, so that a masked column is not taken for a fault of the drafter.
HIDDEN_LOGIT = -1e30
WORDS = "words"
"""Name of a context's words in a state."""

Step = Callable[[int, Tensor], Tensor]
"""Logits (B, M) at draft position k, from 0, after the tokens (B,) chosen before it; asked for one after another."""


class HeadRows:
    """Single rows of the target's head; what it does beside its weights (scale, bias) is measured once.

    A soft-cap is left out: it keeps the order of tokens.
    """

    def __init__(self, hooks: TargetHooks) -> None:
        ids = torch.arange(min(64, hooks.info.vocab_size), device=hooks.info.device)
        rows = hooks.head_rows(ids).detach()
        probe = rows.float().mean(0) + rows[0].float()
        probe = (probe / probe.norm().clamp(min=1e-12)).to(rows.dtype)
        bias = hooks.head(torch.zeros_like(probe)).detach()
        plain = (rows @ probe).float()
        real = (hooks.head(probe).detach() - bias)[ids].float()
        scale = float((plain @ real) / (plain @ plain).clamp(min=1e-12))
        self.hooks = hooks
        self.scale = 1.0 if abs(scale - 1.0) < 0.02 else scale  # a soft-cap and rounding bend it a little
        self.bias = bias if bool(bias.any()) else None

    def with_bias(self, more: Tensor) -> HeadRows:
        """The same rows with a bias (V,) on top."""
        out = copy.copy(self)
        out.bias = more if self.bias is None else self.bias + more
        return out

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight (n, D) and bias (n,) or None of token ids (n,)."""
        weight = self.hooks.head_rows(ids).detach()
        return weight if self.scale == 1.0 else weight * self.scale, None if self.bias is None else self.bias[ids]


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits (..., n) of hidden (..., D), in the weight's dtype."""
    out = hidden.to(weight.dtype) @ weight.T
    return out if bias is None else out + bias.to(out.dtype)


def full_head(hooks: TargetHooks, hidden: Tensor) -> Tensor:
    """The target's whole head on hidden (..., D) of any float dtype -> (..., V)."""
    one = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    return hooks.head(hidden.to(hooks.head_rows(one).dtype))


def likeliest(logits: Tensor) -> Tensor:
    """First largest column (B,) of logits (B, M)."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingHead:
    """Head of one round for B rows."""

    hooks: TargetHooks
    ids: Tensor | None  # (M,) int64, ids of the logit columns; None: the whole vocabulary
    # Weight and bias of M columns in parts; not joined, as that would copy the static list each round.
    parts: tuple[tuple[Tensor, Tensor | None], ...]
    allowed: Tensor | None  # (B, M) bool, columns each row may choose
    tables: tuple[Tensor, ...] = ()  # rows (M, R) of a low-rank addition, in the same parts

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (B, L, M) of hidden (B, L, D)."""
        if self.allowed is None:
            return full_head(self.hooks, hidden)
        out = torch.cat([head_logits(hidden, weight, bias) for weight, bias in self.parts], dim=-1)
        return out.float().masked_fill(~self.allowed[:, None], HIDDEN_LOGIT)

    def addition(self, latent: Tensor) -> Tensor:
        """What a latent (..., R) adds to the logits (..., M)."""
        return torch.cat([latent @ table.T for table in self.tables], dim=-1).float()

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of logit columns."""
        return columns if self.ids is None else self.ids[columns]

    def all_ids(self, logits: Tensor) -> Tensor:
        """Token ids (M,) of all columns of logits (..., M)."""
        return torch.arange(logits.shape[-1], device=logits.device) if self.ids is None else self.ids

    def corrected(
        self, hidden: Tensor, correction: MarkovCorrection | GRUCorrection, embed: Callable[[Tensor], Tensor]
    ) -> Step:
        """Logits of hidden (B, L, D), each position's corrected by the tokens before it."""
        state = hidden.new_zeros(len(hidden), correction.state_width)

        def step(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            fixed, state = correction(hidden[:, k : k + 1], embed(previous)[:, None], state)
            return self.logits(fixed)[:, 0]

        return step

    def chain(
        self, anchors: Tensor, num_tokens: int, step: Step, pick: Callable[[Tensor], Tensor] = likeliest
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, L, M), position after position, and the token ids (B, L) before each; `pick` chooses columns (B,)
        of logits (B, M)."""
        previous, logits = [anchors], []
        for k in range(num_tokens):
            logits.append(step(k, previous[k]))
            previous.append(self.token_ids(pick(logits[k])))
        return torch.stack(logits, dim=1), torch.stack(previous[:-1], dim=1)


def use_words(words: Tensor, tokens: Sequence[int], outside: NDArray[np.bool_]) -> None:
    """Take the tokens that come next into a context's words (N,); `outside` (V,): not in the static list."""
    used = np.asarray(tokens, dtype=np.int64)
    fresh = used[outside[used]][::-1] + 1
    if fresh.size:
        known = words.numpy()
        order = np.concatenate((fresh.astype(np.int32), known[known > 0]))
        _, first = np.unique(order, return_index=True)
        kept = order[np.sort(first)][: len(known)]
        known[: len(kept)] = kept


def words_of(words: Tensor, anchor: int, outside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Ids (n,), ascending, of a context's words (N,) and of its anchor if the static list lacks it."""
    known = words.numpy()
    ids = np.sort(known[known > 0]).astype(np.int64) - 1
    if outside[anchor]:
        at = int(np.searchsorted(ids, anchor))
        if at == len(ids) or ids[at] != anchor:
            ids = np.insert(ids, at, anchor)
    return ids


class ReducedHead:
    """Keeps the head rows of a static list and adds rows per round."""

    def __init__(self, rows: HeadRows, ids: Tensor, table: Tensor | None = None) -> None:
        """`table` (V, R) of a low-rank addition to the logits, if there is one."""
        self.rows = rows
        self.ids = ids
        self.static = rows(ids)
        self.table = table
        self.static_table = None if table is None else table[ids]
        self.outside = outside_of(ids, rows.hooks.info.vocab_size)

    def serving(self, words: Sequence[Tensor], anchors: Sequence[int]) -> ServingHead:
        """Head for B contexts' words (N,) and their anchors: the static list, the words and the anchors' own tokens."""
        own = [words_of(some, anchor, self.outside) for some, anchor in zip(words, anchors, strict=True)]
        every, device = np.unique(np.concatenate(own)), self.ids.device
        more = torch.from_numpy(every).to(device)
        extra = torch.from_numpy(np.stack([np.isin(every, ids, assume_unique=True) for ids in own])).to(device)
        static = torch.ones(len(own), len(self.ids), dtype=torch.bool, device=device)
        return ServingHead(
            hooks=self.rows.hooks,
            ids=torch.cat((self.ids, more)),
            parts=(self.static, self.rows(more)),
            allowed=torch.cat((static, extra), dim=1),
            tables=() if self.table is None or self.static_table is None else (self.static_table, self.table[more]),
        )


def outside_of(static: Tensor, vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens (V,) are not in a static list."""
    outside = np.ones(vocab_size, dtype=np.bool_)
    outside[static.cpu().numpy()] = False
    return outside


def training_vocab(static: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (M,) sorted, the static list and the labels (N,), and each label's index among them."""
    ids = torch.unique(torch.cat((static, labels)))  # sorted
    return ids, torch.searchsorted(ids, labels)
