"""Which bench runs may share a table, and under which names.

In: runs of `hyflash bench`. Out: `Group`s of `Entry`s. Acceptance at a fixed draft length is the same on every machine,
so `--acceptance-only` runs with equal target and settings share tables; a timed run stands alone, since a speed is
comparable only within its run. A drafter that several runs of a group measured with equal results is one entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hyflash.bench.report.lines import Bench, BenchRow, Run
from hyflash.bench.report.page import numbers

_OF_PROMPTS = ("prompts", "limit")
"""Settings that say which prompts were read; each row has the hash of its own."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A drafter and what it did, by place."""

    drafter: str
    sha256: str | None
    rows: dict[tuple[str, int | None, str], BenchRow]
    """By domain, context and hash of the prompts."""
    runs: list[int]
    label: str = ""


Rows = list[tuple[Entry, BenchRow]]
"""What drafters did at one place."""


@dataclass(slots=True, kw_only=True)
class Group:
    """Runs that share tables."""

    target: str
    runs: list[Run] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def benches(self) -> Iterator[Bench]:
        return (run.line for run in self.runs if isinstance(run.line, Bench))

    @property
    def title(self) -> str:
        numbered = numbers(run.number for run in self.runs)
        return f"{self.target}, {_how(next(self.benches))} (run{'s' * (len(self.runs) > 1)} {numbered})"

    @property
    def is_timed(self) -> bool:
        return any(row.exact is not None for entry in self.entries for row in entry.rows.values())

    def label(self, run: int, drafter: str) -> str:
        """The name of the entry that this drafter of this run went into."""
        return next(e.label for e in self.entries if e.drafter == drafter and run in e.runs)

    def places(self, *, stretched: bool) -> dict[tuple[str, str], str]:
        """Label of each domain: of prompts as they are, with their hash where one domain had several; or stretched."""
        keys = dict.fromkeys(
            (domain, "" if stretched else sha)
            for entry in self.entries
            for domain, context, sha in entry.rows
            if (context is not None) == stretched
        )
        names = [domain for domain, _ in keys]
        return {
            (domain, sha): domain if names.count(domain) == 1 else f"{domain} (prompts {sha[:6]})"
            for domain, sha in keys
        }

    def domains(self, *, stretched: bool) -> dict[str, Rows]:
        """Rows by the labels of `places`."""
        return {
            label: [
                (entry, row)
                for entry in self.entries
                for (d, context, s), row in entry.rows.items()
                if d == domain and (context is not None) == stretched and (stretched or s == sha)
            ]
            for (domain, sha), label in self.places(stretched=stretched).items()
        }


def group(runs: Sequence[Run]) -> list[Group]:
    """Bench runs in groups, in order."""
    found: dict[str, Group] = {}
    for run in runs:
        if isinstance(run.line, Bench):
            one = found.setdefault(_key(run, run.line), Group(target=run.line.target))
            one.runs.append(run)
            for entry in _entries(run, run.line):
                _add(one.entries, entry)
    for one in found.values():
        names = [entry.drafter for entry in one.entries]
        for entry in one.entries:
            several = names.count(entry.drafter) > 1
            entry.label = f"{entry.drafter} (run {numbers(entry.runs)})" if several else entry.drafter
    return list(found.values())


def _key(run: Run, line: Bench) -> str:
    if not line.settings.get("acceptance_only"):
        return str(run.number)
    stretched = any(row.context is not None for row in line.results)  # what fills a context hangs on the prompts
    settings = {key: value for key, value in line.settings.items() if stretched or key not in _OF_PROMPTS}
    facts = line.provenance
    return json.dumps([line.target, facts.target_fingerprint, facts.target_dtype, settings], sort_keys=True)


def _entries(run: Run, line: Bench) -> list[Entry]:
    made: dict[str, Entry] = {}
    for row in line.results:
        sha = line.provenance.drafters_sha256.get(row.drafter)
        entry = made.setdefault(row.drafter, Entry(drafter=row.drafter, sha256=sha, rows={}, runs=[run.number]))
        entry.rows[row.domain, row.context, row.prompts_sha256] = row
    return list(made.values())


def _add(entries: list[Entry], new: Entry) -> None:
    """Join an entry of the same drafter, to the hash of its weights, unless one result differs."""
    for entry in entries:
        if (entry.drafter, entry.sha256) == (new.drafter, new.sha256) and new.sha256 is not None:
            both = entry.rows.keys() & new.rows.keys()
            if all(entry.rows[key] == new.rows[key] for key in both):
                entry.rows |= new.rows
                entry.runs += new.runs
                return
    entries.append(new)


def _how(line: Bench) -> str:
    """The settings that decide acceptance, in words."""
    settings = line.settings
    most, temperature = settings.get("num_draft_tokens"), settings.get("temperature")
    draft = f"{most} draft tokens" if settings.get("length") == "fixed" else f"{settings.get('length')} draft length"
    if settings.get("length") != "fixed" and most:
        draft += f" up to {most}"
    drawn = "greedy" if not temperature else f"temperature {temperature}, seed {settings.get('seed')}"
    return f"{draft}, {settings.get('max_tokens')} new tokens, {drawn}"
