"""Result lines as bench and the benchmark scripts write them, small, for tests of what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def provenance(**changes: Any) -> Line:
    return {
        "argv": ["hyflash", "bench", "-d", "lookup"],
        "versions": {"hyflash": "0.1.0", "python": "3.11.7"},
        "git_commit": "0123456789abcdef0123+dirty",
        "hardware": {"cpu": "Toy CPU", "cpu_flags": ["avx2"], "num_cores": 2, "memory_bytes": 8, "os": "Linux"},
        "threads": {"num_threads": 2},
        "time_utc": "2026-01-02T03:04:05+00:00",
        "target_fingerprint": "f00d",
        "target_dtype": "float32",
        **changes,
    }


def bench_row(drafter: str = "lookup", domain: str = "chat", **changes: Any) -> Line:
    """One row of an `--acceptance-only` run."""
    speeds = ("tokens_per_sec", "speedup")
    return {
        "drafter": drafter,
        "domain": domain,
        "context": None,
        "num_prompts": 3,
        "prompt_tokens_median": 45.0,
        "tau": 1.23456,
        "tau_interval": [1.1111, 1.9999],
        "tau_mean_of_requests": 1.3,
        "tau_loop_free": 1.0101,
        "acceptance_by_position": [0.5, 0.25],
        "num_judged_by_position": [1000, 20],
        "num_rounds": 300,
        "num_tokens": 370,
        "loop_share": 0.125,
        **{f"{name}{suffix}": None for name in speeds for suffix in ("", "_p10", "_p90")},
        "plain_tokens_per_sec": None,
        "draft_ms_per_round": None,
        "verify_ms_per_round": None,
        "ttft_sec": None,
        "plain_ttft_sec": None,
        "state_bytes": 48,
        "kv_bytes_per_token": 392,
        "measured_bytes": 1234567,
        "exact": None,
        "forks": [],
        "prompts_sha256": f"hash of {domain}",
        **changes,
    }


def timed_row(drafter: str = "lookup", domain: str = "chat", **changes: Any) -> Line:
    """One row of a timed run whose answers were equal to the plain ones."""
    speeds: Line = {
        "tokens_per_sec": 20.04,
        "tokens_per_sec_p10": 18.0,
        "tokens_per_sec_p90": 25.0,
        "plain_tokens_per_sec": 10.0,
        "speedup": 2.004,
        "speedup_p10": 1.8,
        "speedup_p90": 2.5,
        "draft_ms_per_round": 7.654321,
        "verify_ms_per_round": 54.321,
        "ttft_sec": 0.14,
        "plain_ttft_sec": 0.13,
        "exact": True,
    }
    return bench_row(drafter, domain, **{**speeds, **changes})


def bench(*rows: Line, **changes: Any) -> Line:
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    settings = {
        "prompts": ["demo"],
        "limit": 3,
        "max_tokens": 128,
        "temperature": 0.0,
        "seed": 0,
        "length": "fixed",
        "num_draft_tokens": 5,
        "acceptance_only": all(row["exact"] is None for row in rows),
    }
    return {
        "target": "toy",
        "settings": settings,
        "provenance": provenance(drafters_sha256={name: f"hash of {name}" for name in names}),
        "results": list(rows),
        "differences": [
            {
                "drafter": row["drafter"],
                "against": rows[0]["drafter"],
                "domain": row["domain"],
                "context": row["context"],
                "tau_difference": 0.4321,
                "interval": [-0.1, 0.9],
            }
            for row in rows
            if row["drafter"] != rows[0]["drafter"]
        ],
        "warnings": [],
        **changes,
    }


def costs(**changes: Any) -> Line:
    engines = (("ours", "Q8_0", 4.0), ("theirs", "Q8_0", 8.0))
    return {
        "target": "toy",
        "threads": 2,
        "num_repeats": 3,
        "isa": "avx2",
        "pingpong_ns": 171.3,
        "bandwidth_gb_per_sec": 26.9,
        "int8_gmac_per_sec": None,
        "float32_gmac_per_sec": None,
        "engines": [
            {"engine": e, "weights": w, "version": "1", "rows": 8, "same_best_token": 7, "logit_error": 0.0123}
            for e, w, _ in engines
        ],
        "results": [
            {
                "engine": e, "weights": w, "context": 128, "width": q, "ms_median": ms * q, "ms_min": ms,
                "floor_ms": 3.2, "c": float(q),
            }
            for e, w, ms in engines
            for q in (1, 2, 8)
        ],
        "prefill": [
            {"engine": "ours", "weights": "Q8_0", "tokens": 2048, "tokens_per_sec_median": 1211.0,
             "tokens_per_sec_best": 1215.0}
        ],
        "warnings": ["context 8192 was cut to 128"],
        "provenance": provenance(),
        **changes,
    }  # fmt: skip


def sweep(*, family: str | None = "llama", forks: int = 0, **changes: Any) -> Line:
    row = {
        **({"family": family} if family else {}),
        "drafter": "hyflash",
        "width": 4,
        "batch": 1,
        "num_texts": 50,
        "num_tokens": 1000,
        "tau": 2.0,
        "num_rechecks": 7,
        "forks": [{"prompt": i, "index": 12} for i in range(forks)],
    }
    out = {"num_forks": forks, "identical": not forks, "results": [row], "provenance": provenance(), **changes}
    return out if family else {"target": "toy", **out}


def draft_pass(**changes: Any) -> Line:
    parts = ("propose", "commit", "pass")
    rows = [
        {"path": path, "context": context, **{f"{p}_ms_{k}": 1.25 for p in parts for k in ("median", "min")}}
        for path in ("torch", "kernels")
        for context in (512, 2048)
    ]
    return {"settings": {"target": "toy", "layers": 2}, "results": rows, "provenance": provenance(), **changes}


def length_policies(**changes: Any) -> Line:
    share = {"tokens_per_sec": 99.0, "over_best_fixed": 0.99, "over_best_of_phases": 0.98, "policy_us": 20.5}
    row = {
        "trace": "chat, batch 1",
        "fixed_tokens_per_sec": [80.0, 100.0, 90.0],
        "best_fixed": 1,
        "best_of_phases_over_best_fixed": 1.0102,
        "policies": {"nightjar": share, "adaptive": {**share, "over_best_fixed": 0.9504}},
    }
    return {"settings": {"target": "toy", "seeds": 3}, "results": [row], "provenance": provenance(), **changes}


def perplexity(**changes: Any) -> Line:
    found = {"perplexity": {"ours": 12.34567, "llama_cpp": 12.35}, "per_cent_apart": 0.035, "texts": [{}, {}]}
    return {"model": "toy.gguf", **found, "provenance": provenance(), **changes}


def write(path: Path, *lines: Line) -> Path:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
