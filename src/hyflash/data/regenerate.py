"""Let the target answer prompts: training data must be its own words.

In: prompts and a target. Out: `answers.jsonl`, one answer a line, and `answers.jsonl.meta.json` beside it. Runs in
batches; rerun after a stop it goes on where it was, since answered ids are skipped and lines are whole or absent.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyflash.core import Request, SamplingParams
from hyflash.data.answers import read_answers
from hyflash.data.disk import clear_disk_errors, read_json, write_json
from hyflash.data.prompts import Prompt
from hyflash.engine.decode import Engine
from hyflash.errors import UserError
from hyflash.targets.base import Target
from hyflash.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn. A share of the prompts is answered greedily, the rest at `temperature`."""

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 1.0
    greedy_share: float = 0.5
    seed: int = 0
    thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counts of a running regeneration; success + errors + skipped = num_prompts at its end."""

    num_prompts: int
    num_success: int
    num_errors: int
    num_skipped: int
    num_tokens: int
    tokens_per_sec: float
    first_error: str = ""
    """Why the first prompt that counts as an error could not be served."""


def regenerate(
    target: Target,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    sampling: Sampling,
    batch: int = 64,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Answer every prompt that `out` does not hold yet and append the answers to it.

    A prompt that cannot be served (too long, refused by the template) counts as an error and is left out. Raises
    UserError when `out` belongs to another target or other settings, and when the disk is full.
    """
    done = _begin(out, target, sampling)
    todo = [p for p in prompts if p.id not in done]
    engine = Engine(target, max_rows=batch, exact="off", tokenizer=None)
    counts: Counter[str] = Counter(skipped=len(prompts) - len(todo))
    complaints: list[str] = []
    began = time.perf_counter()

    def report() -> Progress:
        elapsed = max(time.perf_counter() - began, 1e-9)
        return Progress(
            num_prompts=len(prompts),
            num_success=counts["success"],
            num_errors=len(complaints),
            num_skipped=counts["skipped"],
            num_tokens=counts["tokens"],
            tokens_per_sec=counts["tokens"] / elapsed,
            first_error=complaints[0] if complaints else "",
        )

    waiting = iter(todo)
    running: dict[int, tuple[Prompt, SamplingParams]] = {}
    while True:
        while len(running) < batch and (prompt := next(waiting, None)) is not None:
            try:
                request = _request(prompt, tokenizer, sampling)
                running[engine.submit(request)] = (prompt, request.params)
            except UserError as err:
                complaints.append(str(err))
        if not running:
            break
        for request_id in {e.request_id for e in engine.step() if e.finish_reason is not None}:
            prompt, params = running.pop(request_id)
            result = engine.result(request_id)
            if result.error is not None:
                complaints.append(result.error)
                continue
            row = {
                "id": prompt.id,
                "domain": prompt.domain,
                "messages": list(prompt.messages),
                "prompt_ids": list(result.prompt_ids),
                "answer_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
                "temperature": params.temperature,
                "seed": params.seed,
            }
            _write_line(row, out)
            counts["success"] += 1
            counts["tokens"] += len(result.token_ids)
            if on_progress is not None:
                on_progress(report())
    return report()


def _request(prompt: Prompt, tokenizer: Tokenizer, sampling: Sampling) -> Request:
    """Greedy or sampled by the prompt's own id, so that a resumed run draws the same answers."""
    number = int(prompt.id[:12], 16)
    greedy = (number % 1000) / 1000 < sampling.greedy_share
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=0.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        seed=(sampling.seed + number) % 2**64,
    )
    return Request(prompt_ids=tuple(tokenizer.chat(prompt.messages, sampling.thinking)), params=params)


def _meta(target: Target, sampling: Sampling) -> dict[str, Any]:
    info = target.info
    return {
        "target": info.name,
        "fingerprint": info.fingerprint,
        "dtype": info.dtype,
        "sampling": asdict(sampling),
    }


def _begin(out: Path, target: Target, sampling: Sampling) -> set[str]:
    """Ids that `out` holds already, once it is sure to be ours: its side file is compared, or written."""
    side, mine = Path(f"{out}.meta.json"), _meta(target, sampling)
    begun = side.exists()
    theirs = read_json(side) if begun else mine
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise UserError(
                f"{out} was begun with {key} {theirs.get(key)!r}, now it is {value!r}; "
                "use the same settings or another file."
            )
    if begun and out.is_file():
        _end_with_newline(out)  # first of all: a writer may have been killed before it had one whole line
    done = {a.id for a in read_answers(out).answers} if out.exists() and out.stat().st_size else set()
    if done and not begun:
        raise UserError(
            f"{out}: holds answers, and {side.name} beside it, which says whose they are, is gone; put it back, or "
            "give another file."
        )
    with clear_disk_errors(out, "nothing was written"):
        if not begun:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(side, mine)
        out.touch()
        _end_with_newline(out)
        out.open("a").close()  # a file that refuses answers does so now
    return done


def _end_with_newline(path: Path) -> None:
    """Cut a line that a killed writer left unfinished, and end a whole one, so that the next one starts clean."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        begin = data.rfind(b"\n") + 1
        with path.open("r+b") as f:
            try:
                json.loads(data[begin:])
            except (ValueError, RecursionError):
                f.truncate(begin)
            else:
                f.seek(0, 2)
                f.write(b"\n")


def _write_line(row: dict[str, Any], path: Path) -> None:
    """Append a row. The file is opened for each: closing one that failed would write, and fail, again."""
    with clear_disk_errors(path, "the answers so far are kept"), path.open("a", encoding="utf-8") as sink:
        sink.write(json.dumps(row, ensure_ascii=False) + "\n")
