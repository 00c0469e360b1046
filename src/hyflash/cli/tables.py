"""Tables for people on stdout, drawn with rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hyflash.cli.report import bytes_at, size
from hyflash.metrics import mean_over_domains


def print_rows(table: dict[str, Any]) -> None:
    """The results of a bench run."""
    console = _console()
    out = Table(title=f"target {table['target']}", title_justify="left")
    columns = ("drafter", "domain", "context", "tau", "95 %", "loop-free", "of requests", "by position")
    for name in (*columns, "tok/s", "speed-up", "TTFT", "state", "KV/token", "exact"):
        out.add_column(name, justify="left" if name in ("drafter", "domain", "by position") else "right")
    for row in table["results"]:
        out.add_row(
            row["drafter"],
            row["domain"],
            str(row["context"] or "-"),
            f"{row['tau']:.3f}",
            "{:.2f}-{:.2f}".format(*row["tau_interval"]),
            _number(row["tau_loop_free"], "{:.3f}"),
            f"{row['tau_mean_of_requests']:.3f}",
            " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"][:8]),
            _spread(row),
            _number(row["speedup"], "{:.2f}x"),
            _number(row["ttft_sec"], "{:.2f} s"),
            size(row["state_bytes"]),
            size(row["kv_bytes_per_token"]),
            {True: "passed", False: f"{len(row['forks'])} forks", None: "not checked"}[row["exact"]],
        )
    console.print(out)
    for line in _means(table["results"]):
        console.print(line)
    for name, row in {row["drafter"]: row for row in table["results"]}.items():
        found = max(one["measured_bytes"] for one in table["results"] if one["drafter"] == name)
        computed = ", ".join(bytes_at(int(context), count) for context, count in row["computed_bytes"].items())
        console.print(f"memory of a text, {name}: {computed}; most found here {size(found)}")
    for row in table["differences"]:
        low, high = row["interval"]
        console.print(
            f"{_place(row)}: {row['drafter']} - {row['against']} = "
            f"{row['tau_difference']:+.3f} tokens per round (95 %: {low:+.3f} to {high:+.3f})"
        )
    for row in table["results"]:
        for fork in row["forks"]:
            console.print(
                f"{row['drafter']} forks on {fork['prompt_id']} at token {fork['index']}, "
                f"top-1/top-2 margin {fork['margin']:.2g}"
            )
    for title, lines in table.get("against", {}).items():
        for line in lines:
            console.print(f"{title}: {line}")


def print_costs(table: dict[str, Any]) -> None:
    """Times of forwards by engine and width, one table a context, beside the floor and c(q)."""
    console = _console()
    console.print(
        f"target {table['target']}, {table['threads']} threads, "
        f"round trip between two {_number(table['pingpong_ns'], '{:.0f} ns')}, memory "
        f"{table['bandwidth_gb_per_sec']:.1f} GB/s, int8 {_number(table['int8_gmac_per_sec'], '{:.0f} GMAC/s')}, "
        f"float32 {_number(table['float32_gmac_per_sec'], '{:.0f} GMAC/s')} ({table['isa'] or 'no CPU kernels'})"
    )
    for one in table["engines"]:
        console.print(
            f"{one['engine']} {one['weights']}: {one['version']}; {one.get('build', '')}; best token as in the first "
            f"engine in {one['same_best_token']} of {one['rows']} rows, logits {one['logit_error']:.2%} apart"
        )
    for context in dict.fromkeys(row["context"] for row in table["results"]):
        out = Table(title=f"after {context} tokens", title_justify="left")
        for name in ("engine", "weights", "width", "ms", "best ms", "floor ms", "of floor", "c(q)", "ms per row"):
            out.add_column(name, justify="left" if name in ("engine", "weights") else "right")
        for row in table["results"]:
            if row["context"] == context:
                out.add_row(*_cost(row), end_section=row["width"] == max(r["width"] for r in table["results"]))
        console.print(out)
    for row in table["prefill"]:
        console.print(
            f"{row['engine']} {row['weights']}: a prompt of {row['tokens']} tokens at "
            f"{row['tokens_per_sec_median']:.0f} tokens/s (best {row['tokens_per_sec_best']:.0f})"
        )


def _cost(row: dict[str, Any]) -> tuple[str, ...]:
    ms, floor = row["ms_median"], row["floor_ms"]
    numbers = (f"{ms:.2f}", f"{row['ms_min']:.2f}", f"{floor:.2f}", f"{ms / floor:.2f}x", f"{row['c']:.2f}")
    return (row["engine"], row["weights"], str(row["width"]), *numbers, f"{ms / row['width']:.2f}")


def print_calibration(table: dict[str, Any]) -> None:
    """Every trial on the answers to choose by, the chosen one marked, and what the others say of it."""
    console = _console()
    if len(table["trials"]) > 1:
        out = Table(title="tokens per round on the answers to choose by", title_justify="left")
        names = list(table["options"])
        for name in (*names, "tau", "rounds", ""):
            out.add_column(name, justify="right")
        for trial in table["trials"]:
            values = [str(trial["options"][name]) for name in names]
            mark = "chosen" if trial["options"] == table["options"] else ""
            out.add_row(*values, f"{trial['tau']:.3f}", str(trial["num_rounds"]), mark)
        console.print(out)
        found, (low, high) = table["report"], table["report"]["interval"]
        console.print(
            f"on {found['num_prompts']} other answers: tau {found['tau']:.3f}, with the options given "
            f"{found['tau_given']:.3f}, {found['tau_difference']:+.3f} (95 %: {low:+.3f} to {high:+.3f})"
        )
    for name, value in table["confidence"].items():
        console.print(f"{name}: {value:.4g}")
    console.print(f"written to {table['out']}")


def print_drafters(entries: list[dict[str, Any]]) -> None:
    """The drafters and their memory at the embedded target's shape."""
    out = Table()
    for name in ("name", "trainable", "state", "KV/token", "what it is", "from"):
        out.add_column(name, justify="right" if name in ("state", "KV/token") else "left")
    for entry in entries:
        out.add_row(
            entry["name"],
            "yes" if entry["trainable"] else "no",
            size(entry["state_bytes"]),
            size(entry["kv_bytes_per_token"]),
            entry["summary"],
            entry["source"],
        )
    _console().print(out)


def _means(rows: list[dict[str, Any]]) -> list[str]:
    """Mean tau over domains for each drafter and context, where there are several domains."""
    groups: dict[tuple[str, int | None], list[float]] = {}
    for row in rows:
        groups.setdefault((row["drafter"], row["context"]), []).append(row["tau"])
    return [
        f"{_place({'domain': f'mean of {len(taus)} domains', 'context': context})}: {drafter} tau "
        f"{mean_over_domains(taus):.3f}"
        for (drafter, context), taus in groups.items()
        if len(taus) > 1
    ]


def _console() -> Console:
    """On a pipe a table must not be squeezed to 80 columns."""
    console = Console(soft_wrap=False, highlight=False, markup=False)
    return console if console.is_terminal else Console(width=200, highlight=False, markup=False)


def _place(row: dict[str, Any]) -> str:
    return f"{row['domain']} at {row['context']} tokens" if row["context"] else str(row["domain"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _spread(row: dict[str, Any]) -> str:
    if row["tokens_per_sec"] is None:
        return "-"
    return f"{row['tokens_per_sec']:.1f} ({row['tokens_per_sec_p10']:.1f}-{row['tokens_per_sec_p90']:.1f})"
