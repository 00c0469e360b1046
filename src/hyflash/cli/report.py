"""How results look: JSON objects for scripts on stdout, one line for people on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from hyflash.core import Result
from hyflash.errors import HyflashError

if TYPE_CHECKING:
    from hyflash.engine.decode import Engine


def say(text: str, *, quiet: bool = False) -> None:
    """A line for people, on stderr."""
    if not quiet:
        typer.echo(text, err=True)


def warn(warnings: Sequence[str]) -> None:
    """Warnings, one line each, on stderr."""
    for text in warnings:
        typer.echo(f"warning: {text}", err=True)


def backend(facts: Mapping[str, Any], memory: Mapping[str, int]) -> str:
    """One line on what computes the target and what it holds: `native Q4_1, float16 KV, avx512, 2 threads · ...`."""
    names = [str(facts["backend"]), *(str(facts[key]) for key in ("weights", "dtype", "isa") if key in facts)]
    names += [f"{facts['kv']} KV"] if "kv" in facts else []
    names += [f"{facts['num_threads']} threads"] if "num_threads" in facts else []
    parts = [f"{key.removesuffix('_bytes')} {size(value)}" for key, value in memory.items() if value]
    return f"{', '.join(names)} · {', '.join(parts)}"


def print_json(value: Any) -> None:
    """One JSON object on stdout, escaped where stdout's encoding could not hold it."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    typer.echo(text)


def piece(text: str) -> None:
    """A piece of streamed text on stdout, shown at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def mark(text: str) -> None:
    """A prompt mark on stderr, without a line end."""
    typer.echo(text, err=True, nl=False)


def check(result: Result) -> Result:
    """The result, unless it ended in a fault of the target. Raises HyflashError."""
    if result.error is not None:
        raise HyflashError(result.error)
    return result


def result_fields(
    result: Result,
    engine: Engine,
    *,
    target: str,
    drafter: str,
    warnings: Sequence[str] = (),
    draft_sampling: bool = False,
) -> dict[str, Any]:
    """The JSON fields of one generation. `exact` promises the text of plain decoding."""
    out: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "num_prompt_tokens": len(result.prompt_ids),
        "num_tokens": len(result.token_ids),
        "num_rounds": len(result.rounds),
        "acceptance_length": round(result.acceptance_length, 4),
        "tokens_per_sec": round(result.tokens_per_sec, 3),
        "ttft_sec": round(result.ttft_sec, 4),
        "draft_state_bytes": result.draft_state_bytes,
        "exact": engine.exactness != "off" and not draft_sampling,
        "exactness": engine.exactness,
        "target": target,
        "drafter": drafter,
        "warnings": [*warnings, *result.warnings, *engine_warnings(engine)],
    }
    if result.logprobs:
        out["logprobs"] = [
            {"token_id": item.token_id, "logprob": item.logprob, "top": [list(pair) for pair in item.top]}
            for item in result.logprobs
        ]
    return out


def engine_warnings(engine: Engine) -> list[str]:
    """What the engine's counters say a user should know."""
    cut = engine.counters["draft_nonfinite"]
    out = [f"the drafter gave NaN or infinity; {cut} proposals were cut short"] if cut else []
    if engine.exactness == "off":
        out.append(f"exactness is off: text may differ from plain decoding ({engine.counters['near_ties']} near ties)")
    return out


def summary(result: Result, *, drafter: str) -> str:
    """One line on a generation."""
    parts = [
        f"{len(result.token_ids)} tokens ({result.finish_reason})",
        f"{result.tokens_per_sec:.1f} tok/s",
        f"{result.acceptance_length:.2f} tokens per round",
        f"first token {result.ttft_sec:.2f} s",
        f"drafter {drafter}",
    ]
    if result.draft_state_bytes:
        parts.append(f"state {size(result.draft_state_bytes)}")
    return " · ".join(parts)


def size(num_bytes: int) -> str:
    """Bytes for people: 512 B, 1.5 KB, 3.0 MB."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def memory(footprints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Drafter bytes of one text by context, for people; one line, none without footprints."""
    parts = [
        bytes_at(one["context"], one["computed_bytes"]) + ("" if one["measured_bytes"] is None else " (found)")
        for one in footprints
    ]
    return [f"memory of a text: {', '.join(parts)}"] if parts else []


def bytes_at(context: int, num_bytes: int) -> str:
    """Bytes at a context in thousands of tokens."""
    return f"{context // 1000}k {size(num_bytes)}"
