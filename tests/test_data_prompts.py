"""Prompts of every common shape are read; bad rows are counted; ids and splits are stable."""

from __future__ import annotations

import builtins
import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hyflash.data.prompts import Prompt, load_prompts, messages_of, split_held_out, without
from hyflash.errors import UserError


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


SHAPES: list[tuple[Any, Any]] = [
    ("plain text", user("plain text")),
    ({"prompt": " p "}, user("p")),
    ({"question": "q", "answer": "a"}, user("q")),
    ({"text": "t"}, user("t")),
    ({"instruction": "do", "input": "this"}, user("do\n\nthis")),
    ({"instruction": "do", "input": " "}, user("do")),
    ({"turns": ["one", "two"]}, user("one")),
    ({"turns": [{"content": "one"}]}, user("one")),
    ({"prompt": [{"role": "user", "content": "p"}]}, user("p")),
    ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, user("u")),
    (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "h"},
                {"from": "gpt", "value": "g"},
                {"from": "human", "value": "h2"},
                {"from": "gpt", "value": "g2"},
            ]
        },
        (
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {"role": "assistant", "content": "g"},
            {"role": "user", "content": "h2"},
        ),
    ),
    ("  ", None),
    (None, None),
    (7, None),
    ({}, None),
    ({"question": {"stem": "s"}}, None),
    ({"turns": []}, None),
    ({"messages": [{"role": "assistant", "content": "a"}]}, None),
    ({"messages": [{"role": "robot", "content": "a"}]}, None),
    ({"messages": [{"role": "user"}]}, None),
    ({"messages": "text"}, None),
]


@pytest.mark.parametrize(("row", "expected"), SHAPES)
def test_rows_of_every_shape(row: Any, expected: Any) -> None:
    assert messages_of(row) == expected


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    text = "\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_bad_rows_and_duplicates_are_counted_and_ids_are_stable(tmp_path: Path) -> None:
    rows = [{"prompt": "Hello  World"}, "{broken", {"other": 1}, {"prompt": "hello world"}, {"prompt": "line\u2028sep"}]
    found = load_prompts([write(tmp_path / "chat.jsonl", rows)])
    assert [p.messages for p in found.prompts] == [user("Hello  World"), user("line\u2028sep")]
    assert (found.num_read, found.num_bad, found.num_duplicates) == (5, 2, 1)
    assert {p.domain for p in found.prompts} == {"chat"}
    again = load_prompts([write(tmp_path / "other.jsonl.gz", rows[:1])])
    assert again.prompts[0].id == found.prompts[0].id
    assert len(found.prompts[0].id) == 16


def test_domains_come_from_row_then_argument_then_file_then_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "mt_bench" / "question.jsonl", [{"prompt": "a", "domain": "own"}, {"prompt": "b"}])
    assert [p.domain for p in load_prompts([path]).prompts] == ["own", "mt_bench"]
    assert [p.domain for p in load_prompts([path], domain="given").prompts] == ["own", "given"]


def test_json_lists_and_objects_with_one_list(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    listed, wrapped = tmp_path / "l.json", tmp_path / "w.json.gz"
    listed.write_text(json.dumps(rows))
    wrapped.write_bytes(gzip.compress(json.dumps({"canary": "x", "examples": rows}).encode()))
    assert len(load_prompts([listed]).prompts) == 2
    assert [p.domain for p in load_prompts([wrapped]).prompts] == ["w", "w"]
    two = load_prompts([listed, wrapped])
    assert (len(two.prompts), two.num_duplicates) == (2, 2)


def test_shuffle_and_limit_are_by_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": str(i)} for i in range(50)])
    plain = load_prompts([path], limit=5)
    assert [p.messages[0]["content"] for p in plain.prompts] == ["0", "1", "2", "3", "4"]
    first, again, other = (load_prompts([path], limit=5, shuffle_seed=s).prompts for s in (1, 1, 2))
    assert first == again
    assert first != other
    with pytest.raises(UserError, match="limit is 0"):
        load_prompts([path], limit=0)


def test_split_is_stable_when_prompts_are_added(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": str(i)} for i in range(400)])
    prompts = load_prompts([path]).prompts
    train, held = split_held_out(prompts, fraction=0.25, seed=3)
    assert len(train) + len(held) == 400
    assert 60 < len(held) < 140
    _, held_of_half = split_held_out(prompts[:200], fraction=0.25, seed=3)
    assert held_of_half == [p for p in held if p in prompts[:200]]
    assert split_held_out([], fraction=0.5) == ([], [])
    with pytest.raises(UserError, match="fraction is 1"):
        split_held_out(prompts, fraction=1)


def test_evaluation_prompts_are_kept_out_by_text() -> None:
    a, b = (Prompt(id=t, messages=user(t), domain="d") for t in ("Some  Text", "other"))
    evaluation = Prompt(id="e", messages=user("some text"), domain="d")
    assert without([a, b], [evaluation]) == [b]


def test_unreadable_sources_end_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_prompts([tmp_path / "missing.jsonl"])
    with pytest.raises(UserError, match="no usable prompt"):
        load_prompts([write(tmp_path / "empty.jsonl", [])])
    with pytest.raises(UserError, match="no source"):
        load_prompts([])
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"found '\.csv'"):
        load_prompts([tmp_path / "a.csv"])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}' * 99)[:-12])
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts([tmp_path / "cut.jsonl.gz"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UserError, match="UTF-8"):
        load_prompts([tmp_path / "latin.jsonl"])
    (tmp_path / "n.json").write_text("7")
    with pytest.raises(UserError, match="JSON list"):
        load_prompts([tmp_path / "n.json"])


def test_hub_names_need_datasets_and_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(UserError, match=r"hyflash\[hub\]"):
        load_prompts(["owner/name"])


def test_hub_datasets_are_read_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        if name == "owner/absent":
            raise FileNotFoundError("not on the hub")
        return [{"question": "q"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    prompts = load_prompts(["owner/name:test", "owner/name"]).prompts
    assert asked == [("owner/name", "test"), ("owner/name", "train")]
    assert [p.domain for p in prompts] == ["name"]
    with pytest.raises(UserError, match="cannot be loaded"):
        load_prompts(["owner/absent"])


def test_rows_no_parser_or_tokenizer_can_take_are_bad_not_fatal(tmp_path: Path) -> None:
    rows = ['{"prompt": "half \\ud800"}', "[" * 100_000, '{"prompt": ' + "1" * 5000 + "}", '{"prompt": "whole"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    found = load_prompts([tmp_path / "a.jsonl"])
    assert [p.messages[0]["content"] for p in found.prompts] == ["whole"]
    assert found.num_bad == 3
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "domain": "\\udfff"}')
    assert load_prompts([tmp_path / "b.jsonl"]).prompts[0].domain == "b"
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="JSON list"):
        load_prompts([tmp_path / "deep.json"])


def test_a_gz_file_with_flipped_bytes_is_one_sentence(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(bytes(range(256)).hex().encode()))
    packed[20] ^= 255
    packed[21] ^= 255
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts([tmp_path / "a.jsonl.gz"])
