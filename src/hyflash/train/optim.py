"""AdamW with named parameter groups, the learning-rate schedule, and gradients as sums.

In: a drafter and the [train] table. Out: an optimiser whose groups carry their parameter names, so that a resumed
run can tell what changed. Norms, biases and decay parameters have no weight decay; the weights of the closed-form
start learn at a fraction of the rate, because a full-size Adam step destroys them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyflash.errors import UserError
from hyflash.train.recipe import TrainTable

_NO_DECAY = ("norm", "A_log", "dt_bias")
_START = ("ridge.", "start.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long training lasts: by steps or by seconds of training."""

    steps: int
    max_sec: float

    def progress(self, step: int, train_sec: float) -> float:
        """Share of the budget that is used, 0 to 1."""
        return min(1.0, step / self.steps if self.steps else train_sec / self.max_sec)


def freeze(drafter: nn.Module, only: Sequence[str]) -> None:
    """Let only the parameters learn whose names match one of the patterns; none: all. Raises UserError for no match."""
    names = [name for name, _ in drafter.named_parameters()]
    for pattern in only:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            heads = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise UserError(f"train.only: no weight is called {pattern!r}; their names begin with {heads}.")
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only))


def group_names(drafter: nn.Module) -> dict[str, list[str]]:
    """Names of the trainable parameters by group: (start.)decay and (start.)plain, empty groups left out."""
    groups: dict[str, list[str]] = {}
    for name, parameter in drafter.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = parameter.ndim <= 1 or any(part in name for part in _NO_DECAY)
        own = "start." if name.startswith(_START) else ""
        groups.setdefault(own + ("plain" if plain else "decay"), []).append(name)
    return groups


def make_optimizer(drafter: nn.Module, options: TrainTable) -> torch.optim.AdamW:
    """AdamW over the drafter's trainable parameters; each group has its `name`, `names` and `lr_scale`."""
    parameters = dict(drafter.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [parameters[n] for n in names],
            "name": name,
            "names": names,
            "lr_scale": options.start_lr_scale if name.startswith("start.") else 1.0,
            "weight_decay": options.weight_decay if name.endswith("decay") else 0.0,
        }
        for name, names in group_names(drafter).items()
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)


def learning_rate(options: TrainTable, *, step: int, progress: float) -> float:
    """Linear warm-up over steps, times a cosine over the budget's progress that ends at `final_lr_ratio`."""
    warm = min(1.0, (step + 1) / (options.warmup_steps + 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.lr * warm * (options.final_lr_ratio + (1.0 - options.final_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def scale_and_clip(parameters: Sequence[Tensor], *, denominator: float, clip_norm: float) -> float:
    """Turn gradients of a summed loss into those of its mean, clipped; returns the norm before clipping.

    Dividing once by the sum of all denominators makes 8 batches of 1 weigh like 1 batch of 8. A norm that is not
    finite is returned as it is and leaves the gradients alone.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = float(nn.utils.get_total_norm(grads)) / denominator
    if math.isfinite(norm):
        torch._foreach_mul_(grads, min(1.0, clip_norm / (norm + 1e-6)) / denominator)
    return norm
