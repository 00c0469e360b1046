"""Run drafters against plain decoding on the same prompts, in turns, and say what came out.

In: a plain engine, engines with drafters, workloads. Out: one `Row` per drafter and workload. Every answer is
compared token by token with the plain one; a speed exists only where all of them are equal. `acceptance_only`
decodes plainly once and replays the drafters over the answers: the same tau, many times faster, no times. With
`draft_sampling` texts are not to be equal: nothing is checked, speeds are those of different texts to the same prompts,
and acceptance needs the target's distributions, so that drafters decode in earnest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hyflash.bench.footprint import CONTEXTS
from hyflash.bench.workloads import Workload
from hyflash.core import Request, Result, Rows, SamplingParams
from hyflash.drafters.base import Drafter
from hyflash.engine.decode import Engine
from hyflash.engine.length import FixedLength
from hyflash.engine.replay import measure, record
from hyflash.errors import HyflashError
from hyflash.metrics import (
    Acceptance,
    Interval,
    bootstrap_interval,
    counts,
    difference_interval,
    loop_free_counts,
    quantile,
    summarize,
)
from hyflash.targets.base import Target

Progress = Callable[[int, int, str], None]
"""Called with (answers done, answers in all, what runs now)."""

WARM_UP_TOKENS = 16
_PARTS = ("draft_ns", "commit_ns", "verify_ns")
REPLAY_TOKENS = 16384
"""Features of at most about this many tokens are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and 10 % and 90 % quantiles over prompts."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where an answer first left the plain one; a margin near 0 is a tie, a large one a fault."""

    prompt_id: str
    index: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One drafter on one workload. Times are None unless measured, and where an answer is not what it should be.

    `exact` is None where answers were not to be compared: replays, and sampled drafts.
    """

    drafter: str
    workload: Workload
    acceptance: Acceptance
    interval: Interval
    exact: bool | None
    forks: tuple[Fork, ...]
    tokens_per_sec: Spread | None
    plain_tokens_per_sec: Spread | None
    speedup: Spread | None
    draft_ms_per_round: float | None
    """Proposing and committing, mean over rounds."""
    commit_ms_per_round: float | None
    """Committing alone."""
    verify_ms_per_round: float | None
    """Forwards of the target, mean over rounds."""
    ttft_sec: float | None
    plain_ttft_sec: float | None
    state_bytes: int
    kv_bytes_per_token: int
    measured_bytes: int
    """Most drafter bytes one request held at its end."""
    computed_bytes: dict[int, int]
    """Drafter bytes of one text by its tokens."""
    results: tuple[Result, ...]


Named = tuple[str, Drafter]
"""A drafter and the name the user gave it."""


def timed(
    plain: Engine,
    drafted: Sequence[tuple[str, Engine]],
    workloads: Sequence[Workload],
    params: SamplingParams,
    *,
    progress: Progress | None = None,
) -> list[Row]:
    """Decode every prompt plainly and with each named engine, interleaved; the order rotates from prompt to prompt."""
    engines = [plain, *(engine for _, engine in drafted)]
    total = len(engines) * sum(len(w.prompts) for w in workloads)
    rows: list[Row] = []
    done = 0
    for workload in workloads:
        for engine in engines:  # caches, allocator and clocks settle before anything is timed
            _decode(engine, workload.prompts[0], _short(params))
            for part in _PARTS:
                engine.counters[part] = 0
        answers: list[list[Result]] = [[] for _ in engines]
        for i, prompt in enumerate(workload.prompts):
            for at in range(len(engines)):
                which = (i + at) % len(engines)
                answers[which].append(_decode(engines[which], prompt, params))
                done += 1
                if progress:
                    progress(done, total, workload.domain)
        for (name, engine), results in zip(drafted, answers[1:], strict=True):
            assert engine.drafter is not None
            row = _row(
                (name, engine.drafter), workload, results, answers[0], plain.target, compared=not params.draft_sampling
            )
            rows.append(_with_parts(row, engine) if row.exact is not False else row)
    return rows


def acceptance_only(
    plain: Engine,
    drafters: Sequence[Named],
    workloads: Sequence[Workload],
    params: SamplingParams,
    *,
    num_draft_tokens: int,
    progress: Progress | None = None,
) -> list[Row]:
    """Acceptance at a fixed draft length from plain answers, decoded in one batch, and replays of each drafter; with
    `draft_sampling`, and for drafters that recycle what is said after rejected drafts, from decoding in earnest."""
    if params.draft_sampling:
        return _sampled(plain, drafters, workloads, params, num_draft_tokens=num_draft_tokens, progress=progress)
    taps = tuple(sorted({tap for _, d in drafters for tap in d.target_layer_ids}))
    kv_layers = tuple(sorted({layer for _, d in drafters for layer in d.target_kv_layers}))
    total = (1 + len(drafters)) * sum(len(w.prompts) for w in workloads)
    rows: list[Row] = []
    done = 0
    for workload in workloads:
        answers = [
            _checked(r) for r in plain.generate([Request(prompt_ids=p, params=params) for p in workload.prompts])
        ]
        done += len(answers)
        replays: list[list[Result]] = [[] for _ in drafters]
        for group in _groups(answers):
            recordings = [record(plain.target, taps, a.prompt_ids, a.token_ids, kv_layers=kv_layers) for a in group]
            for (name, drafter), results in zip(drafters, replays, strict=True):
                if drafter.recycles:
                    prompts = [a.prompt_ids for a in group]
                    results += _decode_all(plain, drafter, prompts, params, num_draft_tokens=num_draft_tokens)
                else:
                    results += measure(drafter, recordings, num_draft_tokens)
                done += len(group)
                if progress:
                    progress(done, total, f"{workload.domain} {name}")
        for named, results in zip(drafters, replays, strict=True):
            rows.append(_row(named, workload, results, None, plain.target))
    return rows


def _sampled(
    plain: Engine,
    drafters: Sequence[Named],
    workloads: Sequence[Workload],
    params: SamplingParams,
    *,
    num_draft_tokens: int,
    progress: Progress | None,
) -> list[Row]:
    rows: list[Row] = []
    for workload in workloads:
        for named in drafters:
            name, drafter = named
            if progress:
                progress(len(rows), len(workloads) * len(drafters), f"{workload.domain} {name}")
            results = _decode_all(plain, drafter, workload.prompts, params, num_draft_tokens=num_draft_tokens)
            rows.append(_row(named, workload, results, None, plain.target))
    return rows


def _decode_all(
    plain: Engine,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    num_draft_tokens: int,
) -> list[Result]:
    """Answers of the plain engine's target, as exact as that engine's."""
    exact = "auto" if plain.exactness == "invariant" else plain.exactness
    engine = Engine(plain.target, drafter, policy=FixedLength(num_draft_tokens), exact=exact)
    return [_checked(r) for r in engine.generate([Request(prompt_ids=p, params=params) for p in prompts])]


def differences(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Pooled tau of every later drafter minus the first one's, per workload, with paired intervals over prompts."""
    out = []
    for row in rows:
        first = next(r for r in rows if r.workload == row.workload)
        if first is row:
            continue
        got = difference_interval(row.results, first.results)
        out.append(
            {
                "drafter": row.drafter,
                "against": first.drafter,
                "domain": row.workload.domain,
                "context": row.workload.context,
                "tau_difference": got.value,
                "interval": [got.low, got.high],
            }
        )
    return out


def as_dict(row: Row) -> dict[str, Any]:
    """The row's JSON fields."""
    acceptance = asdict(row.acceptance)
    return {
        "drafter": row.drafter,
        "domain": row.workload.domain,
        "context": row.workload.context,
        "num_prompts": len(row.workload.prompts),
        "prompt_tokens_median": quantile([len(p) for p in row.workload.prompts], 0.5),
        **acceptance,
        "acceptance_by_position": list(row.acceptance.acceptance_by_position),
        "num_judged_by_position": list(row.acceptance.num_judged_by_position),
        "tau_interval": [row.interval.low, row.interval.high],
        "loop_share": row.acceptance.loop_share,
        "tokens_per_sec": row.tokens_per_sec.median if row.tokens_per_sec else None,
        "tokens_per_sec_p10": row.tokens_per_sec.p10 if row.tokens_per_sec else None,
        "tokens_per_sec_p90": row.tokens_per_sec.p90 if row.tokens_per_sec else None,
        "plain_tokens_per_sec": row.plain_tokens_per_sec.median if row.plain_tokens_per_sec else None,
        "speedup": row.speedup.median if row.speedup else None,
        "speedup_p10": row.speedup.p10 if row.speedup else None,
        "speedup_p90": row.speedup.p90 if row.speedup else None,
        "draft_ms_per_round": row.draft_ms_per_round,
        "commit_ms_per_round": row.commit_ms_per_round,
        "verify_ms_per_round": row.verify_ms_per_round,
        "ttft_sec": row.ttft_sec,
        "plain_ttft_sec": row.plain_ttft_sec,
        "state_bytes": row.state_bytes,
        "kv_bytes_per_token": row.kv_bytes_per_token,
        "measured_bytes": row.measured_bytes,
        "computed_bytes": {str(context): row.computed_bytes[context] for context in CONTEXTS},
        "exact": row.exact,
        "forks": [asdict(fork) for fork in row.forks],
        "prompts_sha256": row.workload.sha256,
        **_by_prompt("", [counts(result) for result in row.results]),
        **_by_prompt("loop_free_", [loop_free_counts(result) for result in row.results]),
    }


def _by_prompt(prefix: str, pairs: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """JSON fields of (committed tokens, rounds) of each prompt."""
    return {f"{prefix}committed_by_prompt": [n for n, _ in pairs], f"{prefix}rounds_by_prompt": [r for _, r in pairs]}


def drafter_sha256(drafter: Drafter) -> str:
    """Hash of a drafter's parts: methods, configs and weights."""
    digest = hashlib.sha256()
    for module in drafter.modules():
        if isinstance(module, Drafter):
            digest.update(f"{type(module).__module__} {module.config.model_dump_json()}".encode())
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- parts


def _short(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), min_tokens=0)


def _decode(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Result:
    params = replace(params, draft_sampling=params.draft_sampling and engine.drafter is not None)
    return _checked(engine.generate([Request(prompt_ids=prompt, params=params)])[0])


def _checked(result: Result) -> Result:
    if result.error is not None:
        raise HyflashError(f"the run stopped: {result.error}")
    return result


def _groups(answers: Sequence[Result]) -> Iterator[list[Result]]:
    """Answers in groups whose features fit in memory together."""
    group: list[Result] = []
    size = 0
    for answer in answers:
        tokens = len(answer.prompt_ids) + len(answer.token_ids)
        if group and size + tokens > REPLAY_TOKENS:
            yield group
            group, size = [], 0
        group.append(answer)
        size += tokens
    if group:
        yield group


def _row(
    named: Named,
    workload: Workload,
    results: list[Result],
    plains: list[Result] | None,
    target: Target,
    *,
    compared: bool = True,
) -> Row:
    name, drafter = named
    forks = _forks(workload, results, plains, target) if plains is not None and compared else ()
    exact = None if plains is None or not compared else not forks
    is_timed = plains is not None and not forks
    cost = drafter.cost(max(len(r.prompt_ids) + len(r.token_ids) for r in results))
    speeds = [r.tokens_per_sec for r in results]
    plain_speeds = [r.tokens_per_sec for r in plains or ()]
    return Row(
        drafter=name,
        workload=workload,
        acceptance=summarize(results),
        interval=bootstrap_interval(results),
        exact=exact,
        forks=forks,
        tokens_per_sec=_spread(speeds) if is_timed else None,
        plain_tokens_per_sec=_spread(plain_speeds) if plain_speeds else None,
        speedup=_spread([a / b for a, b in zip(speeds, plain_speeds, strict=True) if b > 0]) if is_timed else None,
        draft_ms_per_round=None,
        commit_ms_per_round=None,
        verify_ms_per_round=None,
        ttft_sec=quantile([r.ttft_sec for r in results], 0.5) if plains is not None else None,
        plain_ttft_sec=quantile([r.ttft_sec for r in plains], 0.5) if plains is not None else None,
        state_bytes=cost.state_bytes,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        measured_bytes=max(r.draft_state_bytes for r in results),
        computed_bytes={context: drafter.cost(context).total_bytes(context) for context in CONTEXTS},
        results=tuple(results),
    )


def _with_parts(row: Row, engine: Engine) -> Row:
    """The row with what the engine's counters say of the parts of a round."""
    rounds = max(1, row.acceptance.num_rounds)
    draft, commit, verify = (engine.counters[part] / 1e6 / rounds for part in _PARTS)
    return replace(row, draft_ms_per_round=draft, commit_ms_per_round=commit, verify_ms_per_round=verify)


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(median=quantile(values, 0.5), p10=quantile(values, 0.1), p90=quantile(values, 0.9))


def _forks(workload: Workload, results: Sequence[Result], plains: Sequence[Result], target: Target) -> tuple[Fork, ...]:
    out = []
    for prompt_id, mine, plain in zip(workload.ids, results, plains, strict=True):
        if mine.token_ids == plain.token_ids:
            continue
        pairs = zip(mine.token_ids, plain.token_ids, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine.token_ids), len(plain.token_ids)))
        margin = _margin(target, (*plain.prompt_ids, *plain.token_ids[:index]))
        out.append(Fork(prompt_id=prompt_id, index=index, margin=margin))
    return tuple(out)


def _margin(target: Target, ids: tuple[int, ...]) -> float:
    """Top-1 minus top-2 logit of the token after `ids`."""
    seq = target.open()
    try:
        out = target.forward(Rows(tokens=torch.tensor(ids), seqs=(seq,), lengths=(len(ids),), logits="last"))
    finally:
        target.close(seq)
    assert out.logits is not None
    top = out.logits[0].topk(2).values
    return float(top[0] - top[1])
