"""`hyflash calibrate`: what a drafter leaves open, chosen by acceptance on texts of yours; nothing is trained."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyflash import environment, hub
from hyflash.cli import flags, loading, report
from hyflash.core import TargetOptions
from hyflash.errors import UserError

if TYPE_CHECKING:
    from hyflash.api import LoadedTarget
    from hyflash.bench.calibrate import Search
    from hyflash.core import Result
    from hyflash.data.prompts import Prompt
    from hyflash.drafters.base import Drafter
    from hyflash.targets.replay import Recording

BATCH_TOKENS = 65536
"""The target answers about this many tokens of context at once."""


def calibrate(
    drafter: Annotated[str, typer.Argument(help="CHECKPOINT or NAME:CHECKPOINT, as fold:./my-dflash.")],
    *,
    out: Annotated[Path, typer.Option(help="Directory of the drafter to write.")],
    prompts: Annotated[
        list[str] | None, typer.Option(help="Prompt file, dataset name, or demo (built in); repeatable.")
    ] = None,
    target: flags.Target = hub.DEFAULT_TARGET,
    limit: Annotated[int | None, typer.Option(help="At most this many prompts per domain.")] = None,
    context: Annotated[str | None, typer.Option(help="Stretch prompts to this token count: 4k.")] = None,
    max_tokens: flags.MaxTokens = 128,
    values: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="KEY=V1,V2", help="Values of an option to try, not the usual ones; repeatable."),
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Draft tokens per round. Default: at most 5.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompt choice, split and context filler.")] = 0,
    thinking: flags.Thinking = None,
    backend: flags.Backend = "auto",
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    threads: flags.Threads = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Choose a drafter's open options by acceptance on prompts of yours.

    The target answers every prompt. Half of the answers choose, by replay in real rounds; the other half only report.
    A confidence head is fitted to the same rounds.

    \b
    Examples:
      hyflash calibrate fold:./my-dflash --prompts long.jsonl --context 4k --out ./my-fold
      hyflash calibrate fold:./my-dflash --prompts long.jsonl --try fold_window=64,128 --try kappa=1 --out ./my-fold
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: is there and not an empty directory; choose another one for --out.")
    grid = _values(values or [])
    tokens = flags.parse_tokens(context) if context is not None else None
    if len(hub.drafter_parts(drafter)) > 1:
        raise UserError(f"calibrate takes one drafter, and {drafter!r} are several; calibrate its parts.")

    from hyflash import api, checkpoint
    from hyflash.bench import calibrate as c
    from hyflash.bench import workloads
    from hyflash.data.disk import clear_disk_errors, new_directory
    from hyflash.engine.replay import measure

    how = TargetOptions(backend=backend, dtype=dtype, quant=quant, kv=kv, num_threads=threads)
    sources = prompts or [workloads.DEMO]
    halves = c.split(workloads.read(sources, limit=limit, seed=seed), seed)
    loaded = loading.load_target(target, how, quiet=quiet)
    given = checkpoint.load(drafter, loaded.model.hooks())
    c.check(given, drafter)
    tried = c.grid_of(given, grid)
    api.make_policy(loaded, given, length="fixed", num_draft_tokens=num_draft_tokens)  # refuses what is out of range
    length = num_draft_tokens or min(api.DEFAULT_DRAFT_TOKENS, given.max_draft_tokens)
    tuning, held = (
        _record(
            loaded, half, given.target_layer_ids, tokens=tokens, max_tokens=max_tokens, seed=seed, thinking=thinking
        )
        for half in halves
    )
    with loading.counting(quiet, "calibrate") as step:
        found = c.search(
            given,
            tuning,
            tried,
            num_draft_tokens=length,
            progress=lambda done, what: step(done, None, what),
        )
        _check_used(found, given, tuning)
        chosen = c.with_options(given, found.best.options)
        figures = c.fit_confidence(chosen, tuning, length)
        before, after = (measure(one, held, length) for one in (given, chosen))
    table = _table(found, before=before, after=after)
    table["confidence"] = figures
    table["warnings"] = _warnings(found, tuning)
    table["settings"] = {
        "drafter": drafter,
        "target": target,
        "prompts": sources,
        "limit": limit,
        "context": tokens,
        "max_tokens": max_tokens,
        "num_draft_tokens": length,
        "seed": seed,
        "thinking": thinking,
    }
    with clear_disk_errors(out, "nothing was written"), new_directory(out) as temp:
        checkpoint.save(chosen, temp, card=_card(drafter, chosen, loaded, table))
    table = {"out": str(out), **table}
    if json:
        report.print_json(table)
    else:
        from hyflash.cli.tables import print_calibration

        print_calibration(table)
    report.warn([*table["warnings"], *api.drafter_warnings(drafter, loaded, thinking=thinking)])


def _values(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`KEY=V1,V2` by key. Raises UserError."""
    out: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, sep, raw = text.partition("=")
        try:
            values = jsonlib.loads(f"[{raw}]")
        except ValueError:
            sep = ""
        if not sep or not key.strip():
            raise UserError(f"--try {text!r} is not of the form KEY=V1,V2; expected something like kappa=1,1.5,2.")
        if key.strip() in out:
            raise UserError(f"--try names {key.strip()} twice; list all its values once.")
        out[key.strip()] = tuple(values)
    return out


def _record(
    loaded: LoadedTarget,
    domains: dict[str, list[Prompt]],
    taps: tuple[int, ...],
    *,
    tokens: int | None,
    max_tokens: int,
    seed: int,
    thinking: bool | None,
) -> list[Recording]:
    """The target's greedy answers with features. Raises UserError where prompt and answer do not fit."""
    from hyflash import api
    from hyflash.bench import workloads as w
    from hyflash.core import Request, SamplingParams
    from hyflash.engine.replay import record

    room = loaded.model.info.max_context - max_tokens
    found: list[tuple[int, ...]] = []
    for domain, prompts in domains.items():
        if tokens is None:
            found += w.natural(domain, prompts, loaded.tokenizer, thinking=thinking).prompts
        else:
            found += w.stretched(
                domain, prompts, loaded.tokenizer, context=tokens, seed=seed, thinking=thinking
            ).prompts
    if (longest := max(map(len, found))) > room:
        remedy = f"shorter prompts, or --context at most {room}" if room > 0 else "a smaller --max-tokens"
        raise UserError(
            f"a prompt has {longest} tokens; {loaded.name} holds {loaded.model.info.max_context} and the answer takes "
            f"{max_tokens}. Give {remedy}."
        )
    engine = api.make_engine(loaded, None, max_rows=max(1, BATCH_TOKENS // longest))
    results = engine.generate([Request(prompt_ids=ids, params=SamplingParams(max_tokens=max_tokens)) for ids in found])
    if failed := [result.error for result in results if result.error is not None]:
        raise UserError(f"the target could not answer {len(failed)} of {len(results)} prompts; the first: {failed[0]}")
    answers = [result for result in results if result.token_ids]
    if not answers:
        raise UserError("the target answers none of the prompts with a single token; give others.")
    return [record(loaded.model, taps, answer.prompt_ids, answer.token_ids) for answer in answers]


def _longest(recordings: Sequence[Recording]) -> int:
    return max(len(one.prompt_ids) + len(one.answer_ids) for one in recordings)


def _check_used(found: Search, drafter: Drafter, recordings: Sequence[Recording]) -> None:
    """Refuse texts on which nothing made a difference. Raises UserError."""
    if drafter.calibrates or len(found.trials) == 1 or any(t.rounds != found.best.rounds for t in found.trials):
        return
    if not any(map(any, found.best.rounds)):
        raise UserError(
            "not one draft was accepted, whatever the options; see what `hyflash doctor` says of the drafter."
        )
    raise UserError(
        f"no value of {', '.join(found.best.options)} changed a single round, so there is nothing to choose by. The "
        f"longest text has {_longest(recordings)} tokens, which may be too short to use what they set: give longer "
        "prompts, or stretch them with --context 4k."
    )


def _warnings(found: Search, recordings: Sequence[Recording]) -> list[str]:
    if not found.idle or len(found.trials) == 1:
        return []
    return [
        f"{', '.join(found.idle)} changed no round beside the chosen options: with these, texts of at most "
        f"{_longest(recordings)} tokens do not use what they set"
    ]


def _table(found: Search, *, before: Sequence[Result], after: Sequence[Result]) -> dict[str, Any]:
    """Trials and report as one JSON object."""
    from hyflash.metrics import difference_interval, summarize

    gain = difference_interval(after, before)
    return {
        "options": found.best.options,
        "trials": [{"options": t.options, "tau": t.tau, "num_rounds": t.num_rounds} for t in found.trials],
        "report": {
            "num_prompts": len(after),
            "tau_given": summarize(before).tau,
            "tau": summarize(after).tau,
            "tau_difference": gain.value,
            "interval": [gain.low, gain.high],
        },
    }


def _card(spec: str, drafter: Drafter, loaded: LoadedTarget, table: dict[str, Any]) -> dict[str, Any]:
    """The card of the weights, which say how they were trained, and beside it how options were chosen."""
    from hyflash import checkpoint
    from hyflash.train.card import target_facts

    folder = hub.checkpoint_dir(spec)
    kept = checkpoint.read_card(folder) if folder is not None and (folder / checkpoint.CARD).is_file() else {}
    return {
        "target": target_facts(loaded.model.info),
        "target_layer_ids": list(drafter.target_layer_ids),
        "num_draft_tokens": drafter.max_draft_tokens,
        **kept,
        "drafter": type(drafter).__module__.rpartition(".")[2],
        "init": spec,
        "calibration": {**table, "provenance": environment.provenance()},
    }
