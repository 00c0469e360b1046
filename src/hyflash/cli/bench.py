"""`hyflash bench`: drafters against plain decoding, measured in turns; a table for people, one object for scripts."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyflash import environment, hub
from hyflash.cli import costs as measure_costs
from hyflash.cli import flags, loading, report
from hyflash.core import SamplingParams, TargetOptions
from hyflash.errors import UserError

if TYPE_CHECKING:
    from hyflash.api import LoadedTarget
    from hyflash.bench.run import Row
    from hyflash.bench.workloads import Workload


# Options that say something about a cost measurement; every other one is of runs, and some are of costs alone.
_COSTS_ONLY = {"peers", "widths", "repeats", "prefill"}
_COSTS_OPTIONS = _COSTS_ONLY | {
    *("target", "context", "costs", "backend", "dtype", "quant", "kv", "threads", "out", "json", "quiet")
}


def bench(
    ctx: typer.Context,
    *,
    target: flags.Target = hub.DEFAULT_TARGET,
    drafter: Annotated[
        list[str] | None, typer.Option("-d", "--drafter", help="NAME, CHECKPOINT, NAME:CHECKPOINT or A+B; repeatable.")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Prompt file, dataset name, or demo (built in); repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many prompts per domain.")] = None,
    max_tokens: flags.MaxTokens = 128,
    context: Annotated[
        str | None,
        typer.Option(help="Stretch prompts to these token counts: 512,2k,8k. Default of --costs: 128,2k,8k."),
    ] = None,
    temperature: flags.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of prompt choice, context filler and sampling.")] = 0,
    draft_sampling: flags.DraftSampling = False,
    num_draft_tokens: flags.NumDraftTokens = None,
    length: Annotated[
        str | None,
        typer.Option(
            metavar="adaptive|nightjar|fixed",
            help="Draft length policy. Default: adaptive; fixed if acceptance only.",
        ),
    ] = None,
    exact: flags.Exact = "auto",
    thinking: flags.Thinking = None,
    acceptance_only: Annotated[
        bool, typer.Option("--acceptance-only", help="Acceptance by replay of plain answers: fast, no times.")
    ] = False,
    costs: Annotated[
        bool, typer.Option("--costs", help="Only measure what a forward of each width costs here, c(q).")
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="all|NAMES", help="--costs: beside llama.cpp,onnxruntime,transformers, or all that are installed."
        ),
    ] = None,
    widths: Annotated[str, typer.Option(help="--costs: rows of a forward.")] = "1,2,4,8,16,32",
    repeats: Annotated[int, typer.Option(help="--costs: times each forward is timed.")] = 15,
    prefill: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="--costs: also time reading a prompt of this length, like 2k.")
    ] = None,
    backend: flags.Backend = "auto",
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    draft_weights: flags.DraftWeights = None,
    threads: flags.Threads = None,
    out: Annotated[Path | None, typer.Option(help="Append the JSON object as a line to this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with the last line of this results file.")] = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Measure drafters: acceptance, speed, exactness, memory.

    \b
    Examples:
      hyflash bench -d lookup --prompts demo
      hyflash bench -d lookup -d ./my-drafter --prompts gsm8k.jsonl --limit 30 -n 256 --json
      hyflash bench -d ./my-drafter --acceptance-only --num-draft-tokens 5
      hyflash bench --costs --context 128,2k --peers llama.cpp
    """
    flags.check_words(exact=exact, length=length or "adaptive")
    how = TargetOptions(
        backend=backend, dtype=dtype, quant=quant, kv=kv, draft_weights=draft_weights, num_threads=threads
    )
    _check(
        drafter or [],
        of_runs=flags.given(ctx, without=_COSTS_OPTIONS) if costs else [],
        of_costs=[] if costs else [f"--{name}" for name in sorted(_COSTS_ONLY) if f"--{name}" in flags.given(ctx)],
        replayed=length if acceptance_only else None,
    )
    if out is not None:
        _check_writable(out)
    if costs:
        asked = measure_costs.parse(context=context, widths=widths, peers=peers, repeats=repeats, prefill=prefill)
        _print(_costs(target, how, asked, quiet=quiet), None, out=out, json=json)
        return
    specs = drafter or [hub.default_drafter(target)]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, draft_sampling=draft_sampling)
    contexts = [flags.parse_tokens(text) for text in context.split(",")] if context is not None else [None]

    from hyflash import api
    from hyflash.bench import compare

    earlier = compare.last_object(against) if against is not None else None
    loaded = loading.load_target(target, how, quiet=quiet)
    workloads, notes = _workloads(
        loaded,
        prompts or ["demo"],
        limit=limit,
        seed=seed,
        contexts=contexts,
        max_tokens=max_tokens,
        thinking=thinking,
    )
    table = _compare(
        loaded,
        specs,
        workloads,
        params,
        length=length or ("fixed" if acceptance_only else "adaptive"),
        num_draft_tokens=num_draft_tokens,
        exact=exact,
        acceptance_only=acceptance_only,
        settings={"prompts": prompts or ["demo"], "limit": limit, "thinking": thinking},
        quiet=quiet,
    )
    notes += [text for spec in specs for text in api.drafter_warnings(spec, loaded, thinking=thinking)]
    table["warnings"] = notes
    _print(table, earlier, out=out, json=json)


def _print(table: dict[str, Any], earlier: dict[str, Any] | None, *, out: Path | None, json: bool) -> None:
    """Compare with an earlier run, keep the object in `out`, and show it, also when it could not be kept."""
    lost: OSError | None = None
    if earlier is not None:
        from hyflash.bench import compare

        table["against"] = {"unequal": compare.unequal(earlier, table), "changes": compare.changes(earlier, table)}
    if out is not None:
        lost = _append(out, table)
    if json:
        report.print_json(table)
    else:
        report.warn(table.get("warnings", []))
        from hyflash.cli.tables import print_costs, print_rows

        (print_costs if "bandwidth_gb_per_sec" in table else print_rows)(table)
    if lost is not None:
        raise UserError(f"{out}: the results could not be kept there ({lost.strerror}); they stand on stdout only.")


def _append(out: Path, table: dict[str, Any]) -> OSError | None:
    """Add a line to the results file, or nothing at all; returns why not."""
    size = out.stat().st_size if out.exists() else 0
    try:
        with out.open("a", encoding="utf-8") as file:
            file.write(jsonlib.dumps(table) + "\n")
    except OSError as err:
        if out.is_file():
            os.truncate(out, size)
        return err
    return None


def _check(drafters: Sequence[str], *, of_runs: Sequence[str], of_costs: Sequence[str], replayed: str | None) -> None:
    """Refuse options that do not go together. Raises UserError."""
    if replayed not in (None, "fixed"):
        raise UserError(f"--acceptance-only replays at a fixed length; leave --length {replayed} out.")
    if of_costs:
        raise UserError(f"{', '.join(of_costs)} needs --costs.")
    if of_runs:
        raise UserError(f"--costs measures the target alone; leave {', '.join(of_runs)} out.")
    if "none" in drafters:
        raise UserError("bench compares drafters with plain decoding, and one of them is none; leave it out.")
    if len(set(drafters)) != len(drafters):
        raise UserError("a drafter is named twice; name each once.")


def _workloads(
    loaded: LoadedTarget,
    sources: Sequence[str],
    *,
    limit: int | None,
    seed: int,
    contexts: Sequence[int | None],
    max_tokens: int,
    thinking: bool | None,
) -> tuple[list[Workload], list[str]]:
    """Workloads by domain and context, and notes on contexts cut so that the answer fits."""
    from hyflash.bench import workloads as w

    out: list[Workload] = []
    most = loaded.model.info.max_context
    room = most - max_tokens
    if room < 1 and contexts != [None]:
        raise UserError(f"max_tokens is {max_tokens} and {loaded.name} holds {most} tokens, so no context has room.")
    notes = [
        f"prompts of {context} tokens were cut to {room}: {loaded.name} holds {most} tokens and the answer takes "
        f"{max_tokens}"
        for context in contexts
        if context is not None and context > room
    ]
    sizes = dict.fromkeys(None if context is None else min(context, room) for context in contexts)  # each once
    for domain, found in w.read(sources, limit=limit, seed=seed).items():
        for size in sizes:
            if size is None:
                out.append(w.natural(domain, found, loaded.tokenizer, thinking=thinking))
                for prompt_id, ids in zip(out[-1].ids, out[-1].prompts, strict=True):
                    if len(ids) >= most:  # found out now, not after an hour
                        raise UserError(
                            f"prompt {prompt_id} of {domain} has {len(ids)} tokens; {loaded.name} holds {most} with at "
                            "least one for the answer. Leave it out."
                        )
                continue
            out.append(w.stretched(domain, found, loaded.tokenizer, context=size, seed=seed, thinking=thinking))
    return out, list(dict.fromkeys(notes))


def _compare(
    loaded: LoadedTarget,
    specs: Sequence[str],
    workloads: list[Workload],
    params: SamplingParams,
    *,
    length: str,
    num_draft_tokens: int | None,
    exact: str,
    acceptance_only: bool,
    settings: dict[str, Any],
    quiet: bool,
) -> dict[str, Any]:
    """Run and gather the JSON object of the contract."""
    from hyflash import api
    from hyflash.bench import run
    from hyflash.drafters.base import check_samples

    made = []
    for spec in specs:
        one = api.load_drafter(spec, loaded)
        assert one is not None
        if params.draft_sampling:
            check_samples(one, spec)
        api.make_policy(loaded, one, length="fixed", num_draft_tokens=num_draft_tokens)  # refuses what is out of range
        made.append((spec, one))
    plain = api.make_engine(loaded, None, exact=exact, max_rows=64 if acceptance_only else 1)
    draft_tokens = num_draft_tokens or api.DEFAULT_DRAFT_TOKENS
    with loading.counting(quiet, "bench") as progress:
        if acceptance_only:
            rows = run.acceptance_only(plain, made, workloads, params, num_draft_tokens=draft_tokens, progress=progress)
        else:
            engines = [
                (
                    spec,
                    api.make_engine(
                        loaded, one, length=length, num_draft_tokens=num_draft_tokens, exact=exact, max_rows=1
                    ),
                )
                for spec, one in made
            ]
            rows = run.timed(plain, engines, workloads, params, progress=progress)
    return {
        "target": loaded.name,
        "settings": {
            **settings,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            **({"draft_sampling": True} if params.draft_sampling else {}),
            "length": length,
            "num_draft_tokens": draft_tokens if length == "fixed" else num_draft_tokens,
            "exact": exact,
            "exactness": plain.exactness,
            "acceptance_only": acceptance_only,
            "chat_template": loaded.tokenizer.has_template,
        },
        "provenance": {
            **_provenance(loaded),
            "prompts_sha256": {_label(row): row.workload.sha256 for row in rows},
            "drafters_sha256": {spec: run.drafter_sha256(one) for spec, one in made},
        },
        "results": [run.as_dict(row) for row in rows],
        "differences": run.differences(rows),
    }


def _costs(target: str, how: TargetOptions, asked: measure_costs.Asked, *, quiet: bool) -> dict[str, Any]:
    """Load and measure. All engines get as many threads as there are cores, unless the user says otherwise."""
    how = replace(how, num_threads=how.num_threads or environment.num_threads())
    loaded = loading.load_target(target, how, quiet=quiet)
    with loading.counting(quiet, "bench") as progress:
        return measure_costs.measure(loaded, asked, provenance=_provenance(loaded), progress=progress)


def _provenance(loaded: LoadedTarget) -> dict[str, Any]:
    info = loaded.model.info
    return {
        **environment.provenance(),
        "target_fingerprint": info.fingerprint,
        "target_dtype": info.dtype,
        "target_backend": loaded.model.describe(),
    }


def _label(row: Row) -> str:
    return row.workload.domain + (f"@{row.workload.context}" if row.workload.context else "")


def _check_writable(path: Path) -> None:
    """Find out before hours of work, not after. Raises UserError."""
    try:
        with path.open("a"):
            pass
    except OSError as err:
        raise UserError(f"cannot write to {path} ({err.strerror}); choose another file for --out.") from err
