"""What a drafter's memory carries: a fact, then text that has nothing to do with it, then the fact's beginning again.

In: a target (default SmolLM2; `hyflash pull smollm2-135m` first), drafters, distances in tokens. Out: for each drafter
and distance the share of the fact's tokens that it drafts (the first token, and all of them in a row), with intervals
over texts; `--json`: one object with provenance. The texts are of our own words and drawn by `--seed`. What follows is
taken from the text itself, whatever the target would say, so this probes drafters, not the target; but features are
the target's, and may carry what its own attention has found. `chance` is the same with the fact left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hyflash import api, environment, hub
from hyflash.cli.main import calm_libraries
from hyflash.core import TargetOptions
from hyflash.drafters.base import Drafter
from hyflash.engine.replay import Recording, measure, record
from hyflash.errors import HyflashError, UserError
from hyflash.metrics import quantile

OWNERS = """Ada Bruno Clara Dmitri Elena Farid Greta Hugo Irene Jonas Kamal Lidia Marek Nadia Otto Priya"""
THINGS = """boat garden guitar lantern bicycle kettle camera ladder violin notebook tent compass"""
COLOURS = """green silver orange purple brown yellow crimson white black golden"""
PLACES = """harbour orchard library station attic market chapel workshop meadow cellar bakery tower"""
FILLER = (
    "The road was wet, and nobody was out so early.",
    "A train went by in the distance while the tea was getting cold.",
    "They talked about the weather and about what to cook in the evening.",
    "On the table there were three cups, a bread knife and a folded map.",
    "It had rained all night, but now the sky was clear.",
    "The children counted the birds on the roof and lost count twice.",
    "Somebody had left the gate open again.",
    "In the afternoon the shop was closed, so they walked back slowly.",
    "He read the letter once more and put it into his pocket.",
    "She laughed, because she had heard the story before.",
)
WORST_SHARE, BEST_SHARE = 0.025, 0.975
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt that ends where the fact is to be said again, and its tokens."""

    prompt: tuple[int, ...]
    fact: tuple[int, ...]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--target", default=hub.DEFAULT_TARGET)
    parser.add_argument("-d", "--drafter", action="append", help="may be given several times (default: the target's)")
    parser.add_argument("--distances", nargs="+", type=int, default=[64, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--texts", type=int, default=32, help="texts of each distance (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="auto, native or torch")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    found = parser.parse_args()
    if min(found.texts, *found.distances) < 1:
        parser.error("expected at least 1 text, and distances of at least 1 token")
    return found


def make_text(target: api.LoadedTarget, distance: int, rng: random.Random, *, told: bool) -> Text:
    """A fact, about `distance` tokens of other sentences, and the fact's beginning; without the fact if not `told`."""
    encode = target.tokenizer.encode
    start = f"The three words of {_one(OWNERS, rng)} are"
    fact = f" {_one(PLACES, rng)} {_one(COLOURS, rng)} {_one(THINGS, rng)}"
    before = encode("It was an ordinary day. " + (start + fact + "." if told else ""))
    filler: list[int] = []
    while len(filler) < distance:
        filler += encode(" " + rng.choice(FILLER), begins=False)
    again = encode("\n" + start, begins=False)
    return Text(tuple(before + filler[:distance] + again), tuple(encode(fact, begins=False)))


def recordings(target: api.LoadedTarget, drafters: Collection[Drafter], texts: list[Text]) -> list[Recording]:
    """The texts with what the drafters read of the target; one token more, so that all of the fact may be drafted."""
    end = target.tokenizer.encode(".", begins=False)[:1]
    taps = sorted({tap for drafter in drafters for tap in drafter.target_layer_ids})
    kv_layers = sorted({layer for drafter in drafters for layer in drafter.target_kv_layers})
    return [record(target.model, taps, text.prompt, [*text.fact, *end], kv_layers=kv_layers) for text in texts]


def score(drafter: Drafter, recorded: list[Recording], num_fact: list[int]) -> tuple[list[float], list[float]]:
    """Per text whether the first token was drafted, and the share of the fact that was drafted in a row."""
    most = drafter.max_draft_tokens
    results = measure(drafter, recorded, most)
    accepted = [result.rounds[0].num_accepted for result in results]
    first = [float(n > 0) for n in accepted]
    run = [min(n, size) / min(size, most) for n, size in zip(accepted, num_fact, strict=True)]
    return first, run


def interval(values: list[float]) -> dict[str, float]:
    """Mean and its bootstrap interval over texts."""
    rng = random.Random(0)
    means = [sum(rng.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES)]
    low, high = quantile(means, WORST_SHARE), quantile(means, BEST_SHARE)
    return {"mean": sum(values) / len(values), "low": low, "high": high}


def _loaded(name: str, target: api.LoadedTarget) -> Drafter:
    drafter = api.load_drafter(name, target)
    if drafter is None or drafter.recycles:
        raise UserError(f"{name}: expected a drafter, and one that can be replayed.")
    return drafter


def _one(words: str, rng: random.Random) -> str:
    return rng.choice(words.split())


def main() -> None:
    """Run the probe."""
    options = arguments()
    calm_libraries()
    target = api.load_target(options.target, TargetOptions(backend=options.backend, num_threads=options.threads))
    drafters = {name: _loaded(name, target) for name in options.drafter or [hub.default_drafter(options.target)]}
    rows: list[dict[str, Any]] = []
    for distance in options.distances:
        for told in (True, False):
            rng = random.Random(f"{options.seed} {distance}")
            texts = [make_text(target, distance, rng, told=told) for _ in range(options.texts)]
            recorded = recordings(target, drafters.values(), texts)
            for name, drafter in drafters.items():
                first, run = score(drafter, recorded, [len(text.fact) for text in texts])
                figures = {"first": interval(first), "in_a_row": interval(run)}
                rows.append({"drafter": name, "distance": distance, "told": told, **figures})
                said = "recall" if told else "chance"
                numbers = f"first token {figures['first']['mean']:.2f}, in a row {figures['in_a_row']['mean']:.2f}"
                print(f"{distance:>6} tokens  {said}  {name}: {numbers}", file=sys.stderr)
    if options.json:
        provenance = {**environment.provenance(), "argv": sys.argv}
        print(json.dumps({"settings": vars(options), "provenance": provenance, "rows": rows}))


if __name__ == "__main__":
    try:
        main()
    except HyflashError as err:
        sys.exit(f"error: {err}")
