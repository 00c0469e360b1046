"""A training recipe: one TOML file with the tables [target], [drafter], [data] and [train].

In: a TOML path and `key=value` overrides (`train.steps=200`). Out: a validated, frozen `Recipe`. Unknown tables and
keys are refused with the nearest known name. Paths are relative to the current directory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hyflash.core import MAX_THREADS, TargetOptions
from hyflash.data.anchors import AnchorOptions
from hyflash.drafters import load_class
from hyflash.drafters.base import Drafter, DrafterConfig
from hyflash.errors import UserError, nearest
from hyflash.options import Options, apply_overrides

TABLES = ("target", "drafter", "data", "train")
Precision = Literal["float32", "bfloat16"]


class TargetTable(Options):
    """[target]: the model whose answers the drafter learns."""

    name: str = Field(description="model name, directory, .gguf file or hub name")
    backend: str = Field("auto", description="native (CPU kernels), torch, or auto: native where it can serve")
    dtype: str | None = Field(None, description="arithmetic of the torch backend, float32 unless given")
    quant: str | None = Field(None, description="native: weights of a model directory, q8_0, q4_0, q4_1 or none")
    kv: str | None = Field(None, description="native: float16 (unless given), bfloat16, float32 or int8")
    num_threads: int | None = Field(None, ge=1, le=MAX_THREADS, description="CPU threads; none leaves the choice")

    def options(self) -> TargetOptions:
        """How to load it. Raises UserError for what does not go together."""
        return TargetOptions(
            backend=self.backend, dtype=self.dtype, quant=self.quant, kv=self.kv, num_threads=self.num_threads
        )


class DataTable(AnchorOptions):
    """[data]: where examples come from and how batches are made of them. Exactly one of shards and answers."""

    shards: str | tuple[str, ...] | None = Field(None, description="directory of `hyflash data capture`, or several")
    answers: str | None = Field(None, description="answers.jsonl of `hyflash data regenerate`, captured live")
    eval_shards: str | None = Field(None, description="held-out examples; none holds some of the training data out")
    held_out: int = Field(24, ge=0, description="number of held-out examples; 0 trains without evaluation")
    batch_sequences: int = Field(4, ge=1, description="sequences per batch")
    batch_tokens: int = Field(4096, ge=1, description="tokens per target forward in live capture")
    verify: bool = Field(True, description="read every shard once at the start and compare its checksum")


class TrainTable(Options):
    """[train]: optimisation, evaluation and checkpoints. Exactly one of steps and max_sec."""

    steps: int = Field(0, ge=0, description="optimiser steps")
    max_sec: float = Field(0.0, ge=0, description="seconds of training steps (evaluation and saving not counted)")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup_steps: int = Field(60, ge=0, description="steps of linear warm-up")
    final_lr_ratio: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of lr")
    start_lr_scale: float = Field(0.1, ge=0, description="factor on lr for the closed-form start's own weights")
    weight_decay: float = Field(0.0, ge=0, description="AdamW decay of matrices; norms, biases and decays have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second-moment decay")
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm of a step")
    accumulate: int = Field(1, ge=1, description="batches per optimiser step")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="autocast of forward and loss; auto times both and takes the faster"
    )
    only: tuple[str, ...] = Field(
        (), description="name patterns of the weights that learn (candidate_selector.*); none: all"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seeds weights, order, crops, anchors and dropout")
    start_tokens: int = Field(40_000, ge=1, description="tokens the closed-form start is fitted on, where configured")
    eval_every: int = Field(200, ge=1, description="steps between evaluations")
    eval_at_start: bool = Field(True, description="evaluate before the first step too")
    num_draft_tokens: int = Field(0, ge=0, description="draft tokens per round in evaluation; 0 is the drafter's most")
    save_every: int = Field(200, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept; the best drafter is kept besides")
    log_every: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A validated recipe; `tables` is what it was made of, with overrides, for cards and resume checks."""

    target: TargetTable
    drafter: str
    """Name of the drafter file."""
    init: str | None
    """Checkpoint whose weights (and config) training starts from, in place of a fresh drafter."""
    config: DrafterConfig
    options: Mapping[str, Any]
    """What `config` was made of; beside `init`, options of the parts that its checkpoint does not have."""
    data: DataTable
    train: TrainTable
    tables: Mapping[str, Any]

    @property
    def drafter_class(self) -> type[Drafter]:
        """The class of the drafter file."""
        return load_class(self.drafter)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe file with overrides laid over it. Raises UserError."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"{path}: cannot be read ({err.strerror or err}); expected a recipe in TOML.") from err
    except (ValueError, RecursionError) as err:  # TOMLDecodeError and UnicodeDecodeError among them
        raise UserError(f"{path}: is not valid TOML: {err}.") from err
    return parse_recipe(apply_overrides(tables, overrides), where=str(path))


def parse_recipe(tables: Mapping[str, Any], *, where: str) -> Recipe:
    """Validate the tables of a recipe; `where` names their origin in errors. Raises UserError."""
    for name, value in tables.items():
        if name not in TABLES:
            raise UserError(f"{where}: unknown table {name!r}.{_hint(name)} Known: {', '.join(TABLES)}.")
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: {name!r} is a value; expected a table [{name}].")
    target = TargetTable.parse(tables.get("target", {}), where=f"{where} [target]")
    target.options()  # refuses words that do not go together
    data = DataTable.parse(tables.get("data", {}), where=f"{where} [data]")
    train = TrainTable.parse(tables.get("train", {}), where=f"{where} [train]")
    _exactly_one(f"{where} [data]", {"shards": data.shards, "answers": data.answers})
    _exactly_one(f"{where} [train]", {"steps": train.steps, "max_sec": train.max_sec})
    if data.eval_shards is not None and not data.held_out:
        raise UserError(f"{where} [data]: eval_shards is given, and held_out, how many of its examples to use, is 0.")
    if data.shards and "batch_tokens" in tables["data"]:
        raise UserError(
            f"{where} [data]: batch_tokens is for live capture of answers; shards are captured. Leave it out."
        )
    if not data.shards and not data.eval_shards and "verify" in tables["data"]:
        raise UserError(f"{where} [data]: verify is for the checksums of shards, and there are none. Leave it out.")
    options = dict(tables.get("drafter", {}))
    name, init = options.pop("name", None), options.pop("init", None)
    if not isinstance(name, str) or not isinstance(init, str | None):
        raise UserError(
            f'{where} [drafter]: name is {name!r} and init {init!r}; expected name = "hyflash" or the like.'
        )
    cls = load_class(name)
    if not cls.trainable:
        raise UserError(f"{where} [drafter]: {name!r} is training-free; expected a drafter that learns.")
    config = cls.Config.parse(options, where=f"{where} [drafter]")
    return Recipe(
        target=target,
        drafter=name,
        init=init,
        config=config,
        options=options,
        data=data,
        train=train,
        tables=tables,
    )


def _hint(name: str) -> str:
    """Where an option was given without its table, name the table."""
    homes: dict[str, type[Options]] = {"target": TargetTable, "data": DataTable, "train": TrainTable}
    for table, cls in homes.items():
        if name in cls.model_fields:
            return f" Did you mean '{table}.{name}'?"
    return nearest(name, TABLES)


def _exactly_one(where: str, values: Mapping[str, Any]) -> None:
    given = [name for name, value in values.items() if value]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise UserError(f"{where}: expected exactly one of {' and '.join(values)}, found {found}.")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences of two recipes' tables, as sentences `train.lr was 0.001, is 0.002`."""
    before, after = _flat(old), _flat(new)
    missing = "not given"
    return [
        f"{key} was {before.get(key, missing)!r}, is {after.get(key, missing)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing)
    ]


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            out.update({f"{key}.{inner}": v for inner, v in _flat(value).items()})
        else:
            out[key] = value
    return out
