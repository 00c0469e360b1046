"""Prompts of chosen lengths for the long-context study: `python recipes/long_prompts.py DATA_DIR ANSWERS OUT_DIR`.

In: a folder with qmsum, nq_docs, kv_retrieval, gutenberg and speeches as their authors publish them; answers of the
target to short prompts, for the earlier turns of chats; the target, for its tokenizer. Out: `train.jsonl`, lengths
spread evenly in octaves from 512 to 6144 tokens, and `test.jsonl`, some prompts for each kind and context with tokens
left for the answer (a kind may have none that are short enough). Domains are `KIND` in training and `KIND-CONTEXT` in
the test; a document stands in one of the two files.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import io
import json
import random
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hyflash import hub
from hyflash.data.disk import write_atomic
from hyflash.errors import HyflashError
from hyflash.text import Tokenizer

CONTEXTS = (512, 1024, 2048, 4096, 8192)
"""Prompt and answer together, in tokens."""
SHORTEST, LONGEST = 512, 6144
"""Prompts of the training set, in tokens."""

Messages = list[dict[str, str]]
Maker = Callable[[random.Random, int], Messages]
"""Messages of about so many tokens; the text is filled up or cut to them."""


class Sources:
    """The documents of one side of the split, and how prompts are made from them."""

    def __init__(self, data: Path, answers: Path, tokenizer: Tokenizer, *, is_test: bool) -> None:
        self.tokenizer = tokenizer
        self._is_test = is_test
        self._meetings = self._split(_lines(data / "qmsum/val.jsonl") + _lines(data / "qmsum/test.jsonl"))
        self._passages = self._split(_lines(data / "nq_docs/nq-open-oracle.jsonl.gz"))
        self._records = self._split(_lines(data / "kv_retrieval/kv-retrieval-75_keys.jsonl.gz"))
        self._books = self._split(list(_books(data)))
        self._modules = self._split(list(_modules()))
        self._chats = self._split(_lines(answers))

    def makers(self) -> dict[str, Maker]:
        """By kind."""
        return {
            "meeting": self.meeting,
            "documents": self.documents,
            "keys": self.keys,
            "book": self.book,
            "code": self.code,
            "chat": self.chat,
        }

    def meeting(self, rng: random.Random, size: int) -> Messages:
        """A part of a transcript, to be summarised as one of its own queries asks."""
        row = json.loads(rng.choice(self._meetings))
        turns = [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]
        text = self._part("\n".join(turns), rng, size)
        asked = (
            rng.choice(row["general_query_list"])["query"] if row["general_query_list"] else "Summarize the meeting."
        )
        return _user(f"Read this part of a meeting.\n\n{text}\n\n{asked}")

    def documents(self, rng: random.Random, size: int) -> Messages:
        """A question with as many passages as fit, among them the one that answers it."""
        rows = [json.loads(line) for line in rng.sample(self._passages, min(len(self._passages), 2 + size // 60))]
        passages: list[str] = []
        room = size
        for row in rows:
            passage = f"Title: {row['ctxs'][0]['title']}\n{row['ctxs'][0]['text']}"
            room -= len(self.tokenizer.encode(passage)) + 8
            if room < 0 and passages:
                break
            passages.append(passage)
        rng.shuffle(passages)
        text = "\n\n".join(f"Document {i + 1}. {p}" for i, p in enumerate(passages))
        return _user(f"{text}\n\nAnswer from the documents, and quote the sentence: {rows[0]['question']}?")

    def keys(self, rng: random.Random, size: int) -> Messages:
        """Pairs of a long JSON object, of which some are asked for."""
        pairs = [pair for line in rng.sample(self._records, 3) for pair in json.loads(line)["ordered_kv_records"]]
        each = len(self.tokenizer.encode(json.dumps(dict(pairs[:20]), indent=0))) / 20
        pairs = pairs[: max(2, int((size - 80) / each) - 1)]  # the keys asked for take as much as a pair
        asked = rng.sample(pairs, 1 if len(pairs) < 4 else 2)
        text = json.dumps(dict(pairs), indent=0)
        return _user(f"{text}\n\nWrite the values of these keys: " + ", ".join(key for key, _ in asked))

    def book(self, rng: random.Random, size: int) -> Messages:
        """A passage to continue or to retell."""
        text = self._part(rng.choice(self._books), rng, size)
        asked = rng.choice(("Continue this text in the same style.", "Retell what happens in this text."))
        return _user(f"{asked}\n\n{text}")

    def code(self, rng: random.Random, size: int) -> Messages:
        """Python source to continue, explain or edit."""
        text, modules = "", list(self._modules)
        rng.shuffle(modules)
        while modules and len(self.tokenizer.encode(text)) < size:
            text = modules.pop() + "\n\n" + text
        text = self._cut(text, size)
        names = [n.name for n in ast.walk(_parsed(text)) if isinstance(n, ast.FunctionDef)]
        asked = ["Continue this Python code."]
        if names:
            name = rng.choice(names)
            asked += [
                f"Explain what `{name}` in this Python code does, with the code of it.",
                f"Rewrite `{name}` in this Python code with type hints and a docstring.",
            ]
        return _user(f"{rng.choice(asked)}\n\n```python\n{text}\n```")

    def chat(self, rng: random.Random, size: int) -> Messages:
        """Earlier questions with the target's own answers, and one more question about the first of them."""
        messages: Messages = []
        rows = [json.loads(line) for line in rng.sample(self._chats, min(len(self._chats), 4 + size // 60))]
        room = size
        for row in rows:
            answer = self.tokenizer.decode(row["answer_ids"])
            asked = row["messages"][-1]["content"]
            room -= len(self.tokenizer.encode(asked + answer)) + 12
            if room < 0:
                break
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if not messages:
            return _user(self._cut(rows[0]["messages"][-1]["content"], size))
        again = "Go back to my first question, and answer it again in other words."
        return [*messages, {"role": "user", "content": rng.choice((again, "Say more about your last answer."))}]

    def _part(self, text: str, rng: random.Random, size: int) -> str:
        """A part of a text, from the start of a line."""
        width = 8 * size  # characters that hold more tokens than wanted
        first = rng.randrange(max(1, len(text) - width))
        first = text.find("\n", first) + 1 if first else 0
        return self._cut(text[first : first + width], size)

    def _cut(self, text: str, size: int) -> str:
        return self.tokenizer.decode(self.tokenizer.encode(text)[: max(1, size)])

    def _split(self, documents: list[str]) -> list[str]:
        """A quarter of the documents, told by their text, is the test's."""
        return [d for d in documents if (hashlib.sha256(d.encode()).digest()[0] < 64) == self._is_test]


def sized(make: Maker, tokenizer: Tokenizer, rng: random.Random, size: int) -> Messages | None:
    """A prompt of at most `size` tokens and not less than 3 quarters of that; None where the sources have none."""
    room = size - 48
    for _ in range(24):
        messages = make(rng, room)
        length = len(tokenizer.chat(messages))
        if size * 3 // 4 <= length <= size:
            return messages
        room -= max(8, length - size) if length > size else 0
    return None


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of public data")
    parser.add_argument("answers", type=Path, help="answers of `hyflash data regenerate` to short prompts")
    parser.add_argument("out", type=Path)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="of the test, in tokens")
    parser.add_argument("--room", type=int, default=192, help="tokens of a context that are left for the answer")
    parser.add_argument("--per-kind", type=int, default=100, help="training prompts of each kind")
    parser.add_argument("--per-cell", type=int, default=8, help="test prompts of each kind and context")
    return parser.parse_args()


def main() -> None:
    """Write both files."""
    options = arguments()
    tokenizer = Tokenizer.from_dir(hub.tokenizer_dir(hub.find_target(options.target)))
    options.out.mkdir(parents=True, exist_ok=True)
    test = [(f"-{c}", c - options.room) for c in options.contexts for _ in range(options.per_cell)]
    octaves = (LONGEST / SHORTEST) ** (1 / max(1, options.per_kind - 1))
    train = [("", round(SHORTEST * octaves**i)) for i in range(options.per_kind)]
    for name, sizes in (("train", train), ("test", test)):
        sources = Sources(options.data, options.answers, tokenizer, is_test=name == "test")
        rows: list[dict[str, Any]] = []
        for kind, make in sources.makers().items():
            rng = random.Random(f"{name} {kind}")
            for ending, size in sizes:
                messages = sized(make, tokenizer, rng, size)
                if messages is not None:
                    rows.append({"messages": messages, "domain": kind + ending})
        random.Random(0).shuffle(rows)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(options.out / f"{name}.jsonl", text.encode())
        print(f"{len(rows)} prompts -> {options.out / f'{name}.jsonl'}")  # noqa: T201


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _lines(path: Path) -> list[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return [line for line in text.split("\n") if line.strip()]


def _books(data: Path) -> Iterator[str]:
    """Books in parts of about 40,000 characters, so that both sides of the split have some; speeches whole."""
    for path in sorted(p for p in (data / "gutenberg").glob("*.txt") if p.name[0].isdigit()):
        text = path.read_text(encoding="utf-8-sig")
        yield from (text[i : i + 40_000] for i in range(0, len(text), 40_000))
    for name in ("inaugural", "state_union"):
        with zipfile.ZipFile(io.BytesIO((data / f"speeches/{name}.zip").read_bytes())) as archive:
            for entry in sorted(archive.namelist()):
                if entry.endswith(".txt"):
                    yield archive.read(entry).decode("utf-8", "replace")


def _modules() -> Iterator[str]:
    """Source of the running Python's own library, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.relative_to(root).parts):
            yield file.read_text(encoding="utf-8", errors="replace")


def _parsed(text: str) -> ast.Module:
    """The syntax tree of as much of a text as parses."""
    lines = text.split("\n")
    while lines:
        try:
            return ast.parse("\n".join(lines))
        except (SyntaxError, ValueError):
            lines = lines[: len(lines) * 7 // 8] if len(lines) > 8 else lines[:-1]
    return ast.Module(body=[], type_ignores=[])


if __name__ == "__main__":
    try:
        main()
    except HyflashError as err:
        sys.exit(f"error: {err}")
    except OSError as err:
        sys.exit(f"error: {err.filename}: {err.strerror}; the head of this script says which files it reads.")
