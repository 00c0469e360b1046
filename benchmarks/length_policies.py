"""How much the length policies lose against the best fixed draft length: recorded texts are replayed.

In: result files of this project: `length_traces.py` (how many drafts would be accepted at each place of real answers),
`hyflash bench --costs` (milliseconds of a forward by width and context) and `draft_pass.py --json` with few and with 64
committed tokens (drafting, and bringing a state up). Out: a line a trace (`--json`: one object with provenance): tokens
per second of every fixed length, and of each policy against the best of them and against the best of each phase. All
policies meet the same texts. Rounds take the fastest time measured for their width plus exponential noise, whose mean
makes the median that was measured; rows of a batch count as rows of one forward, and as drafted one after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyflash import environment
from hyflash.bench.costs import WIDTHS
from hyflash.drafters.late import LATE_PIECES
from hyflash.engine.length import AdaptiveLength, FixedLength, LengthPolicy
from hyflash.engine.nightjar import Arms, NightjarLength
from hyflash.errors import UserError

SAMPLE_TOKENS = 10_000
"""Text of a row by which the best length of a phase is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the simulation knows of a machine and a drafter."""

    target: str
    drafter: str
    accepted: Mapping[str, Sequence[Sequence[int]]]
    """Domain -> texts -> how many drafts would be accepted at each place."""
    num_arms: int
    """Longest draft of the record."""
    forward_ms: Mapping[int, Mapping[int, float]]
    """Context -> width -> fastest time."""
    noise: float
    """Mean of what other work adds, as a share."""
    draft_ms: float
    """Of one row."""
    catch_up_ms: float
    """Commit of `LATE_PIECES` tokens that waited, of one row."""

    def forward(self, context: int, width: int) -> float:
        """Milliseconds, linear between and beyond the measured widths."""
        known = self.forward_ms[context]
        widths = sorted(known)
        at = next((i for i in range(1, len(widths)) if width <= widths[i]), len(widths) - 1)
        low, high = widths[at - 1], widths[at]
        return known[low] + (known[high] - known[low]) * (width - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a trace in which nothing changes."""

    domain: str
    context: int
    num_tokens: int
    """Of all rows together."""
    num_rows: int = 1
    busy: float = 1.0
    """What rows of a forward beyond the first cost, against the measured."""


class Trace:
    """Phases with their texts, in an order of its own for each row, again and again."""

    def __init__(self, phases: Sequence[Phase], measured: Measured, seed: int) -> None:
        self.phases, self.measured, self.seed = phases, measured, seed
        rng = random.Random(seed)
        self.texts = [[_shuffled(measured.accepted[p.domain], rng) for _ in range(p.num_rows)] for p in phases]


def _shuffled(texts: Sequence[Sequence[int]], rng: random.Random) -> list[Sequence[int]]:
    return rng.sample(list(texts), len(texts))


@dataclass(slots=True)
class Run:
    """What a policy made of a trace."""

    ms: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    policy_sec: float = 0.0
    """Of the policy's own work."""


def play(policy: LengthPolicy, trace: Trace) -> Run:
    """Rounds of the engine, as far as lengths and times go."""
    run, rng, waiting = Run(), random.Random(trace.seed), 0
    for phase, texts in zip(trace.phases, trace.texts, strict=True):
        stats = [policy.new_stats() for _ in texts]
        places, end = [(0, 0)] * len(stats), run.num_tokens + phase.num_tokens  # of the rows: text, token of it
        while run.num_tokens < end:
            began = time.perf_counter()
            limit = policy.begin_round(num_rows=phase.num_rows, context_tokens=phase.context)
            asked = [policy.choose(s, most=limit, num_rows=phase.num_rows) if limit else 0 for s in stats]
            for s, length in zip(stats, asked, strict=True):
                if length:
                    policy.hears(s, num_asked=length, num_drafted=length)
            run.policy_sec += time.perf_counter() - began
            draft_ms, verify_ms, late_ms, waiting = _round_ms(trace.measured, phase, asked, waiting, rng)
            run.ms += draft_ms + verify_ms + late_ms
            run.num_rounds += 1
            hits = [min(n, row[i][at]) for n, row, (i, at) in zip(asked, texts, places, strict=True)]
            began = time.perf_counter()
            for s, length, right in zip(stats, asked, hits, strict=True):
                s.observe(length, right)
            policy.observe_times(
                draft_sec=draft_ms / 1e3,
                verify_sec=verify_ms / 1e3,
                width=phase.num_rows + sum(asked),
                num_rows=phase.num_rows,
            )
            run.policy_sec += time.perf_counter() - began
            run.num_tokens += sum(hits) + phase.num_rows
            for b, (right, (i, at)) in enumerate(zip(hits, places, strict=True)):
                places[b] = (i, at + right + 1)
                if places[b][1] >= len(texts[b][i]):
                    places[b], stats[b] = ((i + 1) % len(texts[b]), 0), policy.new_stats()
    return run


def _round_ms(
    measured: Measured, phase: Phase, asked: Sequence[int], waiting: int, rng: random.Random
) -> tuple[float, float, float, int]:
    """Milliseconds of drafting, of the forward and of late commits in a round without drafts; rounds that now wait."""
    one = measured.forward(phase.context, 1)
    forward = one + phase.busy * (measured.forward(phase.context, len(asked) + sum(asked)) - one)
    forward *= 1 + rng.expovariate(1 / measured.noise)
    drafting = sum(length > 0 for length in asked)
    behind = phase.num_rows * measured.catch_up_ms * waiting / LATE_PIECES
    if drafting:
        return drafting * measured.draft_ms * (1 + rng.expovariate(1 / measured.noise)) + behind, forward, 0.0, 0
    if waiting + 1 < LATE_PIECES:
        return 0.0, forward, 0.0, waiting + 1
    return 0.0, forward, behind, 0


# --------------------------------------------------------------------------------------------- traces


def traces(measured: Measured, *, num_tokens: int, busy: float) -> dict[str, list[Phase]]:
    """Stationary traces by domain, batch and context, and changing ones; lengths in tokens of one row."""
    domains, contexts = list(measured.accepted), sorted(measured.forward_ms)
    short, long = contexts[0], contexts[-1]
    out: dict[str, list[Phase]] = {}
    for domain in domains:
        for rows in (1, 4, 16):
            size = num_tokens * (4 if rows > 1 else 1)
            out[f"{domain}, batch {rows}"] = [Phase(domain=domain, context=short, num_tokens=size, num_rows=rows)]
    out[f"{domains[0]}, context {long}"] = [Phase(domain=domains[0], context=long, num_tokens=num_tokens)]

    def changing(num_phases: int, phase: Callable[[int], Phase]) -> list[Phase]:
        share = num_tokens // num_phases
        made = [phase(i) for i in range(num_phases)]
        return [replace(p, num_tokens=share * p.num_rows) for p in made]

    def plain(i: int) -> Phase:
        return Phase(domain=domains[i % len(domains)], context=short, num_tokens=0)

    out["changing domain"] = changing(12, plain)
    out["changing batch"] = changing(12, lambda i: replace(plain(0), num_rows=(1, 8, 2, 16)[i % 4]))
    out["changing context"] = changing(12, lambda i: replace(plain(0), context=contexts[i % len(contexts)]))
    out["changing costs"] = changing(12, lambda i: replace(plain(0), busy=(1.0, busy)[i % 2]))
    out["changing all"] = changing(
        24,
        lambda i: replace(
            plain(i), num_rows=(1, 8, 2, 16)[i // 2 % 4], context=contexts[i // 3 % 2], busy=(1.0, busy)[i // 6 % 2]
        ),
    )
    return out


def measure(
    phases: Sequence[Phase],
    measured: Measured,
    make: Mapping[str, Callable[[int], LengthPolicy]],
    seeds: Sequence[int],
    known: dict[Phase, float],
) -> dict[str, Any]:
    """One result: tokens per second, means over seeds, and shares of the best fixed length."""
    lengths = range(measured.num_arms + 1)
    fixed, best_of_phases = [0.0 for _ in lengths], _best_of_phases(phases, measured, known)
    speeds, micros = dict.fromkeys(make, 0.0), dict.fromkeys(make, 0.0)
    for seed in seeds:
        trace = Trace(phases, measured, seed)
        for length in lengths:
            fixed[length] += _speed(play(FixedLength(length), trace)) / len(seeds)
        for name, policy in make.items():
            run = play(policy(seed), trace)
            speeds[name] += _speed(run) / len(seeds)
            micros[name] += 1e6 * run.policy_sec / run.num_rounds / len(seeds)
    best = max(fixed)
    return {
        "fixed_tokens_per_sec": [round(speed, 3) for speed in fixed],
        "best_fixed": fixed.index(best),
        "best_of_phases_over_best_fixed": round(best_of_phases / best, 4),
        "policies": {
            name: {
                "tokens_per_sec": round(speed, 3),
                "over_best_fixed": round(speed / best, 4),
                "over_best_of_phases": round(speed / best_of_phases, 4),
                "policy_us": round(micros[name], 1),
            }
            for name, speed in speeds.items()
        },
    }


def _speed(run: Run) -> float:
    return 1e3 * run.num_tokens / run.ms


def _best_of_phases(phases: Sequence[Phase], measured: Measured, known: dict[Phase, float]) -> float:
    """Tokens per second if each phase had the fixed length that is best in it, by a longer text of its kind."""
    ms = 0.0
    for phase in phases:
        kind = replace(phase, num_tokens=SAMPLE_TOKENS * phase.num_rows)
        if kind not in known:
            trace = Trace([kind], measured, seed=1_000_000)
            known[kind] = max(_speed(play(FixedLength(n), trace)) for n in range(measured.num_arms + 1))
        ms += phase.num_tokens / known[kind]
    return sum(phase.num_tokens for phase in phases) / ms


# ---------------------------------------------------------------------------------------------- inputs


def read(traces: Path, costs: Path, draft: Path, catch_up: Path, *, drafter: str | None) -> Measured:
    """The measured numbers. Raises UserError for files that do not hold them."""
    recorded, timed = _lines(traces), _lines(costs)[-1]
    names = [line["settings"]["drafter"] for line in recorded]
    if drafter is not None and drafter not in names:
        raise UserError(f"{traces}: has no drafter {drafter!r}; expected one of {', '.join(names)}.")
    line = recorded[names.index(drafter) if drafter is not None else 0]
    ours = [row for row in timed["results"] if row["engine"].startswith("hyflash")]
    forward: dict[int, dict[int, float]] = {}
    for row in ours:
        forward.setdefault(row["context"], {})[row["width"]] = row["ms_min"]
    shortest = min(forward)
    spread = statistics.median(row["ms_median"] / row["ms_min"] - 1 for row in ours if row["context"] == shortest)
    few, many = _kernels(draft), _kernels(catch_up)
    return Measured(
        target=line["settings"]["target"],
        drafter=line["settings"]["drafter"],
        accepted={row["domain"]: [text for text in row["accepted"] if text] for row in line["results"]},
        num_arms=line["settings"]["num_draft_tokens"],
        forward_ms=forward,
        noise=max(spread / math.log(2), 1e-3),
        draft_ms=few["pass_ms_min"],
        catch_up_ms=many["commit_ms_min"],
    )


def _kernels(path: Path) -> Mapping[str, float]:
    found = [row for row in _lines(path)[-1]["results"] if row["path"] == "kernels"]
    if not found:
        raise UserError(f"{path}: has no draft pass on the kernels; expected the object of draft_pass.py --json.")
    return dict(found[0])


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as err:
        raise UserError(f"{path}: cannot be read as JSON lines ({err}); expected a results file.") from err
    if not lines or not all(isinstance(line, dict) and "results" in line for line in lines):
        raise UserError(f"{path}: holds no results; expected a results file of this project.")
    return lines


class PlainBandit(NightjarLength):
    """The paper's planner without ours: plain means per context and arm, tries of any arm for a whole bin."""

    MOST_ROUNDS = TRY_ROUNDS = 1 << 30
    WORTH_TRYING = math.inf

    def __init__(self, costs: Mapping[int, float], *, max_draft_tokens: int, one_sec: float, seed: int) -> None:
        super().__init__(costs, max_draft_tokens=max_draft_tokens, one_sec=one_sec, seed=seed)
        self._costs.MOST_SINCE_PLAIN = 1 << 30
        self._seen: dict[Arms, list[list[float]]] = {}
        self._num_tokens = 0  # of this round

    def begin_round(self, *, num_rows: int, context_tokens: int) -> int:
        """As usual."""
        self._num_tokens = 0
        return super().begin_round(num_rows=num_rows, context_tokens=context_tokens)

    def observe_row(self, num_asked: int, num_accepted: int) -> None:
        """Count what was committed."""
        self._num_tokens += num_accepted + 1

    def learn(self, arms: Arms, arm: int, sec: float, num_rows: int) -> None:
        """Sums for the means."""
        seen = self._seen.setdefault(arms, [[0.0, 0.0] for _ in range(self.max_draft_tokens + 1)])[arm]
        seen[0] += sec
        seen[1] += self._num_tokens

    def losses(self, arms: Arms, num_rows: int) -> list[float]:
        """Infinite for arms that were never played, but for the first of all."""
        seen = self._seen.get(arms)
        means = [math.inf] * (self.max_draft_tokens + 1)
        if seen is not None:
            means = [sec / tokens if tokens else math.inf for sec, tokens in seen]
        switch = self._switch_sec if self._was_off else 0.0
        return [loss + (switch / arm if arm else 0.0) for arm, loss in enumerate(means)]


def policies(measured: Measured) -> dict[str, Callable[[int], LengthPolicy]]:
    """The policies by name, each made for a seed, with the table that the engine measures at first run."""
    shortest = measured.forward_ms[min(measured.forward_ms)]
    table = {width: ms / shortest[1] for width, ms in shortest.items() if width <= max(WIDTHS)}
    most, one_sec = measured.num_arms, shortest[1] / 1e3
    return {
        "nightjar": lambda seed: NightjarLength(table, max_draft_tokens=most, one_sec=one_sec, seed=seed),
        "plain bandit": lambda seed: PlainBandit(table, max_draft_tokens=most, one_sec=one_sec, seed=seed),
        "adaptive": lambda _seed: AdaptiveLength(table, max_draft_tokens=most, one_sec=one_sec),
    }


RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=RESULTS.parent / "traces" / "smollm2-135m.jsonl")
    parser.add_argument("--drafter", default=None, help="of the traces (default: the first)")
    parser.add_argument("--costs", type=Path, default=RESULTS / "length-costs.jsonl")
    parser.add_argument("--draft", type=Path, default=RESULTS / "length-draft-pass-2.jsonl")
    parser.add_argument("--catch-up", type=Path, default=RESULTS / "length-draft-pass-64.jsonl")
    parser.add_argument("--tokens", type=int, default=12_000, help="tokens of a trace, per row where it changes")
    parser.add_argument("--busy", type=float, default=3.0, help="an assumption: what rows cost while costs are up")
    parser.add_argument("--seeds", type=int, default=3, help="texts of each trace")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default=None, help="traces whose name holds this")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    options = arguments()
    try:
        measured = read(options.traces, options.costs, options.draft, options.catch_up, drafter=options.drafter)
    except UserError as err:
        print(err, file=sys.stderr)
        return 1
    results, known = [], dict[Phase, float]()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for name, phases in traces(measured, num_tokens=options.tokens, busy=options.busy).items():
        if options.only and options.only not in name:
            continue
        found = measure(phases, measured, policies(measured), seeds, known)
        results.append({"trace": name, **found})
        shares = "  ".join(f"{p} {100 * r['over_best_fixed'] - 100:+.1f} %" for p, r in found["policies"].items())
        line = f"{name:24} best fixed {found['best_fixed']:2}, of phases {found['best_of_phases_over_best_fixed']:.3f}"
        print(f"{line}: {shares}", file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
        settings |= {"target": measured.target, "drafter": measured.drafter}
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"settings": settings, "provenance": provenance, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
