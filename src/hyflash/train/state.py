"""A run's checkpoints: `step-000200/` holds everything a run needs to go on bit for bit.

In: drafter, optimiser and `RunState`. Out: a directory that appears whole or not at all: weights.safetensors
(float32), training.pt (optimiser moments and RNG states), state.json (place, recipe, facts) and card.json.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from hyflash.data.disk import clear_disk_errors, new_directory, read_json, write_json
from hyflash.errors import UserError
from hyflash.train.recipe import changes

_STEP = re.compile(r"step-(\d{6,})")


@dataclass(slots=True, kw_only=True)
class RunState:
    """Where a run stands. Mutable: the trainer moves it forward."""

    recipe: Mapping[str, Any]
    target_fingerprint: str
    data_hash: str
    precision: str
    step: int = 0
    train_sec: float = 0.0
    num_tokens: int = 0
    num_anchors: int = 0
    epoch: int = 0
    index: int = 0
    best: dict[str, Any] | None = None
    """The evaluation of the best drafter so far."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Parameter names by optimiser group."""


def step_dirs(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first; temporary and foreign names are not among them."""
    found = {int(m[1]): p for p in run_dir.glob("step-*") if (m := _STEP.fullmatch(p.name)) and p.is_dir()}
    return [found[step] for step in sorted(found)]


def save_state(
    run_dir: Path,
    state: RunState,
    *,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    card: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `step-<n>/` and drop all but the newest `keep` checkpoints. Raises UserError on a full disk."""
    path = run_dir / f"step-{state.step:06d}"
    with clear_disk_errors(path, "the checkpoints before it are intact"), new_directory(path) as temp:
        weights = {k: v.detach().to("cpu").contiguous() for k, v in drafter.state_dict().items()}
        (temp / "weights.safetensors").write_bytes(save(weights))
        training = io.BytesIO()  # torch's own writer answers a full disk with a fault of its zip code
        torch.save({"optimizer": optimizer.state_dict(), "rng": rng_state()}, training)
        (temp / "training.pt").write_bytes(training.getbuffer())
        write_json(temp / "card.json", dict(card))
        write_json(temp / "state.json", asdict(state))
    for old in step_dirs(run_dir)[:-keep]:
        shutil.rmtree(old)
    return path


def load_state(path: Path, expected: RunState, *, drafter: nn.Module, optimizer: torch.optim.Optimizer) -> RunState:
    """Put a checkpoint into drafter, optimiser and RNG, and return its state.

    `expected` is the state that a fresh run of this recipe would have. Raises UserError, naming what changed, when
    recipe, target, data or parameters are not those of the checkpoint, and when a file is damaged.
    """
    values = read_json(path / "state.json")
    try:
        state = RunState(**values)
    except TypeError as err:
        raise UserError(f"{path}: was written by another version ({err}); start a new run.") from err
    if not (isinstance(state.recipe, dict) and isinstance(state.groups, dict) and isinstance(state.step, int)):
        raise UserError(f"{path}: is damaged (state.json holds other things); delete it to resume the one before.")
    _compare(path, state, expected)
    try:
        weights: dict[str, Tensor] = load_file(path / "weights.safetensors")
        training = torch.load(path / "training.pt", weights_only=True)
        drafter.load_state_dict(weights, strict=True)
        optimizer.load_state_dict(training["optimizer"])
        set_rng_state(training["rng"])
    except OSError as err:
        raise UserError(f"{path}: cannot be read ({err.strerror or err}); delete it to resume the one before.") from err
    except MemoryError:
        raise
    except Exception as err:  # torch and safetensors answer damaged files with errors of every kind
        first = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise UserError(f"{path}: is damaged ({first}); delete it to resume the one before.") from err
    return state


def _compare(path: Path, state: RunState, expected: RunState) -> None:
    found = changes(state.recipe, expected.recipe)
    for name in ("target_fingerprint", "data_hash"):
        old, new = getattr(state, name), getattr(expected, name)
        if old != new:
            found.append(f"{name} was {old}, is {new}")
    before, after = ({f"{g}: {n}" for g, names in s.groups.items() for n in names} for s in (state, expected))
    found += [f"parameter ({n}) is gone" for n in sorted(before - after)]
    found += [f"parameter ({n}) is new" for n in sorted(after - before)]
    if found:
        raise UserError(
            f"{path}: cannot be resumed: {'; '.join(found[:5])}{' ...' if len(found) > 5 else ''}. "
            "Resume with the old recipe, or start a new run in another directory."
        )


def rng_state() -> dict[str, Tensor]:
    """RNG states of the CPU and, where there is one, of every GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_rng_state(states: Mapping[str, Tensor]) -> None:
    """Restore what `rng_state` gave; GPUs that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for name, value in states.items():
        if name != "cpu" and torch.cuda.is_available() and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, name)
