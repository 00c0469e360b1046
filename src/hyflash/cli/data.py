"""`hyflash data`: answers of the target, their features, and what is in either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from hyflash import hub
from hyflash.cli import flags, loading, report
from hyflash.core import TargetOptions
from hyflash.errors import UserError, nearest

if TYPE_CHECKING:
    from hyflash.core import TargetHooks

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Training data: answers of the target, features, counts.",
)


class Step(Protocol):
    """Moves the progress bar."""

    def __call__(self, done: int, total: int, text: str) -> None:
        """`done` of `total`, and what to say beside the bar."""


@app.command()
def regenerate(
    ctx: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="Prompt files (.jsonl, .json, .gz) or dataset names.")],
    *,
    out: Annotated[Path, typer.Option(help="Answers file to write or go on with.")],
    target: flags.Target = hub.DEFAULT_TARGET,
    max_tokens: flags.MaxTokens = 256,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled share.")] = 0.7,
    top_p: flags.TopP = 1.0,
    greedy_share: Annotated[float, typer.Option(help="Share of prompts answered greedily.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the order of prompts.")] = 0,
    thinking: flags.Thinking = None,
    limit: Annotated[int | None, typer.Option(help="At most this many prompts.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out prompts that stand in this file; repeatable.")
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Domain of the prompts. Default: from the file name.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts answered at once.")] = 64,
    backend: flags.Backend = "auto",
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    threads: flags.Threads = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Let the target answer prompts; run again to go on after a stop.

    \b
    Examples:
      hyflash data regenerate gsm8k.jsonl --out answers.jsonl -n 256
      hyflash data regenerate train.jsonl --without test.jsonl --limit 2000 --out answers.jsonl
    """
    how = TargetOptions(backend=backend, dtype=dtype, quant=quant, kv=kv, num_threads=threads)
    flags.sampling_range(temperature=temperature, top_p=top_p, share=greedy_share, seed=seed, max_tokens=max_tokens)
    for name, value in (("batch", batch), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; expected a whole number of at least 1.")
    if greedy_share == 1:
        idle = [name for name in flags.given(ctx) if name in ("--temperature", "--top-p")]
        report.warn([f"{name} has no effect: at --greedy-share 1 every answer is greedy" for name in idle])

    from hyflash.data import prompts as files
    from hyflash.data.regenerate import Progress, Sampling
    from hyflash.data.regenerate import regenerate as answer

    found = files.load_prompts(prompts, domain=domain, shuffle_seed=seed)
    kept = files.without(found.prompts, files.load_prompts(without).prompts) if without else found.prompts
    kept = kept[:limit]
    if not kept:
        raise UserError(f"no prompt is left: all {len(found.prompts)} stand in the --without files.")
    loaded = loading.load_target(target, how, quiet=quiet)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        greedy_share=greedy_share,
        seed=seed,
        thinking=thinking,
    )
    with _bar(quiet, "answers") as step:

        def show(now: Progress) -> None:
            done = now.num_success + now.num_errors + now.num_skipped
            step(done, now.num_prompts, f"{now.tokens_per_sec:.0f} tok/s")

        end = answer(loaded.model, loaded.tokenizer, kept, out, sampling=sampling, batch=batch, on_progress=show)
    if end.num_errors == end.num_prompts:
        raise UserError(f"none of the {end.num_prompts} prompts could be answered; the first: {end.first_error}")
    if end.num_errors:
        report.say(f"{end.num_errors} prompts could not be answered; the first: {end.first_error}", quiet=quiet)
    counts = {
        "out": str(out),
        "num_prompts": end.num_prompts,
        "num_success": end.num_success,
        "num_errors": end.num_errors,
        "num_skipped": end.num_skipped,
        "num_tokens": end.num_tokens,
        "num_bad_rows": found.num_bad,
        "num_duplicates": found.num_duplicates,
    }
    _result(counts, json)


@app.command()
def capture(
    answers: Annotated[Path, typer.Argument(help="Answers file of `hyflash data regenerate`.")],
    *,
    out: Annotated[Path, typer.Option(help="Directory of shards to write or go on with.")],
    recipe: Annotated[Path | None, typer.Option(help="Take target and layers from this recipe.")] = None,
    option: Annotated[list[str] | None, typer.Option("-o", "--option", help="Override of the recipe.")] = None,
    taps: Annotated[str | None, typer.Option(help="Layers to capture, like 1,8,14; instead of a recipe.")] = None,
    kv_layers: Annotated[
        str | None, typer.Option(help="Beside --taps: layers whose keys and values are captured too, like 10,19,28.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("-t", "--target", help="Target; default the recipe's or embedded one.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="auto|native|torch", help="Default: the recipe's, or auto.")
    ] = None,
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard.")] = 32768,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per target forward.")] = 4096,
    threads: flags.Threads = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Capture the target's features over its answers to checksummed shards; run again to go on after a stop.

    \b
    Examples:
      hyflash data capture answers.jsonl --recipe recipes/smol-hyflash.toml --out shards
      hyflash data capture answers.jsonl -t smollm2-135m --taps 1,8,14,21,27,30 --out shards
    """
    if (recipe is None) == (taps is None):
        raise UserError("capture needs the layers to read: give either --recipe or --taps.")
    if kv_layers is not None and recipe is not None:
        raise UserError("the recipe's drafter says whose keys and values it reads; leave --kv-layers out.")
    if option and recipe is None:
        raise UserError("-o overrides a recipe, and none is given; add --recipe or leave it out.")
    for name, value in (("shard-tokens", shard_tokens), ("batch-tokens", batch_tokens)):
        if value < 1:
            raise UserError(f"{name} is {value}; expected a whole number of at least 1.")

    from hyflash.data.answers import read_answers
    from hyflash.data.shards import write_shards

    file = read_answers(answers)
    plan = _recipe(recipe, option or []) if recipe is not None else None
    name = target or (plan.target.name if plan else hub.DEFAULT_TARGET)
    own = plan.target if plan else None
    loaded = loading.load_target(
        name,
        TargetOptions(
            backend=backend or (own.backend if own else "auto"),
            dtype=dtype or (own.dtype if own else None),
            quant=quant or (own.quant if own else None),
            kv=kv or (own.kv if own else None),
            num_threads=threads or (own.num_threads if own else None),
        ),
        quiet=quiet,
    )
    num_layers = loaded.model.info.num_layers
    if taps is None:
        layers, own_kv = _recipe_layers(plan, loaded.model.hooks())
    else:
        layers = _layers("taps", taps, num_layers)
        own_kv = _layers("kv-layers", kv_layers, num_layers - 1) if kv_layers is not None else ()
    with _bar(quiet, "tokens") as step:
        info = write_shards(
            loaded.model,
            file.answers,
            out,
            taps=layers,
            kv_layers=own_kv,
            meta=file.meta,
            shard_tokens=shard_tokens,
            batch_tokens=batch_tokens,
            progress=lambda done, total: step(done, total, ""),
        )
    counts = {
        "out": str(out),
        "taps": list(info.taps),
        "kv_layers": list(info.kv_layers),
        "num_examples": info.num_examples,
        "num_tokens": info.num_tokens,
        "num_label_tokens": info.num_label_tokens,
        "num_bad_rows": file.num_bad,
        "num_duplicates": file.num_duplicates,
        "data_hash": info.data_hash,
    }
    _result(counts, json)


@app.command()
def ngrams(
    answers: Annotated[list[Path], typer.Argument(help="Answers files of `hyflash data regenerate`.")],
    *,
    out: Annotated[Path, typer.Option(help="Directory of the drafter to write.")],
    target: flags.Target = hub.DEFAULT_TARGET,
    max_context: Annotated[int, typer.Option(help="Most tokens of context, 1 to 3.")] = 3,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Count an n-gram drafter from the target's answers; `hyflash generate -d lookup+OUT` then drafts with it.

    \b
    Examples:
      hyflash data ngrams answers.jsonl --out my-ngrams
    """
    if (out / "config.json").exists():
        raise UserError(f"{out}: holds a drafter already; choose another directory or remove it.")

    from hyflash import checkpoint
    from hyflash.data.answers import read_answers
    from hyflash.data.disk import new_directory
    from hyflash.drafters import ngram
    from hyflash.environment import provenance
    from hyflash.train.card import target_facts

    config = ngram.NgramConfig.parse({"max_context": max_context}, where="hyflash data ngrams")
    files = [read_answers(path) for path in answers]
    loaded = loading.load_target(target, TargetOptions(), quiet=quiet)
    texts = [(answer.prompt_ids, answer.answer_ids) for file in files for answer in file.answers]
    drafter = ngram.count(texts, config, loaded.model.hooks())
    counts = {
        "num_answers": len(texts),
        "num_tokens": sum(len(answer) for _, answer in texts),
        "num_entries": len(drafter.keys),
        "num_bad_rows": sum(file.num_bad for file in files),
        "num_duplicates": sum(file.num_duplicates for file in files),
    }
    card = {
        "target": target_facts(loaded.model.info),
        "drafter": "ngram",
        "target_layer_ids": [],
        "data": {"answers": [path.name for path in answers], "sampling": [file.meta.get("sampling") for file in files]},
        "num_draft_tokens": drafter.max_draft_tokens,
        "training": counts,
        "provenance": provenance(),
    }
    with new_directory(out) as temp:
        checkpoint.save(drafter, temp, card=card)
    _result({"out": str(out), **counts}, json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Answers file or directory of shards.")],
    *,
    json: flags.Json = False,
) -> None:
    """Count and check what an answers file or a directory of shards holds.

    \b
    Examples:
      hyflash data inspect answers.jsonl
      hyflash data inspect shards --json
    """
    if not path.exists():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        raise UserError(f"{path}: no such file or directory.{nearest(path.name, [p.name for p in beside])}")
    if path.is_dir():
        from hyflash.data.shards import ShardReader

        _result(ShardReader(path).summary(), json)
    else:
        _result(_answers_summary(path), json)


def _answers_summary(path: Path) -> dict[str, Any]:
    from hyflash.data.answers import read_answers
    from hyflash.metrics import in_loop

    file = read_answers(path)
    tokens = sum(len(a.answer_ids) for a in file.answers)
    looped = sum(sum(in_loop(a.answer_ids)) for a in file.answers)
    return {
        "path": str(path),
        "num_answers": len(file.answers),
        "num_bad_rows": file.num_bad,
        "num_duplicates": file.num_duplicates,
        "num_prompt_tokens": sum(len(a.prompt_ids) for a in file.answers),
        "num_answer_tokens": tokens,
        "loop_share": round(looped / tokens, 4),
        "answers_by_domain": dict(Counter(a.domain for a in file.answers)),
        "meta": dict(file.meta),
    }


def _recipe(path: Path, overrides: list[str]) -> Any:
    from hyflash.train.recipe import load_recipe

    return load_recipe(path, overrides)


def _recipe_layers(recipe: Any, hooks: TargetHooks) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers whose outputs, and those whose keys and values the recipe's drafter reads of this target."""
    from hyflash.train.trainer import make_drafter

    drafter = make_drafter(recipe, hooks)
    return drafter.target_layer_ids, drafter.target_kv_layers


def _layers(name: str, text: str, last: int) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or len(set(layers)) != len(layers) or any(not 0 <= layer <= last for layer in layers):
        raise UserError(f"{name} {text!r}: expected different layers from 0 to {last}, like 1,8,14.")
    return layers


def _result(counts: dict[str, Any], json: bool) -> None:
    if json:
        report.print_json(counts)
        return
    for name, value in counts.items():
        typer.echo(f"{name}: {value}")


@contextmanager
def _bar(quiet: bool, what: str) -> Iterator[Step]:
    """A bar with time left on stderr; a line each tenth where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        tenth = 0

        def step(done: int, total: int, text: str) -> None:
            nonlocal tenth
            bar.update(task, completed=done, total=total, description=text)
            if not console.is_terminal and total and 10 * done // total > tenth:
                tenth = 10 * done // total
                report.say(f"{done} of {total} {what} {text}".rstrip(), quiet=quiet)

        yield step
