"""`hyflash bench --costs`: what a forward of each width costs here, in our target and in peers, beside its floor.

In: options and a loaded target. Out: the JSON object; `tables.py` shows it to people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyflash import hub
from hyflash.cli import flags
from hyflash.errors import UserError

if TYPE_CHECKING:
    from hyflash.api import LoadedTarget
    from hyflash.bench.peers.base import Engine

Progress = Callable[[int, int, str], None]
MOST_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure."""

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    """Ascending, 1 among them."""
    peers: tuple[str, ...]
    all_peers: bool
    """Leave out those that cannot run, instead of failing."""
    num_repeats: int
    prefill_tokens: int | None


def parse(*, context: str | None, widths: str, peers: str | None, repeats: int, prefill: str | None) -> Asked:
    """What a command line asks for. Raises UserError for anything that makes no sense."""
    from hyflash.bench import race
    from hyflash.bench.peers import find

    if repeats < 1:
        raise UserError(f"repeats is {repeats}; expected at least 1.")
    for part in widths.split(","):
        if not (part.strip().isdecimal() and 1 <= int(part) <= MOST_WIDTH):
            raise UserError(f"width {part!r} is none; expected whole numbers from 1 to {MOST_WIDTH}, like 1,4,8.")
    names = [] if peers is None else list(dict.fromkeys(part.strip() for part in peers.split(",")))
    if names != ["all"]:
        find.check_names(names)
    return Asked(
        contexts=race.CONTEXTS if context is None else tuple(map(flags.parse_tokens, context.split(","))),
        widths=tuple(sorted({1, *map(int, widths.split(","))})),
        peers=find.NAMES if names == ["all"] else tuple(names),
        all_peers=names == ["all"],
        num_repeats=repeats,
        prefill_tokens=None if prefill is None else flags.parse_tokens(prefill, "prefill"),
    )


def measure(loaded: LoadedTarget, asked: Asked, *, provenance: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The JSON object of a cost measurement. Raises UserError for a peer that was named and cannot run."""
    from hyflash.bench import floors, race

    info, threads = loaded.model.info, int(loaded.model.describe()["num_threads"])
    contexts, notes = _fitting(asked.contexts, most=info.max_context - max(asked.widths), name=loaded.name)
    prompt = asked.prefill_tokens or 0
    if prompt > info.max_context:
        raise UserError(f"prefill is {prompt} tokens; {loaded.name} holds {info.max_context}.")
    engines, missing = _engines(
        loaded, asked, num_threads=threads, max_tokens=max(max(contexts) + max(asked.widths), prompt)
    )
    vocab, repeats = info.vocab_size, asked.num_repeats
    try:
        machine = floors.measure(threads)
        ping_pong = floors.ping_pong_ns(threads)
        same = race.agreement(engines, context=min(contexts), width=max(asked.widths), vocab_size=vocab)
        results = [
            row
            for context in contexts
            for row in race.forwards(
                engines, machine, context=context, widths=asked.widths, vocab_size=vocab, num_repeats=repeats,
                progress=progress,
            )
        ]  # fmt: skip
        prompts = (
            race.prefill(engines, num_tokens=prompt, vocab_size=vocab, num_repeats=min(repeats, 5), progress=progress)
            if prompt
            else []
        )
    finally:
        for engine in engines:
            engine.end()
    return {
        "target": loaded.name,
        "threads": threads,
        "num_repeats": repeats,
        "isa": machine.isa,
        "pingpong_ns": ping_pong,
        "bandwidth_gb_per_sec": machine.bytes_per_sec / 1e9,
        "int8_gmac_per_sec": None if machine.int8_per_sec is None else machine.int8_per_sec / 1e9,
        "float32_gmac_per_sec": None if machine.float32_per_sec is None else machine.float32_per_sec / 1e9,
        "engines": [
            {"engine": engine.name, "weights": engine.weights, **engine.about, **agreed}
            for engine, agreed in zip(engines, same, strict=True)
        ],
        "results": results,
        "prefill": prompts,
        "warnings": notes + missing,
        "provenance": provenance,
    }


def _fitting(contexts: Sequence[int], *, most: int, name: str) -> tuple[list[int], list[str]]:
    """Contexts that leave room for the widest forward, and notes on those that were cut."""
    if most < 1:
        raise UserError(f"{name} holds {max(most, 0)} tokens before the widest forward; give smaller --widths.")
    notes = [
        f"context {c} was cut to {most}: {name} holds no more before the widest forward" for c in contexts if c > most
    ]
    return sorted({min(context, most) for context in contexts}), notes


def _engines(
    loaded: LoadedTarget, asked: Asked, *, num_threads: int, max_tokens: int
) -> tuple[list[Engine], list[str]]:
    """Ours and the peers; of all peers those that can run, with a line on each that cannot. Raises UserError."""
    from hyflash.bench.peers import find
    from hyflash.bench.peers.base import MissingPeer
    from hyflash.bench.peers.ours import TargetEngine

    source, info = hub.find_target(loaded.name), loaded.model.info
    shape = find.shape_of(source, info)
    engines: list[Engine] = [TargetEngine(loaded.model, shape, is_gguf=source.is_gguf)]
    missing = []
    for name in asked.peers:
        try:
            engines.append(find.make(name, source, shape, info=info, num_threads=num_threads, max_tokens=max_tokens))
        except MissingPeer as err:
            if not asked.all_peers:
                for engine in engines:
                    engine.end()
                raise UserError(f"peer {name} cannot run: {err}.") from err
            missing.append(f"{err}; left out")
    return engines, missing
