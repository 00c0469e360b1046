"""The closing section: where every line comes from, so that it can be repeated.

In: runs. Out: a section with one table row a run, its command, its warnings, and each machine and set of versions once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from hyflash.bench.report.lines import Bench, Costs, DraftPass, Exactness, LengthPolicies, Perplexity, Provenance, Run
from hyflash.bench.report.page import NONE, Block, Heading, Listing, Paragraph, Section, count, numbers, table

_KINDS = {
    Bench: "bench",
    Costs: "costs",
    Exactness: "exactness",
    DraftPass: "draft pass",
    LengthPolicies: "length policies",
    Perplexity: "perplexity",
}
_COMMIT_CHARS = 12


def section(runs: Sequence[Run]) -> Section:
    """All runs."""
    machines = _numbered([_machine(run.provenance) for run in runs])
    versions = _numbered([dict(run.provenance.versions) for run in runs])
    rows = [
        (
            str(run.number),
            run.source,
            _KINDS[type(run.line)],
            run.line.target or NONE,
            run.provenance.target_fingerprint or NONE,
            _computed(run.provenance),
            run.provenance.time_utc,
            _commit(run.provenance.git_commit),
            str(machines[_text(_machine(run.provenance))]),
            str(versions[_text(dict(run.provenance.versions))]),
        )
        for run in runs
    ]
    blocks: list[Block] = [
        table(
            "Runs",
            ["run", "<line", "<kind", "<target", "<fingerprint", "<computed by", "<time (UTC)", "<commit", "machine",
             "versions"],
            rows,
            anchors=[f"run-{run.number}" for run in runs],
        ),
        Heading("Commands"),
        Listing(tuple(f"# run {run.number}\n{shlex.join(run.provenance.argv)}" for run in runs)),
        _facts("Machines", "machine", machines),
        _facts("Versions", "versions", versions),
    ]  # fmt: skip
    if hashes := _hashes(runs):
        columns = ["<drafter", "<SHA-256 of method, options and weights", "#runs"]
        blocks.append(table("Drafters", columns, hashes, is_detail=True))
    warned = [(run.number, text) for run in runs if isinstance(run.line, Bench | Costs) for text in run.line.warnings]
    if warned:
        blocks.append(Heading("Warnings of the runs"))
        blocks += [Paragraph(f"Run {number}: {text}.") for number, text in warned]
    return Section(anchor="provenance", title="Where the numbers come from", blocks=tuple(blocks))


def _machine(facts: Provenance) -> dict[str, Any]:
    return {**facts.hardware, "threads": facts.threads, "kernels": facts.kernels or NONE}


def _computed(facts: Provenance) -> str:
    """Backend and arithmetic of the target."""
    if facts.target_backend:
        return ", ".join(f"{key} {value}" for key, value in facts.target_backend.items())
    return facts.target_dtype or NONE


def _commit(commit: str | None) -> str:
    if commit is None:
        return NONE
    short, plus, dirty = commit.partition("+")
    return short[:_COMMIT_CHARS] + plus + dirty


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _numbered(values: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Each different value with its number from 1, in order of appearance."""
    found: dict[str, int] = {}
    for value in values:
        found.setdefault(_text(value), len(found) + 1)
    return found


def _facts(caption: str, name: str, found: dict[str, int]) -> Block:
    """One row each, facts as text."""
    rows = [(str(n), *_spelled(json.loads(text))) for text, n in found.items()]
    return table(caption, [name, "<facts"], rows)


def _spelled(value: dict[str, Any]) -> tuple[str]:
    parts = []
    for key, one in value.items():
        if isinstance(one, dict):
            one = " ".join(_spelled(one)) or "default"
            parts.append(f"{key} ({one})")
        elif isinstance(one, list):
            parts.append(f"{key} {' '.join(map(str, one))}")
        else:
            parts.append(f"{key} {count(one) if isinstance(one, int) and not isinstance(one, bool) else one}")
    return ("; ".join(parts),)


def _hashes(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        for drafter, sha in run.provenance.drafters_sha256.items():
            found.setdefault((drafter, sha), []).append(run.number)
    return [(*key, numbers(which)) for key, which in found.items()]
