"""Lines of result files: which measurement wrote them, and that they hold what it writes.

In: JSON or JSONL files of `hyflash bench --json|--out`, of `hyflash bench --costs` and of the scripts in `benchmarks/`.
Out: `Run`s, numbered in the order of files and lines. A field that is not named here is left unread; one that is
missing or no number is an error with file and line. Lines that are equal to the last byte of their values count once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hyflash.errors import UserError

EXPECTED = (
    "expected lines of `hyflash bench --json` or `--out`, with or without --costs, or of a script in benchmarks/ "
    "with --json (exactness_smol, exactness_sweep, draft_pass, length_policies, perplexity)"
)


Bounds = tuple[float | None, float | None]
"""Of an interval, where there is one."""


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_no_number_beyond_count(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise ValueError(f"{name} is beyond any count")
        return values


class Provenance(_Fields):
    """Where a line comes from; later versions of hyflash say more than early ones."""

    argv: tuple[str, ...]
    versions: dict[str, str]
    git_commit: str | None
    hardware: dict[str, Any]
    threads: dict[str, Any]
    kernels: dict[str, Any] = {}
    time_utc: str
    target_fingerprint: str | None = None
    target_dtype: str | None = None
    target_backend: dict[str, Any] = {}
    drafters_sha256: dict[str, str] = {}


class Fork(_Fields):
    """Where an answer left the plain one."""

    prompt_id: str
    index: int
    margin: float


class BenchRow(_Fields):
    """One drafter on one workload; speeds are None unless timed and exact."""

    drafter: str
    domain: str
    context: int | None
    num_prompts: int
    tau: float
    tau_interval: tuple[float, float]
    tau_mean_of_requests: float
    tau_loop_free: float | None
    acceptance_by_position: tuple[float, ...]
    num_judged_by_position: tuple[int, ...]
    num_rounds: int
    num_tokens: int
    loop_share: float
    tokens_per_sec: float | None
    tokens_per_sec_p10: float | None
    tokens_per_sec_p90: float | None
    plain_tokens_per_sec: float | None
    speedup: float | None
    speedup_p10: float | None
    speedup_p90: float | None
    draft_ms_per_round: float | None = None
    commit_ms_per_round: float | None = None
    verify_ms_per_round: float | None = None
    ttft_sec: float | None
    plain_ttft_sec: float | None
    state_bytes: int
    kv_bytes_per_token: int
    measured_bytes: int
    exact: bool | None
    forks: tuple[Fork, ...]
    prompts_sha256: str

    @model_validator(mode="after")
    def _counts_belong_to_rates(self) -> Self:
        rates, counts = len(self.acceptance_by_position), len(self.num_judged_by_position)
        if rates != counts:
            raise ValueError(f"acceptance_by_position has {rates} values and num_judged_by_position {counts}")
        return self

    @property
    def tau_bounds(self) -> Bounds:
        """The interval of tau; none over a single prompt."""
        return self.tau_interval if self.num_prompts > 1 else (None, None)

    @property
    def tokens_per_sec_bounds(self) -> Bounds:
        """10 % and 90 % quantiles over prompts."""
        return (self.tokens_per_sec_p10, self.tokens_per_sec_p90) if self.num_prompts > 1 else (None, None)

    @property
    def speedup_bounds(self) -> Bounds:
        """10 % and 90 % quantiles over prompts."""
        return (self.speedup_p10, self.speedup_p90) if self.num_prompts > 1 else (None, None)


class Difference(_Fields):
    """Tau of a drafter minus that of another on the same prompts."""

    drafter: str
    against: str
    domain: str
    context: int | None
    tau_difference: float
    interval: tuple[float, float]


class Bench(_Fields):
    """`hyflash bench`."""

    target: str
    settings: dict[str, Any]
    results: Annotated[tuple[BenchRow, ...], Field(min_length=1)]
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...] = ()
    provenance: Provenance

    @model_validator(mode="after")
    def _differences_are_of_results(self) -> Self:
        names = {row.drafter for row in self.results}
        for one in self.differences:
            for name in (one.drafter, one.against):
                if name not in names:
                    raise ValueError(f"differences name {name!r}, of which there is no result")
        return self


class CostEngine(_Fields):
    """An engine of a cost measurement, and how far its logits are from the first one's."""

    engine: str
    weights: str
    version: str
    build: str = ""
    rows: int
    same_best_token: int
    logit_error: float


class CostRow(_Fields):
    """Forwards of one engine at one context and width."""

    engine: str
    weights: str
    context: int
    width: int = Field(ge=1)
    ms_median: float
    ms_min: float
    floor_ms: float = Field(gt=0)
    c: float


class PrefillRow(_Fields):
    """How fast an engine reads a prompt."""

    engine: str
    weights: str
    tokens: int
    tokens_per_sec_median: float
    tokens_per_sec_best: float


class Costs(_Fields):
    """`hyflash bench --costs`."""

    target: str
    threads: int
    num_repeats: int
    isa: str | None
    pingpong_ns: float | None
    bandwidth_gb_per_sec: float
    int8_gmac_per_sec: float | None
    float32_gmac_per_sec: float | None
    engines: tuple[CostEngine, ...]
    results: Annotated[tuple[CostRow, ...], Field(min_length=1)]
    prefill: tuple[PrefillRow, ...]
    warnings: tuple[str, ...] = ()
    provenance: Provenance


class SweepFork(_Fields):
    """Where a text of an exactness sweep left the plain one."""

    prompt: int
    index: int


class SweepRow(_Fields):
    """One setting of an exactness sweep."""

    family: str | None = None
    drafter: str
    width: int
    batch: int
    num_texts: int
    num_tokens: int
    num_rechecks: int
    forks: tuple[SweepFork, ...]


class Exactness(_Fields):
    """`benchmarks/exactness_sweep.py` (random models by family) or `exactness_smol.py` (one real target)."""

    target: str | None = None
    num_forks: int
    identical: bool
    results: Annotated[tuple[SweepRow, ...], Field(min_length=1)]
    provenance: Provenance


class _OfBenchmark(_Fields):
    """What the scripts in `benchmarks/` write beside their results."""

    settings: dict[str, Any]
    provenance: Provenance

    @property
    def target(self) -> str:
        return str(self.settings.get("target", "-"))


class PassRow(_Fields):
    """Draft passes on one path at one context."""

    path: str
    context: int
    propose_ms_median: float
    propose_ms_min: float
    commit_ms_median: float
    commit_ms_min: float
    pass_ms_median: float
    pass_ms_min: float


class DraftPass(_OfBenchmark):
    """`benchmarks/draft_pass.py`."""

    results: Annotated[tuple[PassRow, ...], Field(min_length=1)]


class PolicyShare(_Fields):
    """What one length policy reached on a trace."""

    tokens_per_sec: float
    over_best_fixed: float
    over_best_of_phases: float
    policy_us: float


class LengthTrace(_Fields):
    """One trace: fixed lengths by draft tokens, from 0 on, and the policies."""

    trace: str
    fixed_tokens_per_sec: Annotated[tuple[float, ...], Field(min_length=1)]
    best_fixed: int
    best_of_phases_over_best_fixed: float
    policies: dict[str, PolicyShare]


class LengthPolicies(_OfBenchmark):
    """`benchmarks/length_policies.py`."""

    results: Annotated[tuple[LengthTrace, ...], Field(min_length=1)]


class BothPerplexities(_Fields):
    """Over all texts."""

    ours: float
    llama_cpp: float


class Perplexity(_Fields):
    """`benchmarks/perplexity.py`."""

    model: str
    perplexity: BothPerplexities
    per_cent_apart: float
    texts: tuple[dict[str, Any], ...]
    provenance: Provenance

    @property
    def target(self) -> str:
        return self.model


Line = Bench | Costs | Exactness | DraftPass | LengthPolicies | Perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line of a result file."""

    number: int
    """From 1, over all files."""
    source: str
    """FILE:LINE."""
    line: Line

    @property
    def provenance(self) -> Provenance:
        return self.line.provenance


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of all files, in order; a file that is named twice is read once. Raises UserError."""
    runs: dict[str, Run] = {}
    for path in _unique(paths):
        for number, value in _objects(path):
            line = recognise(value, f"{path}:{number}")
            same = json.dumps(value, sort_keys=True, ensure_ascii=False)
            if same not in runs:
                runs[same] = Run(number=len(runs) + 1, source=f"{path}:{number}", line=line)
    return list(runs.values())


def _unique(paths: Sequence[Path]) -> list[Path]:
    """Paths without those that lead to a file named before."""
    first: dict[Path, Path] = {}
    for path in paths:
        first.setdefault(path.resolve(), path)
    return list(first.values())


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers and values: one object a line, or one object over the whole file, as `jq` prints it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as err:
        raise UserError(f"{path}: cannot be read ({err.strerror or err}); {EXPECTED}.") from err
    except UnicodeDecodeError as err:
        raise UserError(f"{path}: not UTF-8 (byte {err.start}); {EXPECTED}.") from err
    if not text.strip():
        raise UserError(f"{path}: empty; {EXPECTED}.")
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if lines[0][1].strip() == "{":
        lines = [(lines[0][0], text)]
    for number, line in lines:
        try:
            value = json.loads(line)
            json.dumps(value, ensure_ascii=False).encode()  # refuses halves of surrogate pairs, which no file can hold
        except (ValueError, RecursionError) as err:
            at = f" (character {err.pos + 1}: {err.msg})" if isinstance(err, json.JSONDecodeError) else ""
            raise UserError(f"{path}:{number}: no JSON in valid Unicode{at}; {EXPECTED}.") from err
        yield number, value


def recognise(value: Any, where: str) -> Line:
    """The line as the measurement that wrote it has it. Raises UserError."""
    kind = _kind(value) if isinstance(value, dict) else None
    if kind is None:
        found = f"an object with {', '.join(list(value)[:6]) or 'nothing'}" if isinstance(value, dict) else "no object"
        raise UserError(f"{where}: {found} is no kind of result that is known here; {EXPECTED}.")
    try:
        return kind.model_validate(value)
    except ValidationError as err:
        first = err.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "the line"
        given = "" if first["type"] == "missing" else f" is {_short(first['input'])}"
        raise UserError(
            f"{where}: {name}{given}: {first['msg']}; expected what {(kind.__doc__ or '').split(' (')[0].rstrip('.')} "
            "writes."
        ) from err


def _kind(value: dict[str, Any]) -> type[Line] | None:
    """Told by the fields that only one kind of line has."""
    if "perplexity" in value:
        return Perplexity
    if "bandwidth_gb_per_sec" in value:
        return Costs
    if "identical" in value:
        return Exactness
    if "differences" in value:
        return Bench
    rows = value.get("results")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "pass_ms_median" in rows[0]:
        return DraftPass
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "best_fixed" in rows[0]:
        return LengthPolicies
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
