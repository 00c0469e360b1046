"""The memory report: bytes found after a real text are those computed, for every drafter and at every edge."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from drafting import tiny_drafter
from families import family_dir
from hyflash import drafters
from hyflash.bench import footprint
from hyflash.bench.footprint import Footprint, footprints
from hyflash.cli import report
from hyflash.targets import hf

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hf.HFTarget:
    return hf.load(str(family_dir(tmp_path_factory.mktemp("target"), "llama")))


def test_bytes_found_after_a_text_are_those_computed_for_every_drafter(target: hf.HFTarget) -> None:
    names = [*drafters.names(), "+".join(drafters.names())]
    made = [tiny_drafter(name, target.hooks()) for name in names]
    for name, found in zip(names, footprints(made, target, (1, 31, 64)), strict=True):
        for one in found:
            assert one.measured_bytes == one.computed_bytes, (name, one.context)


def test_what_is_too_long_for_target_drafter_or_patience_is_computed_only(
    target: hf.HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, limit = tiny_drafter("dflash", target.hooks()), target.info.max_context
    per_token = drafter.cost(1).kv_bytes_per_token
    assert per_token > 0
    contexts = (16, limit, limit + 1)
    found = footprints([drafter], target, contexts)[0]
    assert [one.computed_bytes - found[0].computed_bytes for one in found] == [per_token * (c - 16) for c in contexts]
    assert [one.measured_bytes is None for one in found] == [False, False, True]
    monkeypatch.setattr(footprint, "MEASURED_UP_TO", limit - 1)
    short = tiny_drafter("dflash", target.hooks())
    short.max_positions = 12
    pair = footprints([drafter, short], target, (12, 13, limit))
    assert [[one.measured_bytes is None for one in own] for own in pair] == [[False, False, True], [False, True, True]]
    assert footprints([], target) == []


def test_a_report_says_what_was_found_and_what_only_computed() -> None:
    rows = [Footprint(context=1000, computed_bytes=2000, measured_bytes=2000)]
    rows.append(Footprint(context=128_000, computed_bytes=3_000_000, measured_bytes=None))
    lines = report.memory([asdict(row) for row in rows])
    assert lines == ["memory of a text: 1k 2.0 KB (found), 128k 3.0 MB"]
    assert report.memory([]) == []
