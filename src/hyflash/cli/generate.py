"""`hyflash generate`: answer one prompt, streamed; with --compare also plain decoding, and the proof of equality."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hyflash import hub
from hyflash.cli import flags, report
from hyflash.cli.session import Session, open_session, plain_engine
from hyflash.core import Event, Request, Result, SamplingParams, TargetOptions
from hyflash.errors import UserError

if TYPE_CHECKING:
    from hyflash.engine.decode import Engine
    from hyflash.text import Tokenizer

WARM_UP_TOKENS = 16


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")] = None,
    *,
    target: flags.Target = hub.DEFAULT_TARGET,
    drafter: flags.Drafter = None,
    option: flags.Overrides = None,
    max_tokens: flags.MaxTokens = 256,
    min_tokens: flags.MinTokens = 0,
    temperature: flags.Temperature = 0.0,
    top_k: flags.TopK = 0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    repetition_penalty: flags.RepetitionPenalty = 1.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    logit_bias: flags.LogitBias = None,
    logprobs: flags.Logprobs = None,
    seed: flags.Seed = None,
    draft_sampling: flags.DraftSampling = False,
    stop: flags.Stop = None,
    stop_token_id: flags.StopTokenId = None,
    ignore_eos: flags.IgnoreEos = False,
    num_draft_tokens: flags.NumDraftTokens = None,
    length: flags.Length = "adaptive",
    offload_below: flags.OffloadBelow = None,
    exact: flags.Exact = "auto",
    system: flags.System = None,
    thinking: flags.Thinking = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly: speed-up, and is it equal?")] = False,
    backend: flags.Backend = "auto",
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    draft_weights: flags.DraftWeights = None,
    threads: flags.Threads = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Answer one prompt.

    \b
    Examples:
      hyflash generate "Why is the sky blue?"
      hyflash generate --compare -n 128 "Write a haiku about rivers."
      echo "Once upon a time" | hyflash generate --raw -d lookup --json
    """
    params = flags.sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logprobs=logprobs,
        seed=seed,
        draft_sampling=draft_sampling,
        stop=stop,
        stop_token_id=stop_token_id,
        ignore_eos=ignore_eos,
    )
    flags.check_words(exact=exact, length=length)
    low_bytes = flags.parse_bytes(offload_below, length=length)
    how = TargetOptions(
        backend=backend, dtype=dtype, quant=quant, kv=kv, draft_weights=draft_weights, num_threads=threads
    )
    spec = hub.default_drafter(target) if drafter is None else drafter
    _check_combination(
        spec,
        raw=raw,
        system=system,
        thinking=thinking,
        compare=compare,
        draft_sampling=draft_sampling,
    )
    flags.check_drafting(spec, num_draft_tokens=num_draft_tokens, length=length, draft_sampling=draft_sampling)
    if logprobs is not None and not json:
        raise UserError("--logprobs are printed with --json only; add --json.")
    text = flags.read_prompt(prompt)

    session = open_session(
        target,
        spec,
        options=option or (),
        how=how,
        length=length,
        num_draft_tokens=num_draft_tokens,
        offload_below=low_bytes,
        exact=exact,
        thinking=thinking,
        quiet=quiet,
    )
    ids = prompt_ids(session.loaded.tokenizer, text, raw=raw, system=system, thinking=thinking)
    session.warnings.extend(flags.sampling_notes(params, seed_given=seed is not None))
    session.warnings.extend(_no_room(session, len(ids), max_tokens))
    plain = plain_engine(session, exact=exact) if compare else None
    request = Request(prompt_ids=tuple(ids), params=params)
    results, plains = run(session.engine, plain, request, None if json else report.piece)
    _tell(session, plain, results, plains, draft_sampling=draft_sampling, json=json, quiet=quiet)


def _no_room(session: Session, num_prompt_tokens: int, max_tokens: int) -> list[str]:
    room = session.loaded.model.info.max_context - num_prompt_tokens
    if max_tokens <= room or room < 1:  # no room at all is an error of the engine
        return []
    return [f"only {room} of {max_tokens} new tokens fit the context of {session.target}"]


def _tell(
    session: Session,
    plain: Engine | None,
    results: Sequence[Result],
    plains: Sequence[Result],
    *,
    draft_sampling: bool,
    json: bool,
    quiet: bool,
) -> None:
    """The JSON object on stdout, or warnings, and the summary lines on stderr."""
    first = results[0]
    fields = report.result_fields(
        first,
        session.engine,
        target=session.target,
        drafter=session.drafter,
        warnings=session.warnings,
        draft_sampling=draft_sampling,
    )
    fields["backend"] = session.loaded.model.describe()
    fields["memory"] = session.loaded.model.memory()
    lines = [report.summary(first, drafter=session.drafter)]
    if plain is not None:
        fields["tokens_per_sec"], plain_speed = _speed(results), _speed(plains)
        fields["plain"] = report.result_fields(plains[0], plain, target=session.target, drafter="none")
        fields["plain"]["tokens_per_sec"] = plain_speed
        fields["speedup"] = round(fields["tokens_per_sec"] / plain_speed, 4) if plain_speed else None
        fields["identical"] = first.token_ids == plains[0].token_ids and first.text == plains[0].text
        lines.append(_comparison(fields["speedup"], fields["tokens_per_sec"], plain_speed, fields["identical"]))
    if json:
        report.print_json(fields)
    else:
        report.warn(fields["warnings"])
    for line in lines:
        report.say(line, quiet=quiet)


def prompt_ids(tokenizer: Tokenizer, text: str, *, raw: bool, system: str | None, thinking: bool | None) -> list[int]:
    """Token ids of a prompt, by the chat template or raw. Raises UserError where the template cannot."""
    if raw:
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.chat([*messages, {"role": "user", "content": text}], thinking)


def run(
    engine: Engine, plain: Engine | None, request: Request, show: Callable[[str], None] | None
) -> tuple[list[Result], list[Result]]:
    """Decode once; with a plain engine twice each, in the order drafted, plain, plain, drafted after a warm-up.

    Returns the drafted and the plain results. The first drafted run is shown as it comes.
    """
    if plain is not None:
        short = replace(request, params=replace(request.params, max_tokens=_warm_up(request.params), min_tokens=0))
        for each in (engine, plain):
            report.check(each.generate([short])[0])
    results = [stream(engine, request, show)]
    if plain is None:
        return results, []
    plains = [report.check(plain.generate([request])[0]) for _ in range(2)]
    results.append(report.check(engine.generate([request])[0]))
    return results, plains


def stream(engine: Engine, request: Request, show: Callable[[str], None] | None) -> Result:
    """Decode one request, showing its text as it comes. Raises HyflashError when the target failed."""
    request_id, shown = -1, False
    try:
        events = cast("Generator[Event, None, None]", engine.stream(request))
        with closing(events):  # an interrupt in `show` must cancel the request too
            for event in events:
                request_id = event.request_id
                if show is not None and event.text:
                    show(event.text)
                    shown = True
    finally:
        if show is not None and shown:
            show("\n")
    return report.check(engine.result(request_id))


def _warm_up(params: SamplingParams) -> int:
    return min(WARM_UP_TOKENS, params.max_tokens)


def _speed(results: Sequence[Result]) -> float:
    """Tokens per second of decoding over repeated runs."""
    seconds = sum(r.decode_sec for r in results)
    return round(sum(len(r.token_ids) for r in results) / seconds, 3) if seconds else 0.0


def _comparison(speedup: float | None, drafted: float, plain: float, identical: bool) -> str:
    if not identical:
        return f"text DIFFERS from plain decoding ({plain:.1f} tok/s); please report this."
    return f"{speedup or 0:.2f}x plain decoding ({drafted:.1f} against {plain:.1f} tok/s) · text identical"


def _check_combination(
    spec: str,
    *,
    raw: bool,
    system: str | None,
    thinking: bool | None,
    compare: bool,
    draft_sampling: bool,
) -> None:
    """Refuse options that would be ignored together. Raises UserError."""
    if compare and spec == "none":
        raise UserError("--compare needs a drafter to compare with plain decoding, and the drafter is none.")
    if compare and draft_sampling:
        raise UserError("--compare proves texts equal, and with --draft-sampling they are not; leave one of them out.")
    if raw and system is not None:
        raise UserError("--raw sends the prompt as it is, so --system has no place; leave one of them out.")
    if raw and thinking is not None:
        raise UserError("--raw sends the prompt as it is, so --thinking has no place; leave one of them out.")
    if system is not None:
        flags.check_text("the system message", system)
