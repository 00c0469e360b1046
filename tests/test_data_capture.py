"""Captured features belong to their own tokens, and shards on disk survive kills, full disks and damage."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fake_training import WIDTH, FakeTarget, make_answers
from hyflash.data.anchors import AnchorOptions, build_batch
from hyflash.data.answers import Answer, read_answers
from hyflash.data.capture import Example, LiveSource, capture
from hyflash.data.joined import JoinedSource
from hyflash.data.shards import ShardReader, plan_shards, write_shards
from hyflash.errors import NonFiniteError, UserError

TAPS = (1, 3)


def same(a: Example, b: Example) -> bool:
    tensors = ("tokens", "features", "loss_mask", "loop_mask")
    plain = (a.id, a.domain, a.prompt_len) == (b.id, b.domain, b.prompt_len)
    return plain and all(torch.equal(getattr(a, n), getattr(b, n)) for n in tensors)


def test_texts_of_which_no_layer_is_read_need_no_target() -> None:
    """Held-out texts of a drafter without taps are evaluated like others."""
    target = FakeTarget()
    live = LiveSource(target, make_answers(3), taps=())
    for example in live.fetch(live.ids):
        assert example.features.shape == (len(example.tokens), 0, WIDTH)
        assert example.kv is None
    assert target.widths == []


@pytest.mark.parametrize("batch_tokens", [1, 7, 40, 10_000])
def test_features_depend_on_the_row_alone(batch_tokens: int) -> None:
    answers = make_answers(9)
    target = FakeTarget()
    together = list(capture(target, answers, taps=TAPS, batch_tokens=batch_tokens))
    alone = [next(capture(FakeTarget(), [a], taps=TAPS)) for a in answers]
    assert [e.id for e in together] == [a.id for a in answers]
    assert all(same(x, y) for x, y in zip(together, alone, strict=True))
    assert max(target.widths) <= batch_tokens
    assert not target.states, "every sequence was closed"


def test_features_are_those_of_their_own_prefix() -> None:
    answer = Answer(id="x", prompt_ids=(5, 6), answer_ids=(7, 8, 9))
    example = next(capture(FakeTarget(), [answer], taps=TAPS))
    target, state = FakeTarget(), None
    for position, token in enumerate((5, 6, 7, 8, 9)):
        state = (state * 31 if state is not None else 7) % 1009 + token
        assert torch.equal(example.features[position], target.feature(state, TAPS).half())
    assert example.loss_mask.tolist() == [False, False, True, True, True]
    assert example.prompt_len == 2
    assert example.features.shape == (5, 2, WIDTH)
    assert example.features.dtype == torch.float16


def test_massive_activations_are_clamped_and_nan_is_refused() -> None:
    answer = make_answers(1)[0]
    big = next(capture(FakeTarget(scale=1e9), [answer], taps=TAPS))
    assert torch.isfinite(big.features).all()
    assert big.features.abs().max() == 65504
    with pytest.raises(NonFiniteError, match="a000"):
        next(capture(FakeTarget(scale=float("nan")), [answer], taps=TAPS))


def test_loops_are_marked_on_answer_tokens_only() -> None:
    answer = Answer(id="x", prompt_ids=(4,) * 20, answer_ids=(1, 2, 3, *(5, 6) * 12))
    example = next(capture(FakeTarget(), [answer], taps=TAPS))
    assert example.loop_mask[:23].sum() == 0
    assert example.loop_mask[23:].all()


def test_answers_that_do_not_fit_the_target_are_refused() -> None:
    with pytest.raises(UserError, match="5 tokens do not fit the context of fake, 4 tokens"):
        next(capture(FakeTarget(max_context=4), [Answer(id="x", prompt_ids=(1, 2), answer_ids=(3, 4, 5))], taps=TAPS))
    with pytest.raises(UserError, match="token 99 is outside the vocabulary"):
        next(capture(FakeTarget(), [Answer(id="x", prompt_ids=(1,), answer_ids=(99,))], taps=TAPS))
    for make in (LiveSource, partial(write_shards, directory="never-written")):
        with pytest.raises(UserError, match="target 'them' with fingerprint other, but fake has fake-1"):
            make(FakeTarget(), make_answers(1), taps=TAPS, meta={"target": "them", "fingerprint": "other"})
    assert not Path("never-written").exists()
    with pytest.raises(UserError, match="batch_tokens is 0"):
        next(capture(FakeTarget(), make_answers(1), taps=TAPS, batch_tokens=0))


@pytest.mark.parametrize("num", [1, 2, 13])
def test_live_and_shards_give_the_same_batches(tmp_path: Path, num: int) -> None:
    answers = make_answers(num)
    write_shards(FakeTarget(), answers, tmp_path, taps=TAPS, shard_tokens=50)
    reader, live = ShardReader(tmp_path), LiveSource(FakeTarget(), answers, taps=TAPS)
    assert list(reader.ids) == list(live.ids)
    assert reader.info == live.info
    assert [reader.length(i) for i in reader.ids] == [live.length(i) for i in live.ids]
    order = list(reversed(reader.ids))
    assert all(same(x, y) for x, y in zip(reader.fetch(order), live.fetch(order), strict=True))
    assert torch.equal(reader.label_counts(order, 40), live.label_counts(order, 40))
    assert int(reader.label_counts(order, 40).sum()) == reader.info.num_label_tokens
    options = AnchorOptions(anchors_per_sequence=4, max_tokens=16)
    for epoch in range(3):
        a = build_batch(reader.fetch(order), options, seed=3, epoch=epoch)
        b = build_batch(live.fetch(order), options, seed=3, epoch=epoch)
        for name in ("tokens", "features", "lengths", "loss_mask", "anchors", "anchor_mask", "weights"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_captures_are_joined_where_they_are_of_one_target_and_share_no_example(tmp_path: Path) -> None:
    answers = make_answers(8)
    write_shards(FakeTarget(), answers, tmp_path / "all", taps=TAPS)
    write_shards(FakeTarget(), answers[:3], tmp_path / "a", taps=TAPS)
    write_shards(FakeTarget(), answers[3:], tmp_path / "b", taps=TAPS)
    write_shards(FakeTarget(), answers[3:], tmp_path / "other", taps=TAPS[:1])
    whole, a, b, other = (ShardReader(tmp_path / name) for name in ("all", "a", "b", "other"))
    joined = JoinedSource([("a", a), ("b", b)])
    assert list(joined.ids) == list(whole.ids)
    assert replace(joined.info, data_hash="") == replace(whole.info, data_hash="")
    assert joined.info.data_hash != JoinedSource([("b", b), ("a", a)]).info.data_hash
    order = list(reversed(joined.ids))
    assert all(same(x, y) for x, y in zip(joined.fetch(order), whole.fetch(order), strict=True))
    assert [joined.length(i) for i in order] == [whole.length(i) for i in order]
    assert torch.equal(joined.label_counts(order, 40), whole.label_counts(order, 40))
    assert int(joined.label_counts([], 40).sum()) == 0
    with pytest.raises(UserError, match=r"again: example .* is in another capture too"):
        JoinedSource([("a", a), ("b", b), ("again", a)])
    with pytest.raises(UserError, match=f"other: taps is .*, in a it is .*{TAPS[-1]}"):
        JoinedSource([("a", a), ("other", other)])


def test_plan_keeps_order_and_gives_long_answers_their_own_shard() -> None:
    answers = [Answer(id=str(n), prompt_ids=(1,), answer_ids=(1,) * (n - 1)) for n in (4, 30, 5, 5, 2)]
    assert [[a.num_tokens for a in shard] for shard in plan_shards(answers, 10)] == [[4], [30], [5, 5], [2]]


def test_a_killed_capture_goes_on_without_rewriting_or_duplicates(tmp_path: Path) -> None:
    answers = make_answers(20)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write_shards(FakeTarget(), answers, whole, taps=TAPS, shard_tokens=60)

    class Killed(BaseException):
        pass

    def kill_after_two(done: int, total: int) -> None:
        if len(list(parts.glob("shard-*"))) == 2:
            raise Killed

    with pytest.raises(Killed):
        write_shards(FakeTarget(), answers, parts, taps=TAPS, shard_tokens=60, progress=kill_after_two)
    with pytest.raises(UserError, match=r"not finished \(2 shards so far\)"):
        ShardReader(parts)
    (parts / "shard-00002.safetensors").write_bytes(b"half a shard that the manifest does not know")
    before = {p.name: p.stat().st_mtime_ns for p in parts.glob("shard-0000[01]*")}
    second = FakeTarget()
    write_shards(second, answers, parts, taps=TAPS, shard_tokens=60)
    assert {p.name: p.stat().st_mtime_ns for p in parts.glob("shard-0000[01]*")} == before
    left = sum(a.num_tokens for shard in plan_shards(answers, 60)[2:] for a in shard)
    assert sum(second.widths) == left, "only the shards that were missing are captured"
    assert sorted(p.name for p in parts.iterdir()) == sorted(p.name for p in whole.iterdir())
    for path in whole.iterdir():
        assert path.read_bytes() == (parts / path.name).read_bytes()
    third = FakeTarget()
    write_shards(third, answers, parts, taps=TAPS, shard_tokens=60)
    assert third.widths == []


def test_a_resume_with_other_settings_names_what_changed(tmp_path: Path) -> None:
    answers = make_answers(4)
    write_shards(FakeTarget(), answers, tmp_path, taps=TAPS)
    with pytest.raises(UserError, match=r"taps is \[1, 3\], now \[2\]"):
        write_shards(FakeTarget(), answers, tmp_path, taps=(2,))
    with pytest.raises(UserError, match="target_fingerprint is 'fake-1', now 'fake-2'"):
        write_shards(FakeTarget(fingerprint="fake-2"), answers, tmp_path, taps=TAPS)
    with pytest.raises(UserError, match="data_hash"):
        write_shards(FakeTarget(), answers[:3], tmp_path, taps=TAPS)


def test_a_full_disk_leaves_the_shards_before_it_intact(tmp_path: Path) -> None:
    answers = [Answer(id=f"{i}", prompt_ids=(1,), answer_ids=(2,) * n) for i, n in enumerate((20, 20, 2000))]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
    try:
        with pytest.raises(UserError, match=r"no space left on the disk .*; the 2 shards before it are intact"):
            write_shards(FakeTarget(), answers, tmp_path, taps=TAPS, shard_tokens=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    write_shards(FakeTarget(), answers, tmp_path, taps=TAPS, shard_tokens=30)
    assert list(ShardReader(tmp_path).ids) == ["0", "1", "2"]


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    write_shards(FakeTarget(), make_answers(6), tmp_path, taps=TAPS, shard_tokens=40)
    return tmp_path


def test_a_truncated_shard_is_refused_with_expected_and_found(captured: Path) -> None:
    path = captured / "shard-00001.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 5])
    for verify in (True, False):
        with pytest.raises(UserError, match=rf"shard-00001.*expected {size} bytes.*found {size - 5} bytes"):
            ShardReader(captured, verify=verify)


def test_a_flipped_byte_is_found_by_checksum(captured: Path) -> None:
    path = captured / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-00000.*damaged.*sha256"):
        ShardReader(captured)
    ShardReader(captured, verify=False)


@pytest.mark.parametrize("fact", [b'length\\": 1', b"length\\", b"prompt_len\\", b"id\\"])
def test_a_header_whose_examples_do_not_fit_is_refused_without_checksums_too(captured: Path, fact: bytes) -> None:
    """A flipped digit would shift the features of every example behind it."""
    path = captured / "shard-00000.safetensors"
    content = path.read_bytes()
    at = content.index(fact) + len(fact) - 1
    path.write_bytes(content[:at] + (b"2" if fact.endswith(b"1") else b"_") + content[at + 1 :])
    with pytest.raises(UserError, match="shard-00000"):
        ShardReader(captured, verify=False)


def test_a_missing_shard_or_manifest_or_other_format_is_refused(captured: Path) -> None:
    (captured / "shard-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"shard-00000.*No such file"):
        ShardReader(captured)
    manifest = json.loads((captured / "manifest.json").read_text())
    (captured / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(UserError, match="version 99; capture again"):
        ShardReader(captured)
    (captured / "manifest.json").write_text("{ cut")
    with pytest.raises(UserError, match="not readable JSON"):
        ShardReader(captured)
    (captured / "manifest.json").unlink()
    with pytest.raises(UserError, match="no such file"):
        ShardReader(captured)


def test_summary_counts_what_is_there(captured: Path) -> None:
    summary = ShardReader(captured).summary()
    answers = make_answers(6)
    assert summary["num_examples"] == 6
    assert summary["num_label_tokens"] == sum(len(a.answer_ids) for a in answers)
    assert summary["domains"] == {"x": 2, "y": 2, "z": 2}
    assert summary["bytes"] == sum(p.stat().st_size for p in captured.glob("shard-*"))


def test_no_answers_and_duplicate_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no answer to capture"):
        write_shards(FakeTarget(), [], tmp_path, taps=TAPS)
    with pytest.raises(UserError, match="duplicate ids"):
        write_shards(FakeTarget(), make_answers(1) * 2, tmp_path, taps=TAPS)


def test_an_answer_that_does_not_fit_is_refused_before_any_is_captured(tmp_path: Path) -> None:
    answers = [*make_answers(3), Answer(id="z", prompt_ids=(1,), answer_ids=(2,) * 40)]
    target = FakeTarget(max_context=40)
    for begin in (
        partial(write_shards, target, answers, tmp_path / "s", shard_tokens=8),
        partial(LiveSource, target, answers),
    ):
        with pytest.raises(UserError, match="answer z: 41 tokens do not fit"):
            begin(taps=TAPS)
    assert target.widths == []
    assert not (tmp_path / "s").exists()


def test_bad_answer_rows_are_counted_not_fatal(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    good = {"id": "a", "prompt_ids": [1], "answer_ids": [2, 3], "domain": "code", "finish_reason": "stop"}
    rows = [good, good, {**good, "id": "b", "answer_ids": []}, {**good, "id": "c", "prompt_ids": [1, -2]}, ["list"]]
    rows += [{**good, "id": "half \ud800"}, {**good, "id": "d", "domain": "\ud800"}]
    text = "\n".join(json.dumps(r) for r in rows) + '\n\n{"id": "d", "prompt_ids": [1], "answ'
    path.write_text(text)
    (tmp_path / "answers.jsonl.meta.json").write_text('{"template": "chatml"}')
    found = read_answers(path)
    assert found.answers == [Answer(id="a", prompt_ids=(1,), answer_ids=(2, 3), domain="code")]
    assert (found.num_bad, found.num_duplicates) == (6, 1)
    assert found.meta == {"template": "chatml"}
    path.write_text("{}\n")
    with pytest.raises(UserError, match=r"no usable answer \(1 bad rows\)"):
        read_answers(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_answers(tmp_path / "nothing.jsonl")


def test_a_manifest_without_its_facts_is_refused(captured: Path) -> None:
    manifest = json.loads((captured / "manifest.json").read_text())
    for changes in ({"shards": None}, {"shards": [{"file": "x"}]}, {"taps": 3}, {"num_examples": "4"}, {"meta": []}):
        (captured / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(UserError, match="is damaged"):
            ShardReader(captured)
    (captured / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not readable JSON"):
        ShardReader(captured)


def test_what_a_killed_capture_left_is_swept_up(tmp_path: Path) -> None:
    (tmp_path / ".shard-00000.safetensors.tmp7").write_bytes(b"half")
    write_shards(FakeTarget(), make_answers(2), tmp_path, taps=TAPS)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
