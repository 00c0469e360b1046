"""How good a drafter is now: loss on held-out batches, and acceptance in real rounds on held-out answers.

In: a drafter and held-out examples. Out: one flat record. Loss can fall while acceptance drops, so the best
checkpoint is chosen by acceptance; the teacher-forced figure stands beside it, because a gap between the two means
that training and serving disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyflash.core import LossTerms, Result
from hyflash.data.anchors import build_batch, to_device
from hyflash.data.capture import Example
from hyflash.drafters.base import Drafter
from hyflash.engine.replay import measure, watch
from hyflash.metrics import summarize
from hyflash.targets.replay import Recording
from hyflash.train.recipe import DataTable


def evaluate(
    drafter: Drafter, examples: Sequence[Example], options: DataTable, *, num_draft_tokens: int
) -> dict[str, Any]:
    """Record with loss, tau (pooled, of requests, loop-free, by domain) and the loss's own metrics.

    Runs in float32 without dropout, leaves the drafter in training mode and the RNG as it was.
    """
    drafter.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            terms = [
                _terms(drafter, examples[i : i + options.batch_sequences], options) for i in _starts(examples, options)
            ]
            results = measure(drafter, [_recording(e, drafter) for e in examples], num_draft_tokens)
    finally:
        drafter.train()
    numerator, denominator = (sum(float(getattr(t, n)) for t in terms) for n in ("numerator", "denominator"))
    record: dict[str, Any] = {"loss": numerator / denominator if denominator else None}
    record |= {f"teacher_forced_{k}": v for k, v in pool([t.metrics for t in terms]).items()}
    return record | _taus(results, examples) | {"num_draft_tokens": num_draft_tokens}


def calibrate(drafter: Drafter, examples: Sequence[Example], *, num_draft_tokens: int) -> dict[str, float]:
    """Fit the drafter's confidence to real rounds on held-out answers; leaves it in training mode. Returns figures."""
    drafter.eval()
    try:
        recordings = [_recording(e, drafter) for e in examples]
        return drafter.calibrate(watch(drafter, recordings, num_draft_tokens))
    finally:
        drafter.train()


def _starts(examples: Sequence[Example], options: DataTable) -> range:
    return range(0, len(examples), options.batch_sequences)


def _terms(drafter: Drafter, examples: Sequence[Example], options: DataTable) -> LossTerms:
    batch = to_device(build_batch(examples, options, seed=0, epoch=0), drafter.hooks.info.device)
    return drafter.loss(drafter(batch), batch)


def _recording(example: Example, drafter: Drafter) -> Recording:
    tokens = tuple(example.tokens.tolist())
    n = example.prompt_len
    return Recording(
        prompt_ids=tokens[:n],
        answer_ids=tokens[n:],
        features=example.features,
        taps=drafter.target_layer_ids,
        kv=example.kv,
        kv_layers=drafter.target_kv_layers,
    )


def _taus(results: Sequence[Result], examples: Sequence[Example]) -> dict[str, Any]:
    whole = summarize(results)
    domains = sorted({e.domain for e in examples})
    by_domain = {d: [r for r, e in zip(results, examples, strict=True) if e.domain == d] for d in domains}
    return {
        "tau": whole.tau,
        "tau_mean_of_requests": whole.tau_mean_of_requests,
        "tau_loop_free": whole.tau_loop_free,
        "tau_by_domain": {d: summarize(rs).tau for d, rs in by_domain.items()},
        "acceptance_by_position": list(whole.acceptance_by_position),
        "num_rounds": whole.num_rounds,
    }


def pool(metrics: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Pooled means of (numerator, denominator) metrics; those without a denominator are left out."""
    sums: dict[str, list[float]] = {}
    for part in metrics:
        for name, (numerator, denominator) in part.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += numerator
            total[1] += denominator
    return {name: n / d for name, (n, d) in sums.items() if d > 0}


def best_entry(log: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The evaluation with the highest `tau`, the earlier one of equals; None for an empty log."""
    best: Mapping[str, Any] | None = None
    for entry in log:
        if best is None or entry["tau"] > best["tau"]:
            best = entry
    return best
