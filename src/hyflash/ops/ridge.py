"""Ridge regression from streamed batches, in float64: accumulate normal equations, then solve once.

In: pairs of inputs and outputs. Out: a linear map with bias, of full rank or of the best given rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


class NormalEquations:
    """Sums of X'X, X'Y and Y'Y. A constant input is added as the last column and is not penalised."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.gram = torch.zeros(num_inputs + 1, num_inputs + 1, dtype=torch.float64)
        self.cross = torch.zeros(num_inputs + 1, num_outputs, dtype=torch.float64)
        self.square_sum = torch.zeros(num_outputs, dtype=torch.float64)
        self.num_rows = 0

    def add(self, inputs: Tensor, outputs: Tensor, weights: Tensor) -> None:
        """Add rows: inputs (n, F), outputs (n, M), weights (n,) >= 0."""
        root = weights.double().sqrt()[:, None].cpu()
        x = torch.cat((inputs.double().cpu(), torch.ones(len(inputs), 1, dtype=torch.float64)), dim=1) * root
        y = outputs.double().cpu() * root
        self.gram += x.T @ x
        self.cross += x.T @ y
        self.square_sum += y.square().sum(0)
        self.num_rows += int((weights > 0).sum())

    def solve(self, *, relative_lambda: float) -> tuple[Tensor, Tensor]:
        """Weight (M, F) and bias (M,) float64; the penalty is `relative_lambda` times the mean of diag(X'X)."""
        size = self.gram.shape[0] - 1
        penalty = torch.zeros(size + 1, dtype=torch.float64)
        # The floor keeps the system solvable when an input never varies.
        penalty[:size] = relative_lambda * self.gram.diagonal()[:size].mean().clamp(min=1e-12)
        solution = torch.linalg.solve(self.gram + penalty.diag(), self.cross)
        return solution[:size].T.contiguous(), solution[size].contiguous()

    def reduce_rank(self, weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Factors up (M, r), down (r, F) and bias (M,) of `weight` (M, F): the best rank-r fit of the fitted values.

        These are the leading directions (SVD) of what the full map predicts on the accumulated rows.
        """
        size = self.gram.shape[0] - 1
        total = self.gram[size, size]
        mean_in, mean_out = self.gram[:size, size] / total, self.cross[size] / total
        spread = self.gram[:size, :size] - total * torch.outer(mean_in, mean_in)
        directions = torch.linalg.eigh(weight @ spread @ weight.T).eigenvectors[:, -rank:]
        down = directions.T @ weight
        return directions, down, mean_out - directions @ (down @ mean_in)

    def explained(self, weight: Tensor, bias: Tensor) -> float:
        """Share of the outputs' sum of squares that the map explains on the accumulated rows."""
        full = torch.cat((weight, bias[:, None]), dim=1)  # (M, F + 1)
        error = self.square_sum - 2 * (full * self.cross.T).sum(1) + ((full @ self.gram) * full).sum(1)
        return float(1.0 - error.sum() / self.square_sum.sum().clamp(min=1e-30))
