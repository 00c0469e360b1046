"""The candidate selector: the few likeliest tokens of each slot, scores of neighbours, one path through them.

In: hidden states of a block, each slot's candidates and their log-probabilities. Out: a path from the anchor on. A
parallel block chooses each token without knowing the others, though the right one is mostly among the first few; a
pair scorer says how well a candidate follows another. All pairs are scored at once, and the walk is a table look-up.
After DFlash 2 (inco.ai/blog/dflash2) and DCOCO (TD-Labs), which differ in the scorer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.drafters.picking import Picker


class PairScorer(nn.Module, ABC):
    """What a token before it adds to a candidate's log-probability. Widths of the parts are the scorer's own."""

    rates_list: ClassVar[bool] = False
    """Whether it also learns how likely none of the candidates is right."""

    @abstractmethod
    def contexts(self, hidden: Tensor) -> Tensor:
        """Of each slot (N, L, .), from all hidden states of a block (N, L, D)."""

    @abstractmethod
    def predecessors(self, ids: Tensor) -> Tensor:
        """Of token ids (...) as the earlier of a pair: (..., .)."""

    @abstractmethod
    def successors(self, ids: Tensor) -> Tensor:
        """Of token ids (...) as the later of a pair: (..., .)."""

    @abstractmethod
    def score(self, context: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """All pairs of before (..., P, .) and after (..., K, .) in context (..., .): (..., P, K) float32."""

    @abstractmethod
    def flops(self, num_slots: int, num_candidates: int) -> int:
        """FLOPs of one walk over a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What a walk chose."""

    places: Tensor  # (B, L) int64 among the candidates
    probs: Tensor  # (B, L) float32, estimate that the choice is right given that all before it are
    finite: Tensor  # (B, L) bool


def walk(
    scorer: PairScorer, hidden: Tensor, anchors: Tensor, logprobs: Tensor, ids: Tensor, picker: Picker | None = None
) -> Path:
    """Path from anchors (B,) over candidates ids, logprobs (B, L, K) of slots with hidden states (B, L, D): greedy, or
    as a picker with draws picks."""
    contexts, after = scorer.contexts(hidden), scorer.successors(ids)
    first = scorer.score(contexts[:, 0], scorer.predecessors(anchors)[:, None], after[:, 0])  # (B, 1, K)
    later = scorer.score(contexts[:, 1:], scorer.predecessors(ids[:, :-1]), after[:, 1:])  # (B, L - 1, K, K)
    later = logprobs[:, 1:, None] + later
    start = logprobs[:, 0] + first[:, 0]
    if picker is not None and picker.draws:
        places = _picked(start, later, picker)
    else:
        follow = zip(start.argmax(-1).tolist(), later.argmax(-1).tolist(), strict=True)
        places = torch.tensor([_follow(place, table) for place, table in follow], device=ids.device)
    taken = later.take_along_dim(places[:, :-1, None, None], 2)[:, :, 0]
    scores = torch.cat((logprobs[:, :1] + first, taken), dim=1)
    finite = scores.isfinite().all(-1) & logprobs.isfinite().all(-1)
    probs = list_probs(scorer, scores, logprobs).gather(-1, places[..., None])[..., 0]
    return Path(places=places, probs=probs, finite=finite)


def _picked(start: Tensor, later: Tensor, picker: Picker) -> Tensor:
    """Places (B, L) that a picker picks from scores start (B, K), and later (B, L - 1, K, K) by the place before."""
    places = [picker(start)]
    for k in range(later.shape[1]):
        places.append(picker(later[:, k].take_along_dim(places[-1][:, None, None], 1)[:, 0]))
    return torch.stack(places, dim=1)


def _follow(place: int, table: list[list[int]]) -> list[int]:
    """Places from the first on; table[t][a] is the best place in slot t + 1 after place a in slot t."""
    places = [place]
    for best in table:
        places.append(best[places[-1]])
    return places


def list_probs(scorer: PairScorer, scores: Tensor, logprobs: Tensor) -> Tensor:
    """Probabilities (..., K) of candidates with scores (..., K); without a score's help those of the logprobs.

    Where the scorer does not rate the list, the share of all tokens outside it stays what it was.
    """
    if scorer.rates_list:
        return torch.cat((scores, _log_rest(logprobs)), dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1) * logprobs.exp().sum(-1, keepdim=True).clamp(max=1.0)


def _log_rest(logprobs: Tensor) -> Tensor:
    """Log-probability (..., 1) of all tokens but the candidates, without gradient."""
    return torch.log1p(-logprobs.detach().exp().sum(-1, keepdim=True).clamp(max=1.0 - 1e-6))


def selection_losses(
    scorer: PairScorer, scores: Tensor, logprobs: Tensor, found: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy (N,) over candidates with scores (N, K), which rows count, and where the best one is the label.

    `found` (N, K) says which candidate is the label. A row without it counts only where the scorer rates the list.
    """
    inside, place = found.any(-1), found.long().argmax(-1)
    if scorer.rates_list:
        place = torch.where(inside, place, scores.shape[-1])
        loss = F.cross_entropy(torch.cat((scores, _log_rest(logprobs)), dim=-1), place, reduction="none")
        return loss, torch.ones_like(inside), scores.argmax(-1) == place
    loss = F.cross_entropy(scores, place, reduction="none") * inside
    return loss, inside, inside & (scores.argmax(-1) == place)
