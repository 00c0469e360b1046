"""Choose what a drafter leaves open, without training: options by real acceptance, stated confidence by its outcomes.

In: a drafter and recorded answers of its target, some to choose by and others to report on. Out: the drafter with the
options that won, every trial, and its acceptance beside that of the options it came with. Options are searched one
after the other, all others at their best so far, until a whole turn changes nothing; every trial replays all answers
through the engine, so that what wins is tokens per round and nothing that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyflash.data.prompts import Prompt, held_out_rank
from hyflash.drafters.base import Drafter
from hyflash.engine.replay import Recording, measure, watch
from hyflash.errors import UserError
from hyflash.metrics import summarize

MAX_TURNS = 4
"""Turns of the search; it mostly ends by itself after two."""

Grid = Mapping[str, Sequence[Any]]
Options = dict[str, Any]
Progress = Callable[[int, str], None]
"""Called with (trials done, what is tried)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting on the answers to choose by."""

    options: Options
    tau: float
    num_rounds: int
    rounds: tuple[tuple[int, ...], ...] = field(repr=False)
    """Accepted drafts of each round of each answer: equal ones mean that nothing differed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """All trials, in the order they were made, the given setting first."""

    trials: list[Trial]
    best: Trial
    idle: tuple[str, ...]
    """Options of which no value tried beside the best others changed a single round."""


def check(drafter: Drafter, name: str) -> None:
    """Refuse a drafter of which nothing can be calibrated. Raises UserError."""
    if not drafter.tunable and not drafter.calibrates:
        raise UserError(
            f"{name} has nothing to calibrate; expected a drafter with options that may change under trained weights "
            "(fold, dels), or with a confidence head (dspark)."
        )


def grid_of(drafter: Drafter, given: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Values to try of each option of the drafter's own, `given` ones instead. Raises UserError for unknown options."""
    known = ", ".join(drafter.tunable) or "none"
    if unknown := [name for name in given if name not in drafter.tunable]:
        raise UserError(f"{', '.join(unknown)} cannot be calibrated; this drafter's options that can: {known}.")
    if empty := [name for name, values in given.items() if not values]:
        raise UserError(f"{', '.join(empty)} has no value to try; expected some, as in {empty[0]}=1,2.")
    parse = type(drafter.config).parse
    return {  # parsed one by one: whether they go together is seen when they meet
        name: tuple(getattr(parse({name: value}, where="values to try"), name) for value in given.get(name, values))
        for name, values in drafter.tunable.items()
    }


def split(
    domains: Mapping[str, Sequence[Prompt]], seed: int
) -> tuple[dict[str, list[Prompt]], dict[str, list[Prompt]]]:
    """Every other prompt of each domain to choose by, the rest to report on, in an order drawn by `seed`.

    Raises UserError where nothing is left to report on.
    """
    tuning: dict[str, list[Prompt]] = {}
    held: dict[str, list[Prompt]] = {}
    for domain, prompts in domains.items():
        order = sorted(prompts, key=lambda prompt: held_out_rank(prompt.id, seed))
        tuning[domain] = order[::2]
        if order[1::2]:
            held[domain] = order[1::2]
    if not held:
        count = sum(map(len, domains.values()))
        raise UserError(
            f"found {count} prompt{'s' * (count != 1)}; expected at least 2 of a domain, one to choose by and one to "
            "report on."
        )
    return tuning, held


def with_options(drafter: Drafter, options: Mapping[str, Any]) -> Drafter:
    """A copy of the drafter with the same weights and other options. Raises UserError for those that do not fit."""
    values = {**drafter.config.model_dump(), **options}
    copy = type(drafter)(type(drafter.config).parse(values, where="calibrated options"), drafter.hooks)
    copy.load_state_dict(drafter.state_dict())
    return copy.eval()


def search(
    drafter: Drafter,
    recordings: Sequence[Recording],
    grid: Grid,
    *,
    num_draft_tokens: int,
    progress: Progress | None = None,
) -> Search:
    """Try options until none is better. Of equals the earlier trial wins, so the given setting stays without a reason.

    Combinations that the drafter refuses are passed over.
    """
    trials: dict[str, Trial | None] = {}
    start = {name: getattr(drafter.config, name) for name in grid}

    def tried(options: Options) -> Trial | None:
        key = repr(options)
        if key not in trials:
            if progress:
                progress(len(trials), " ".join(f"{name}={value}" for name, value in options.items()))
            trials[key] = _trial(drafter, recordings, options, num_draft_tokens)
        return trials[key]

    best = tried(start)
    assert best is not None
    for _ in range(MAX_TURNS):
        before = best
        for name, values in grid.items():
            for value in values:
                one = tried({**best.options, name: value})
                if one is not None and one.tau > best.tau:
                    best = one
        if best is before:
            break
    made = [trial for trial in trials.values() if trial is not None]
    return Search(trials=made, best=best, idle=_idle(made, best))


def fit_confidence(drafter: Drafter, recordings: Sequence[Recording], num_draft_tokens: int) -> dict[str, float]:
    """Fit the stated confidence of a drafter that has one; figures of the fit, {} without one."""
    return drafter.calibrate(watch(drafter, recordings, num_draft_tokens)) if drafter.calibrates else {}


def _trial(drafter: Drafter, recordings: Sequence[Recording], options: Options, num_draft_tokens: int) -> Trial | None:
    try:
        variant = with_options(drafter, options)
    except UserError:
        return None
    results = measure(variant, recordings, num_draft_tokens)
    whole = summarize(results)
    rounds = tuple(tuple(one.num_accepted for one in result.rounds) for result in results)
    return Trial(options=options, tau=whole.tau, num_rounds=whole.num_rounds, rounds=rounds)


def _idle(trials: Sequence[Trial], best: Trial) -> tuple[str, ...]:
    """Options that had several trials with all others at their best, none of which differs from it in any round."""
    out = []
    for name in best.options:
        rest = {**best.options, name: None}
        beside = [trial for trial in trials if {**trial.options, name: None} == rest]
        if len(beside) > 1 and all(trial.rounds == best.rounds for trial in beside):
            out.append(name)
    return tuple(out)
