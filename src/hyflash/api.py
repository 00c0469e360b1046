"""`hyflash.load`: from names to an engine that decodes. The command line and the Python API both start here.

In: what `-t` and `-d` name. Out: a `Session` (engine, tokenizer, target, drafter, warnings) or just its engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from hyflash import checkpoint, drafters, hub
from hyflash.bench import costs
from hyflash.core import DRAFT_WEIGHTS, LENGTHS, TargetHooks, TargetOptions
from hyflash.drafters.base import Drafter
from hyflash.engine.decode import Engine, Exact
from hyflash.engine.length import AdaptiveLength, FixedLength, LengthPolicy
from hyflash.engine.nightjar import NightjarLength
from hyflash.engine.offload import Offload, unfit
from hyflash.errors import UserError, nearest
from hyflash.options import parse_assignment
from hyflash.targets import choose
from hyflash.targets.base import Target
from hyflash.text import Tokenizer

DEFAULT_DRAFT_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target with its tokenizer, and what the user called it."""

    name: str
    model: Target
    tokenizer: Tokenizer
    draft_weights: str = DRAFT_WEIGHTS[0]
    """How drafters keep their weights where the target has kernels for them; torch: not there."""
    note: str = ""
    """Why the torch target serves where the native one might be expected; empty otherwise."""


def load(
    target: str = hub.DEFAULT_TARGET,
    drafter: str | None = None,
    *,
    options: Sequence[str] = (),
    backend: str = "auto",
    dtype: str | None = None,
    quant: str | None = None,
    kv: str | None = None,
    draft_weights: str | None = None,
    num_threads: int | None = None,
    length: str = "adaptive",
    num_draft_tokens: int | None = None,
    exact: str = "auto",
    max_rows: int = 64,
    offload_below: int | None = None,
) -> Engine:
    """An engine for a target and a drafter, as the command line would make it.

    `drafter` None is the default one of the target, "none" is plain decoding; `options` are `key=value` for a
    drafter given as NAME, or what a NAME:CHECKPOINT leaves open; `backend` to `num_threads` as in `core.TargetOptions`;
    `offload_below` bytes of free memory let go of the drafter's weights (docs/length.md). Raises UserError on anything
    that does not fit.
    """
    how = TargetOptions(
        backend=backend, dtype=dtype, quant=quant, kv=kv, draft_weights=draft_weights, num_threads=num_threads
    )
    loaded = load_target(target, how)
    spec = hub.default_drafter(target) if drafter is None else drafter
    made = load_drafter(spec, loaded, options=options)
    engine = make_engine(
        loaded,
        made,
        length=length,
        num_draft_tokens=num_draft_tokens,
        exact=exact,
        max_rows=max_rows,
        offload_below=offload_below,
    )
    for text in offload_warnings(made, offload_below):
        warnings.warn(text, stacklevel=2)
    return engine


def load_target(spec: str, options: TargetOptions | None = None, *, report: hub.Progress | None = None) -> LoadedTarget:
    """Resolve and load a target and its tokenizer; `report` hears of work done once. Raises UserError.

    Drafters run on torch beside it, with as many threads as the target: more would only wait for each other.
    """
    how = options or TargetOptions()
    chosen = choose.load(spec, how, report=report)
    torch.set_num_threads(int(chosen.model.describe()["num_threads"]))
    return LoadedTarget(
        name=spec,
        model=chosen.model,
        tokenizer=Tokenizer.from_dir(chosen.tokenizer),
        draft_weights=how.draft_weights or DRAFT_WEIGHTS[0],
        note=chosen.note,
    )


def load_drafter(spec: str, target: LoadedTarget, *, options: Sequence[str] = ()) -> Drafter | None:
    """The drafter a spec names, or None for "none"; on the target's kernels where both can. Raises UserError."""
    drafter = _make_drafter(spec, target.model.hooks(), options)
    if drafter is not None and target.draft_weights != "torch":
        kernels = target.model.kernels(target.draft_weights)
        if kernels is not None and drafter.use_kernels(kernels):
            torch.set_num_threads(1)  # torch's own threads would spin beside the kernels'
    return drafter


def _make_drafter(spec: str, hooks: TargetHooks, options: Sequence[str]) -> Drafter | None:
    if spec == "none":
        if options:
            raise UserError("-o sets options of a drafter, and the drafter is none; leave it out or name a drafter.")
        return None
    values = dict(parse_assignment(text) for text in options)
    if options and spec.partition(":")[0] not in drafters.names():
        raise UserError(
            f"-o sets options of a drafter given as NAME or NAME:CHECKPOINT; {spec!r} is neither (a checkpoint has its "
            f"own). Known names: {', '.join(drafters.names())}."
        )
    if options and len(hub.drafter_parts(spec)) > 1:
        raise UserError(f"-o sets options of one drafter, and {spec!r} are several; leave it out or name one.")
    return checkpoint.load(spec, hooks, options=values)


def _method(spec: str) -> str:
    """The method in `NAME` or `NAME:CHECKPOINT`, "" for a bare checkpoint."""
    name = spec.partition(":")[0]
    return name if name in drafters.names() else ""


def drafter_warnings(spec: str, target: LoadedTarget, *, thinking: bool | None = None) -> list[str]:
    """What a user should know about a drafter's checkpoints with this target and thinking mode."""
    out = []
    for part in hub.drafter_parts(spec):
        folder = hub.checkpoint_dir(part)
        if folder is None:
            continue
        out += checkpoint.target_warnings(folder, target.model.info, method=_method(part))
        trained = checkpoint.read_card(folder).get("thinking") if (folder / checkpoint.CARD).is_file() else None
        if None not in (thinking, trained) and thinking != trained:
            out.append(
                f"draft_mode_mismatch: {folder} was trained with thinking {'on' if trained else 'off'}, this run has "
                f"it {'on' if thinking else 'off'}; fewer drafts may be accepted"
            )
    return out


def make_policy(
    target: LoadedTarget, drafter: Drafter | None, *, length: str, num_draft_tokens: int | None
) -> LengthPolicy:
    """The length policy; all but the fixed one measure this machine once (cached). Raises UserError."""
    if length not in LENGTHS:
        raise UserError(f"length is {length!r}; expected {' or '.join(LENGTHS)}.{nearest(length, LENGTHS)}")
    if num_draft_tokens is not None and num_draft_tokens < 1:
        raise UserError(f"num_draft_tokens is {num_draft_tokens}; expected at least 1 (plain decoding is -d none).")
    if drafter is None:
        return FixedLength(0)
    most = drafter.max_draft_tokens
    if num_draft_tokens is not None and num_draft_tokens > most:
        raise UserError(f"num_draft_tokens is {num_draft_tokens}; this drafter proposes at most {most}.")
    if length == "fixed":
        return FixedLength(num_draft_tokens or min(DEFAULT_DRAFT_TOKENS, most))
    table = costs.measured(target.model)
    longest = num_draft_tokens or min(max(table.seconds) - 1, most)
    kind = NightjarLength if length == "nightjar" else AdaptiveLength
    return kind(table.relative, max_draft_tokens=longest, one_sec=table.seconds[1])


def offload_warnings(drafter: Drafter | None, offload_below: int | None) -> list[str]:
    """Why the weights of this drafter stay in memory although they were to leave it when that is short."""
    reason = unfit(drafter) if offload_below is not None else ""
    return [reason] if reason else []


def make_engine(
    target: LoadedTarget,
    drafter: Drafter | None,
    *,
    length: str = "adaptive",
    num_draft_tokens: int | None = None,
    exact: str = "auto",
    max_rows: int = 64,
    offload_below: int | None = None,
) -> Engine:
    """An engine over a loaded target; see `offload_warnings` for `offload_below`. Raises UserError."""
    offload = None
    if offload_below is not None and length != "nightjar":
        raise UserError(f"offload_below needs length nightjar, which pauses drafting as a whole; length is {length}.")
    if offload_below is not None and drafter is not None and not unfit(drafter):
        kernels = target.model.kernels(target.draft_weights) if target.draft_weights != "torch" else None
        offload = Offload(drafter, low_bytes=offload_below, kernels=kernels)
    return Engine(
        target.model,
        drafter,
        tokenizer=target.tokenizer,
        policy=make_policy(target, drafter, length=length, num_draft_tokens=num_draft_tokens),
        exact=cast(Exact, exact),  # the engine refuses other words
        max_rows=max_rows,
        offload=offload,
    )
