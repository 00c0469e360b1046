"""`hyflash chat`: a conversation in the terminal (or from a pipe, a line a turn)."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from hyflash import hub
from hyflash.cli import flags, report
from hyflash.cli.generate import stream
from hyflash.cli.session import Session, open_session
from hyflash.core import Request, SamplingParams, TargetOptions
from hyflash.errors import UserError

HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    *,
    target: flags.Target = hub.DEFAULT_TARGET,
    drafter: flags.Drafter = None,
    option: flags.Overrides = None,
    max_tokens: flags.MaxTokens = 512,
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
    backend: flags.Backend = "auto",
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    draft_weights: flags.DraftWeights = None,
    threads: flags.Threads = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Talk with a model.

    \b
    Examples:
      hyflash chat
      hyflash chat -t ./my-model -d lookup --temperature 0.7 --seed 1
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
    if logprobs is not None and not json:
        raise UserError("--logprobs are printed with --json only; add --json.")
    flags.check_drafting(spec, num_draft_tokens=num_draft_tokens, length=length, draft_sampling=draft_sampling)
    if system is not None:
        flags.check_text("the system message", system)

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
    session.engine.check(params)
    session.warnings.extend(flags.sampling_notes(params, seed_given=seed is not None))
    report.warn([] if json else session.warnings)
    report.say(f"{target} with drafter {spec}. {HELP}", quiet=quiet)
    talk(session, params, system=system, thinking=thinking, json=json, quiet=quiet)


def talk(
    session: Session,
    params: SamplingParams,
    *,
    system: str | None,
    thinking: bool | None,
    json: bool,
    quiet: bool,
) -> None:
    """Answer turn after turn until the input ends. A turn that cannot be served is said and leaves the talk going."""
    tokenizer, engine = session.loaded.tokenizer, session.engine
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages = list(opening)
    tokenizer.chat([*opening, {"role": "user", "content": "Hello"}], thinking)  # a template that cannot fails here
    for line in _lines():
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
            continue
        if not line.strip():
            continue
        turn = [*messages, {"role": "user", "content": line}]
        shown: list[str] = []

        def show(text: str, shown: list[str] = shown) -> None:
            shown.append(text)
            if not json:
                report.piece(text)

        try:
            flags.check_text("the line", line)
            ids = tokenizer.chat(turn, thinking)
            result = stream(engine, Request(prompt_ids=tuple(ids), params=replace(params)), show)
        except UserError as err:
            report.say(f"error: {err} /reset starts over.")
            continue
        except KeyboardInterrupt:
            if not shown:
                raise
            report.say("stopped.", quiet=quiet)
            messages = [*turn, {"role": "assistant", "content": "".join(shown).rstrip("\n")}]
            continue
        messages = [*turn, {"role": "assistant", "content": result.text}]
        if json:
            fields = report.result_fields(
                result,
                engine,
                target=session.target,
                drafter=session.drafter,
                warnings=session.warnings,
                draft_sampling=params.draft_sampling,
            )
            report.print_json(fields)
        report.say(report.summary(result, drafter=session.drafter), quiet=quiet)


def _lines() -> Iterator[str]:
    """Lines of the terminal with a prompt mark, or of a pipe without."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused, not the whole talk
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  arrow keys and history in input()

    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:  # input() would write its mark among the answers
                report.mark("> ")
                yield input()
        except EOFError:
            return
