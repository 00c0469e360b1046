"""How sure a drafter is of each draft, how that is calibrated, and how many drafts it is worth verifying (DSpark).

In: logits of P(draft accepted | all before accepted) by position, and how rounds fared. Out: a temperature for each
position, and draft lengths. What has to be right is the chance that all drafts up to a position are accepted, the
product so far, so positions are fitted one after the other on that product (sequential temperature scaling).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hyflash.core import Outcomes, Prices
from hyflash.layers import init_linear

NUM_BINS = 10
GRID = torch.logspace(-1, 1, 81, base=5.0)
"""Temperatures tried: 1/5 to 5, 1 among them."""
LEAST_ROUNDS = 32
"""With fewer rounds at a position its temperature stays as it was."""


class ConfidenceHead(nn.Module):
    """One linear unit on a position's features; the name of its weights is the published one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = init_linear(nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        """(..., width) -> logits (...), float32."""
        out: Tensor = self.proj(features)[..., 0].float()
        return out


def calibration_error(stated: Tensor, happened: Tensor) -> float:
    """Expected calibration error of probabilities (N,) for events (N,) bool: mean gap between the two over bins of
    equal width, each weighed by its share; 0 for none."""
    if not len(stated):
        return 0.0
    place = (stated * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    gap = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, place, happened.double() - stated.double())
    return float(gap.abs().sum()) / len(stated)


def fit_temperatures(logits: Tensor, outcomes: Outcomes) -> Tensor:
    """Temperatures (L,) float32 for confidence logits (N, L): each gives the product so far the least calibration
    error, given those before it; the one nearest to 1 among equals."""
    best = torch.ones(logits.shape[1])
    run = torch.ones(len(logits))
    by_distance = GRID[GRID.log().abs().argsort(stable=True)]
    for k in range(logits.shape[1]):
        seen = outcomes.num_drafted > k
        if int(seen.sum()) >= LEAST_ROUNDS:
            happened = (outcomes.num_accepted > k)[seen]
            tried = [run[seen] * (logits[seen, k] / t).sigmoid() for t in by_distance]
            best[k] = by_distance[min(range(len(tried)), key=lambda i: calibration_error(tried[i], happened))]
        run = run * (logits[:, k] / best[k]).sigmoid()
    return best


def errors_by_position(confidence: Tensor, outcomes: Outcomes) -> list[float]:
    """Calibration error of the products of confidences (N, L), position by position, over rounds that drafted it."""
    run, out = confidence.cumprod(1), []
    for k in range(confidence.shape[1]):
        seen = outcomes.num_drafted > k
        out.append(calibration_error(run[seen, k], (outcomes.num_accepted > k)[seen]))
    return out


def admit(rates: Sequence[Sequence[float]], prices: Prices) -> list[int]:
    """How many drafts of each row of a batch to verify (DSpark, algorithm 1).

    `rates` are P(accepted | all before accepted) of each row's drafts. Drafts are taken by the chance that they and
    all before them are accepted, the likeliest first, while committed tokens per cost rise; the first that would
    lower it ends the search. A round costs what rows of the mean length do.
    """
    chances = []
    for row, own in enumerate(rates):
        run = 1.0
        for k, rate in enumerate(own):
            run *= min(max(rate, 0.0), 1.0)
            chances.append((-run, k, row))
    kept, gained, best = [0] * len(rates), 0.0, 1.0 / _cost(prices, 0.0)
    for taken, (loss, _, row) in enumerate(sorted(chances), start=1):
        gained -= loss / len(rates)
        rate = (1.0 + gained) / _cost(prices, taken / len(rates))
        if rate <= best:
            break
        best, kept[row] = rate, kept[row] + 1
    return kept


def _cost(prices: Prices, mean: float) -> float:
    """Cost of a forward of `mean` drafts a row, linear between whole numbers."""
    low, part = int(mean), mean - int(mean)
    costs = prices.forward
    return costs[low] + (part * (costs[low + 1] - costs[low]) if part > 0 else 0.0)
