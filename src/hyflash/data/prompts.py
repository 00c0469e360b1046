"""Prompts from files or a Hugging Face dataset, as chat messages with stable ids.

In: paths of .jsonl, .json (each also .gz) or the name of a dataset on the Hugging Face hub. Out: a `PromptSet`:
prompts without duplicates, and the counts of what was read, bad and duplicate. A prompt ends with a user turn; of
a list of user turns only the first is kept, because the target itself must answer before the next makes sense.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyflash.errors import UserError

Messages = tuple[Mapping[str, str], ...]

_ROLES = {
    "user": "user",
    "human": "user",
    "system": "system",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
_TEXT_KEYS = ("prompt", "question", "instruction", "text")
_PLAIN_STEMS = {"question", "questions", "prompts", "train", "test", "val", "dev", "data", "input_data"}
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation up to the user turn that the target is to answer."""

    id: str
    """16 hex digits of the SHA-256 of the messages: the same prompt has the same id everywhere."""
    messages: Messages
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of one load; num_read = len(all kept) + num_bad + num_duplicates before `limit`."""

    prompts: list[Prompt] = field(default_factory=list)
    num_read: int = 0
    num_bad: int = 0
    num_duplicates: int = 0


def load_prompts(
    sources: Sequence[str | Path],
    *,
    domain: str | None = None,
    limit: int | None = None,
    shuffle_seed: int | None = None,
) -> PromptSet:
    """Read `sources` in order, drop bad rows and duplicates, then shuffle (if a seed is given), then cut to `limit`.

    The domain is the row's own "domain", else `domain`, else the file's (or its folder's) name. Raises UserError
    for a source that cannot be read, and when no prompt is left.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected a whole number of at least 1.")
    seen: set[str] = set()
    kept: list[Prompt] = []
    num_read = num_bad = 0
    for source in sources:
        fallback = domain or _domain_of(str(source))
        for row in _rows(str(source)):
            num_read += 1
            messages = messages_of(row)
            if messages is None:
                num_bad += 1
                continue
            key = text_key(messages)
            if key in seen:
                continue
            seen.add(key)
            own = row.get("domain") if isinstance(row, Mapping) else None
            own = own if isinstance(own, str) and is_text(own) else fallback
            kept.append(Prompt(id=prompt_id(messages), messages=messages, domain=own))
    if not kept:
        names = ", ".join(str(s) for s in sources) or "no source"
        raise UserError(
            f"found no usable prompt in {names} ({num_read} rows read, {num_bad} bad); expected rows with one of "
            f"messages, conversations, turns, {', '.join(_TEXT_KEYS)}."
        )
    num_duplicates = num_read - num_bad - len(kept)
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(kept)
    return PromptSet(prompts=kept[:limit], num_read=num_read, num_bad=num_bad, num_duplicates=num_duplicates)


def split_held_out(prompts: Sequence[Prompt], *, fraction: float, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """Split into (training, held out) by a hash of each id, so that adding prompts never moves an old one."""
    if not 0 <= fraction < 1:
        raise UserError(f"held-out fraction is {fraction}; expected 0 up to but not including 1.")
    held = [p for p in prompts if held_out_rank(p.id, seed) < fraction]
    chosen = {p.id for p in held}
    return [p for p in prompts if p.id not in chosen], held


def without(prompts: Sequence[Prompt], others: Iterable[Prompt]) -> list[Prompt]:
    """Prompts whose normalised text is not among `others` (keeps evaluation prompts out of training)."""
    banned = {text_key(p.messages) for p in others}
    return [p for p in prompts if text_key(p.messages) not in banned]


def held_out_rank(name: str, seed: int) -> float:
    """A number in [0, 1) that depends only on `name` and `seed`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big") / 2**56


def prompt_id(messages: Messages) -> str:
    """16 hex digits of the SHA-256 of roles and contents."""
    text = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def text_key(messages: Messages) -> str:
    """Text of all turns, case and white space evened out: equal for prompts that count as duplicates."""
    text = unicodedata.normalize("NFKC", "\n".join(f"{m['role']}:{m['content']}" for m in messages))
    return " ".join(text.casefold().split())


# ------------------------------------------------------------------------------------- rows to messages


def messages_of(row: Any) -> Messages | None:
    """Messages of a row, ending with its last user turn; None when the row holds no prompt."""
    messages = _any_messages(row)
    return messages if messages and all(is_text(m["content"]) for m in messages) else None


def is_text(value: str) -> bool:
    """Whether it is Unicode text: JSON can spell half a surrogate pair, which no tokenizer or file takes."""
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _any_messages(row: Any) -> Messages | None:
    if isinstance(row, str):
        return _user(row)
    if not isinstance(row, Mapping):
        return None
    for key in ("messages", "conversations", "conversation"):
        if key in row:
            return _chat(row[key])
    if "turns" in row:
        return _first_turn(row["turns"])
    for key in _TEXT_KEYS:
        value = row.get(key)
        if isinstance(value, str):
            extra = row.get("input") if key == "instruction" else None
            return _user(f"{value}\n\n{extra}" if isinstance(extra, str) and extra.strip() else value)
        if isinstance(value, list):
            return _chat(value)
    return None


def _user(text: str) -> Messages | None:
    return ({"role": "user", "content": text.strip()},) if text.strip() else None


def _first_turn(turns: Any) -> Messages | None:
    if not isinstance(turns, list) or not turns:
        return None
    first = turns[0].get("content") if isinstance(turns[0], Mapping) else turns[0]
    return _user(first) if isinstance(first, str) else None


def _chat(turns: Any) -> Messages | None:
    """OpenAI (role, content) or ShareGPT (from, value) turns, cut after the last user turn."""
    if not isinstance(turns, list):
        return None
    out: list[Mapping[str, str]] = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            return None
        role = _ROLES.get(str(turn.get("role", turn.get("from", ""))).lower())
        content = turn.get("content", turn.get("value"))
        if role is None or not isinstance(content, str):
            return None
        out.append({"role": role, "content": content})
    while out and out[-1]["role"] != "user":
        out.pop()
    return tuple(out) if out and out[-1]["content"].strip() else None


# ----------------------------------------------------------------------------------------- files to rows


def _domain_of(source: str) -> str:
    path = Path(source.split(":")[0])
    stem = path.name.split(".")[0]
    return path.parent.name if stem in _PLAIN_STEMS and path.parent.name else stem


def _rows(source: str) -> Iterator[Any]:
    """Rows of a file or of a hub dataset; a line that is not JSON is given as None (a bad row)."""
    path = Path(source)
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise UserError(f"{source}: prompts are read from {', '.join(_SUFFIXES)} files; found {path.suffix!r}.")
        yield from _file_rows(path)
    elif path.exists() or source.endswith(_SUFFIXES) or source.startswith((".", "/", "~")):
        raise UserError(f"{source}: no such file; expected a .jsonl or .json file, or the name of a hub dataset.")
    else:
        yield from _hub_rows(source)


def _file_rows(path: Path) -> Iterator[Any]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as err:
        raise UserError(
            f"{path}: cannot be read as UTF-8 text ({err}); expected a whole .jsonl or .json file."
        ) from err
    if ".jsonl" in path.name:
        for line in text.split("\n"):  # not splitlines(): U+2028 may stand inside a JSON string
            if line.strip():
                yield _json_or_none(line)
        return
    whole = _json_or_none(text)
    if isinstance(whole, Mapping):  # {"canary": ..., "examples": [...]}: the rows are its only list
        lists = [v for v in whole.values() if isinstance(v, list)]
        whole = lists[0] if len(lists) == 1 else None
    if not isinstance(whole, list):
        raise UserError(f"{path}: expected a JSON list of prompts, or an object that holds one list.")
    yield from whole


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also numbers of thousands of digits, and brackets without end
        return None


def _hub_rows(source: str) -> Iterator[Any]:
    """Rows of `NAME[:SPLIT]` on the Hugging Face hub (split "train" unless given)."""
    name, _, split = source.partition(":")
    try:
        import datasets
    except ImportError as err:
        raise UserError(
            f"{source}: no such file, and reading it as a Hugging Face dataset needs the package `datasets`; "
            "give the path of a .jsonl file or run: pip install 'hyflash[hub]'"
        ) from err
    try:
        yield from datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as err:
        raise UserError(f"{source}: cannot be loaded from the Hugging Face hub ({err}).") from err
