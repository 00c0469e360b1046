"""A drafter whose weights leave memory: when they go and come back, and that neither text nor drafts change by it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafting import ask, filled, random_batch, tiny_drafter
from hyflash import checkpoint, drafters, environment
from hyflash.core import Request, SamplingParams
from hyflash.drafters.base import Drafter
from hyflash.drafters.compose import Composite
from hyflash.engine import offload as module
from hyflash.engine.decode import Engine
from hyflash.engine.length import LengthPolicy, RowStats
from hyflash.engine.offload import PATIENCE_SEC, Offload, unfit
from hyflash.errors import UserError
from toys import ScriptDrafter, ToyTarget


class Machine:
    """A clock and free memory that a test sets."""

    def __init__(self, free: int | None = 1 << 40) -> None:
        self.free, self.now, self.num_reads = free, 0.0, 0

    def read(self) -> int | None:
        self.num_reads += 1
        return self.free

    def clock(self) -> float:
        return self.now


def saved(tmp_path: Path, spec: str = "hyflash", **options: object) -> Drafter:
    """A tiny drafter that was loaded from a checkpoint."""
    drafter = tiny_drafter(spec, ToyTarget(torch.eye(64)).hooks(), **options)
    checkpoint.save(drafter, tmp_path / spec, dtype="fp32")
    return checkpoint.load(str(tmp_path / spec), drafter.hooks)


def watch(drafter: Drafter, machine: Machine, *, low: int = 1000) -> Offload:
    return Offload(drafter, low_bytes=low, free=machine.read, clock=machine.clock)


def rounds(offload: Offload, machine: Machine, seconds: float, *, drafted: bool = False) -> None:
    """Rounds of a tenth of a second."""
    for _ in range(round(10 * seconds)):
        machine.now += 0.1
        offload.after_round(drafted=drafted)


# ------------------------------------------------------------------------------------------ when


def test_weights_go_when_memory_stays_short_and_nobody_drafts(tmp_path: Path) -> None:
    machine = Machine()
    offload = watch(saved(tmp_path), machine)
    rounds(offload, machine, 3 * PATIENCE_SEC)
    assert not offload.is_away, "there is memory"
    machine.free = 999
    rounds(offload, machine, 3 * PATIENCE_SEC, drafted=True)
    assert not offload.is_away, "it drafts"
    machine.free = 1000
    rounds(offload, machine, 0.5)
    machine.free = 999
    rounds(offload, machine, PATIENCE_SEC - 0.5)
    assert not offload.is_away, "not for long enough since there was some"
    rounds(offload, machine, 1.0)
    assert offload.is_away
    assert offload.num_released == 1
    assert machine.num_reads < machine.now * 5, "reading is not free"


def test_weights_come_back_when_there_is_room_for_them_for_a_while(tmp_path: Path) -> None:
    machine = Machine(free=0)
    drafter = saved(tmp_path)
    size = sum(t.nbytes for t in (*drafter.parameters(), *drafter.buffers()))
    offload = watch(drafter, machine)
    rounds(offload, machine, 2 * PATIENCE_SEC)
    assert offload.is_away

    def wait(seconds: float) -> bool:
        allowed = False
        for _ in range(round(10 * seconds)):
            machine.now += 0.1
            allowed = offload.may_draft()
        return allowed

    machine.free = 1000 + 2 * size - 1
    assert not wait(2 * PATIENCE_SEC), "they would be let go again at once"
    machine.free = 1000 + 2 * size
    assert not wait(PATIENCE_SEC / 2)
    assert wait(PATIENCE_SEC)
    assert offload.bring_back()
    assert (offload.is_away, offload.num_restored) == (False, 1)
    assert offload.may_draft()


# ------------------------------------------------------------------------------------------ what


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *((name, {}) for name in drafters.names() if drafters.load_class(name).trainable),
        ("hyflash", {"draft_vocab_size": 32, "correction": "gru", "start": "ridge"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_weights_that_came_back_are_those_that_went(tmp_path: Path, spec: str, options: dict[str, object]) -> None:
    drafter, machine = saved(tmp_path, spec, **options), Machine(free=0)
    before = {name: t.clone() for name, t in (*drafter.named_parameters(), *drafter.named_buffers())}
    batch = random_batch(drafter, (23,))
    state = filled(drafter, batch, (20,))
    want = ask(drafter, state, (0,), batch.tokens[:, 20].tolist(), batch=batch)
    offload = watch(drafter, machine)
    rounds(offload, machine, 2 * PATIENCE_SEC)
    held = [*drafter.parameters(), *drafter.buffers()]
    assert all(tensor.is_meta for tensor in held), "nothing is kept in memory"
    assert drafter.cost(10).weight_bytes > 0
    assert offload.bring_back()
    after = dict((*drafter.named_parameters(), *drafter.named_buffers()))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not drafter.training
    assert ask(drafter, state, (0,), batch.tokens[:, 20].tolist(), batch=batch) == want


def test_only_the_parts_with_weights_of_a_composition_leave(tmp_path: Path) -> None:
    block, hooks = saved(tmp_path, "dflash"), ToyTarget(torch.eye(64)).hooks()
    both = Composite([("lookup", tiny_drafter("lookup", hooks)), ("dflash", block)])
    assert unfit(both) == ""
    machine = Machine(free=0)
    offload = watch(both, machine)
    rounds(offload, machine, 2 * PATIENCE_SEC)
    assert all(tensor.is_meta for tensor in both.parameters())
    assert offload.bring_back()
    assert not any(tensor.is_meta for tensor in both.parameters())


def test_memory_of_a_gpu_is_watched_also_while_the_weights_are_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, machine, free = saved(tmp_path), Machine(), {"cuda": 999, "cpu": 1 << 40}
    at = ["cuda"]  # where the weights are; moving them is left out
    monkeypatch.setattr(module, "_device", lambda _: torch.device(at[0]))
    monkeypatch.setattr(drafter, "to", lambda device: at.__setitem__(0, torch.device(device).type))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["cuda"], 1 << 40))
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: free["cpu"])
    offload = Offload(drafter, low_bytes=1000, clock=machine.clock)
    rounds(offload, machine, PATIENCE_SEC + 1)
    assert (offload.is_away, at) == (True, ["cpu"])

    def may_draft() -> bool:
        for _ in range(round(10 * (PATIENCE_SEC + 1))):
            machine.now += 0.1
            offload.may_draft()
        return offload.may_draft()

    assert not may_draft()  # the host has room, the GPU has none
    free["cuda"], free["cpu"] = 1 << 40, 0
    assert may_draft()
    assert offload.bring_back()
    assert at == ["cuda"]


def test_what_cannot_be_restored_is_named_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = ToyTarget(torch.eye(64)).hooks()
    assert "no weights" in unfit(tiny_drafter("lookup", hooks))
    assert "no weights" in unfit(None)
    assert "dflash is not wholly from a checkpoint" in unfit(tiny_drafter("dflash", hooks))
    dflash = saved(tmp_path, "dflash")
    assert dflash.loaded_from == tmp_path / "dflash"
    upgraded = checkpoint.load(f"hyflash:{tmp_path / 'dflash'}", hooks)
    assert "hyflash is not wholly" in unfit(upgraded), "its memory is fresh"
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: None)
    assert "does not say" in unfit(dflash)
    with pytest.raises(UserError, match="at least 1"):
        watch(dflash, Machine(), low=0)
    with pytest.raises(UserError, match="not loaded from a checkpoint"):
        checkpoint.refill(upgraded)


def test_this_system_says_how_much_memory_is_free() -> None:
    free, total = environment.free_memory_bytes(), environment.hardware()["memory_bytes"]
    assert (free is None) == (total is None)
    assert free is None or 0 < free < total


# ----------------------------------------------------------------------------------------- engine


class Away(Offload):
    """Goes and comes back when a test says so, without weights to restore."""

    def __init__(self, away: Callable[[], bool]) -> None:
        self.is_away, self._is_due = False, away

    def may_draft(self) -> bool:
        return not self._is_due()

    def bring_back(self) -> bool:
        self.is_away = False
        return True

    def after_round(self, *, drafted: bool) -> bool:
        leaves = not self.is_away and self._is_due() and not drafted
        self.is_away = self.is_away or leaves
        return leaves


class Always(LengthPolicy):
    """Two drafts in every round."""

    max_draft_tokens = 2

    def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
        return min(most, 2)


@pytest.mark.parametrize("span", [(0, 0), (3, 5), (3, 60), (0, 30), (0, 10**6)])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_the_drafter_has_the_whole_text_when_its_weights_are_back(span: tuple[int, int], num_requests: int) -> None:
    table = torch.randn(24, 24, generator=torch.Generator().manual_seed(3)) * 2
    target = ToyTarget(table, eos=())
    requests = [
        Request(prompt_ids=(2 + i, *[9, 4] * (5 * i)), params=SamplingParams(max_tokens=200 - 7 * i))
        for i in range(num_requests)
    ]
    want = [Engine(target).generate([r])[0].token_ids for r in requests]
    texts = [[*r.prompt_ids, *w] for r, w in zip(requests, want, strict=True)]
    asked_for = []

    def script(text: list[int], n: int) -> list[int]:
        whole = next(t for t in texts if t[: len(text)] == text)  # fails if a token is missing or doubled
        asked_for.append(len(text))
        return whole[len(text) : len(text) + n]

    steps = itertools.count()
    drafter, now = ScriptDrafter(script, target.info), [0]
    offload = Away(lambda: span[0] <= now[0] < span[1])
    engine = Engine(target, drafter, policy=Always(), prefill_chunk=4, max_rows=2, offload=offload)
    ids = [engine.submit(r) for r in requests]
    while engine.num_unfinished:
        engine.step()
        now[0] = next(steps)
        if offload.is_away:
            assert engine._state is None, "what the drafter knows of texts goes as well"
            assert not any(engine._late.waiting(row) for row in range(2)), "and nothing piles up"
    assert [engine.result(i).token_ids for i in ids] == want
    assert not target.cached, "every sequence is closed, also those for reading again"
    assert bool(asked_for) == (span[1] < 10**6)


def test_a_checkpoint_that_is_gone_costs_the_drafts_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SEC", 0.0)
    monkeypatch.setattr(module, "READ_SEC", 0.0)
    target = ToyTarget(torch.randn(24, 24, generator=torch.Generator().manual_seed(3)), eos=())
    checkpoint.save(tiny_drafter("dflash", target.hooks()), tmp_path / "d", dtype="fp32")
    drafter = checkpoint.load(str(tmp_path / "d"), target.hooks())
    machine, policy = Machine(free=0), Always()
    offload = watch(drafter, machine)
    engine = Engine(target, drafter, policy=policy, offload=offload)
    request = Request(prompt_ids=(3, 4), params=SamplingParams(max_tokens=20))
    want = Engine(target).generate([request])[0].token_ids
    policy.max_draft_tokens = 0
    assert engine.generate([request])[0].token_ids == want
    assert offload.is_away
    (tmp_path / "d" / "model.safetensors").unlink()
    machine.free, policy.max_draft_tokens = 1 << 40, 2
    with pytest.warns(UserWarning, match="cannot be restored") as caught:
        got = engine.generate([request, request])
    assert len(caught) == 1
    assert [r.token_ids for r in got] == [want, want]
    assert all(trace.num_drafted == 0 for r in got for trace in r.rounds)


def test_the_real_thing_goes_and_comes_back_while_text_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SEC", 0.0)
    monkeypatch.setattr(module, "READ_SEC", 0.0)
    target = ToyTarget(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)), eos=())

    def is_short() -> bool:
        return len(target.forwards) % 40 >= 20

    class InTurns(LengthPolicy):
        """No drafts while memory is short."""

        max_draft_tokens = 2

        def choose(self, stats: RowStats, *, most: int, num_rows: int) -> int:
            return 0 if is_short() else min(most, 2)

    made = tiny_drafter("hyflash", target.hooks())
    checkpoint.save(made, tmp_path / "d", dtype="fp32")
    texts: list[list[tuple[int, ...]]] = []
    for is_watched in (False, True):
        drafter = checkpoint.load(str(tmp_path / "d"), target.hooks())
        offload = Offload(drafter, low_bytes=10, free=lambda: 0 if is_short() else 1 << 40) if is_watched else None
        engine = Engine(target, drafter, policy=InTurns(), offload=offload)
        results = engine.generate(
            [Request(prompt_ids=(5, 6, 7 + i), params=SamplingParams(max_tokens=300)) for i in range(2)]
        )
        texts.append([r.token_ids for r in results])
        assert all(sum(t.num_drafted for t in r.rounds) > 50 for r in results)
        if offload is not None:
            assert offload.num_released >= 2
            assert offload.num_restored >= 2
    assert texts[0] == texts[1]
