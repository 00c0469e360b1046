"""The target's answers on disk: `answers.jsonl`, one answer a line, and `answers.jsonl.meta.json` beside it.

In: the file that `hyflash data regenerate` wrote. Out: `Answer` objects; rows that are cut short, malformed or
have an id seen before are counted and left out, so a file whose writer was killed is still usable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyflash.data.disk import read_json
from hyflash.data.prompts import is_text
from hyflash.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt as the target saw it and the tokens it answered with; both have at least one token."""

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    domain: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFile:
    """All usable answers of a file, in file order; `meta` is the writer's side file ({} when absent)."""

    answers: list[Answer]
    meta: Mapping[str, Any]
    num_bad: int
    num_duplicates: int


def read_answers(path: str | Path) -> AnswerFile:
    """Read `answers.jsonl`. Raises UserError when the file is missing, unreadable or has no usable row."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as err:
        raise UserError(
            f"{path}: cannot be read ({err.strerror or err}); expected a file of `hyflash data regenerate`."
        ) from err
    answers: dict[str, Answer] = {}
    num_bad = num_duplicates = 0
    for line in lines:
        if not line.strip():
            continue
        answer = _parse(line)
        if answer is None:
            num_bad += 1
        elif answer.id in answers:
            num_duplicates += 1
        else:
            answers[answer.id] = answer
    if not answers:
        raise UserError(
            f"{path}: no usable answer ({num_bad} bad rows); expected rows with id, prompt_ids and answer_ids."
        )
    side = path.with_name(path.name + ".meta.json")
    meta = read_json(side) if side.exists() else {}
    return AnswerFile(answers=list(answers.values()), meta=meta, num_bad=num_bad, num_duplicates=num_duplicates)


def _parse(line: bytes) -> Answer | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not row["id"] or not is_text(row["id"]):
        return None
    prompt, answer, domain = _token_ids(row.get("prompt_ids")), _token_ids(row.get("answer_ids")), row.get("domain", "")
    if not prompt or not answer or not isinstance(domain, str) or not is_text(domain):
        return None
    return Answer(id=row["id"], prompt_ids=prompt, answer_ids=answer, domain=domain)


def _token_ids(value: Any) -> tuple[int, ...]:
    """The ids, or () when `value` is not a list of whole numbers from 0 on."""
    good = isinstance(value, list) and all(type(t) is int and t >= 0 for t in value)
    return tuple(value) if good else ()
