"""The options that commands share, each written once: same name, same short form, same help everywhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import typer

from hyflash.core import LENGTHS, SamplingParams
from hyflash.errors import UserError, nearest

Target = Annotated[
    str, typer.Option("-t", "--target", help="Known name, model directory, .gguf file or hub name owner/name.")
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "-d",
        "--drafter",
        help="NAME, CHECKPOINT, NAME:CHECKPOINT, A+B, or none. "
        "Default: lookup with the drafter that ships for the target, else lookup.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("-o", "--option", metavar="KEY=VALUE", help="Option of the drafter; repeatable.")
]
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", help="Most new tokens.")]
MinTokens = Annotated[int, typer.Option(help="Do not stop before this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample among this many most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the top probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divide the logits of seen tokens by this; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Lower the logits of seen tokens by this.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Lower the logits of seen tokens by this for each time.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Add BIAS to the logit of token ID; repeatable.")
]
Logprobs = Annotated[int | None, typer.Option(help="Report log-probabilities and this many alternatives (--json).")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling; the same seed gives the same text. Default 0.")]
DraftSampling = Annotated[
    bool,
    typer.Option(
        "--draft-sampling",
        help="Sample drafts too: more are accepted at high temperature. The text then depends on the drafter and is "
        "not that of the seed alone; only its distribution is kept.",
    ),
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")]
StopTokenId = Annotated[list[int] | None, typer.Option(help="End at this token id; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the end-of-sequence token.")]
NumDraftTokens = Annotated[
    int | None, typer.Option(help="Draft tokens per round: the count (fixed) or cap (adaptive, nightjar).")
]
Length = Annotated[
    str, typer.Option(metavar="adaptive|nightjar|fixed", help="How the draft length is chosen each round.")
]
OffloadBelow = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="--length nightjar: let go of the drafter's weights, while it pauses, when less memory is free: 500M, 2G.",
    ),
]
Exact = Annotated[
    str, typer.Option(metavar="auto|recheck|off", help="How text is kept equal to plain decoding; off may differ.")
]
System = Annotated[str | None, typer.Option(help="System message.")]
Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Thinking mode, where the template has one.")
]
Backend = Annotated[
    str,
    typer.Option(metavar="auto|native|torch", help="What computes the target; auto: our CPU kernels where they can."),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="float32|bfloat16|float16", help="Arithmetic of the torch backend. Default: float32."),
]
Quant = Annotated[
    str | None,
    typer.Option(metavar="none|q8_0|q4_0|q4_1", help="Native backend: quantise a model directory on load."),
]
Kv = Annotated[
    str | None,
    typer.Option(
        metavar="float16|bfloat16|float32|int8", help="Native backend: type of keys and values. Default: float16."
    ),
]
DraftWeights = Annotated[
    str | None,
    typer.Option(
        metavar="q4_1|q4_0|q8_0|bfloat16|float32|torch",
        help="Native backend: how a drafter keeps its weights; torch: off the kernels. Default: q4_1.",
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: all cores, or one where that is faster.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress or summary on stderr.")]


EXACT = ("auto", "recheck", "off")


def check_words(*, exact: str = "auto", length: str = "adaptive") -> None:
    """Refuse unknown words before anything slow is loaded. Raises UserError with the nearest one."""
    for name, value, known in (("exact", exact, EXACT), ("length", length, LENGTHS)):
        if value not in known:
            raise UserError(f"{name} is {value!r}; expected {' or '.join(known)}.{nearest(value, known)}")


def check_drafting(drafter: str, *, num_draft_tokens: int | None, length: str, draft_sampling: bool) -> None:
    """Refuse options of drafting without a drafter. Raises UserError."""
    for name, used in (
        ("--num-draft-tokens", num_draft_tokens is not None),
        ("--length", length != "adaptive"),
        ("--draft-sampling", draft_sampling),
    ):
        if drafter == "none" and used:
            raise UserError(f"{name} needs a drafter, and the drafter is none.")


def parse_bytes(text: str | None, *, length: str) -> int | None:
    """`--offload-below`: `500M` (500 MB) or `2G` in bytes, None for None. Raises UserError, also at another length."""
    if text is None:
        return None
    if length != "nightjar":
        raise UserError(f"--offload-below needs --length nightjar, which pauses drafting as a whole; it is {length}.")
    raw = text.strip().upper()
    unit = {"M": 10**6, "G": 10**9}.get(raw[-1:], 0)
    try:
        value = float(raw[:-1]) * unit
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value >= 1):
        raise UserError(f"--offload-below {text!r} is not a size; expected something like 500M or 2G.")
    return int(value)


def sampling(
    *,
    max_tokens: int,
    min_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Sequence[str] | None,
    logprobs: int | None,
    seed: int | None,
    draft_sampling: bool,
    stop: Sequence[str] | None,
    stop_token_id: Sequence[int] | None,
    ignore_eos: bool,
) -> SamplingParams:
    """Sampling parameters of a command line. Raises UserError on a value that makes no sense."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or ()),
        logprobs=logprobs,
        seed=seed or 0,
        draft_sampling=draft_sampling,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )


def sampling_range(*, temperature: float, top_p: float, share: float, seed: int, max_tokens: int) -> None:
    """Refuse values that `data regenerate` cannot use, before anything slow is loaded. Raises UserError."""
    SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    if not 0 <= share <= 1:
        raise UserError(f"greedy_share is {share}; expected a number from 0 to 1.")


def sampling_notes(params: SamplingParams, *, seed_given: bool) -> list[str]:
    """A warning for each option that cannot change this run, and for one that changes what a seed means."""
    if params.draft_sampling:
        return ["drafts are sampled: the text has the target's distribution, but depends on the drafter as well"]
    if params.temperature > 0:
        return []
    idle = [
        ("--seed", seed_given),
        ("--top-k", params.top_k != 0),
        ("--top-p", params.top_p != 1.0),
        ("--min-p", params.min_p != 0.0),
    ]
    return [f"{name} has no effect at temperature 0 (greedy)" for name, given in idle if given]


def given(ctx: typer.Context, *, without: Collection[str] = ()) -> list[str]:
    """The options that stand on the command line, by their long names, except the parameters in `without`."""
    sources = {param: ctx.get_parameter_source(param.name or "") for param in ctx.command.params}
    return [
        max(param.opts, key=len)
        for param, source in sources.items()
        if param.name not in without and source is not None and source.name == "COMMANDLINE"
    ]


def read_prompt(prompt: str | None) -> str:
    """The prompt of the command line, or of stdin for `-` or none. Raises UserError when there is none."""
    if prompt is None and sys.stdin.isatty():
        raise UserError("no prompt; give one in quotes, or `-` to read it from stdin.")
    if prompt is None or prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as err:
            raise UserError(f"the prompt on stdin is not UTF-8 (byte {err.start}); expected UTF-8 text.") from err
    else:
        text = prompt
    return check_text("the prompt", text)


def check_text(what: str, text: str) -> str:
    """`text` if it has something to say and is valid Unicode. Raises UserError otherwise."""
    if not text.strip():
        raise UserError(f"{what} is empty; expected some text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise UserError(f"{what} is not valid UTF-8 at character {err.start}; expected UTF-8 text.") from err
    return text


def parse_tokens(text: str, what: str = "context") -> int:
    """`512`, `2k` (2048) or `1.5k` as a token count. Raises UserError."""
    raw = text.strip().lower()
    try:
        count = float(raw[:-1]) * 1024 if raw.endswith("k") else float(raw)
    except ValueError:
        count = math.nan
    if not (math.isfinite(count) and count >= 1 and count == int(count)):
        raise UserError(f"{what} {text!r} is not a token count; expected something like 512 or 2k.")
    return int(count)


def _biases(items: Iterable[str]) -> dict[int, float]:
    out: dict[int, float] = {}
    for item in items:
        key, sep, value = item.partition("=")
        try:
            out[int(key)] = float(value)
        except ValueError:
            sep = ""
        if not sep:
            raise UserError(f"logit bias {item!r} is not of the form ID=BIAS, like 42=-5.")
    return out
