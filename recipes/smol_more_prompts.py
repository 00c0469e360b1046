"""More training prompts beside those of `smol_prompts.py`: `python recipes/smol_more_prompts.py DATA_DIR OUT.jsonl`.

In: the same folder, with svamp, flan_cot (strategyqa), nq_open (dev) and spec_bench beside. Out: one chat prompt a
line, in the same three domains, about twice as many: the rest of GSM8K's training half, functions from all of the
standard library, more topics. Prompts of the first set and of Spec-Bench are left out.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from pathlib import Path

import smol_prompts as first

from hyflash.data.disk import write_atomic

TOPICS = """
tides; origami; the Black Death; compost; electric guitars; the human brain; opera; learning Mandarin; balconies; the
Arctic; salary talks; deforestation; card tricks; ancient Egypt; batteries; school lunches; travelling in Peru; writing
clearly; mammoths; inflation; stretching; clouds; freelancing; Greek tragedy; antibiotics; role-playing games; Mars
rovers; credit cards; watercolours; search engines; coral reefs; dreams; parrots; railways; bread and cheese; tunnels;
geysers; street art; triathlons; email; elections; ants; silent films; moving house; satellites; allergies; tea;
plastic; haiku; the spice trade; drones; plumbing; loneliness; icebergs; crystals; family shops; deserts; newspapers;
carnivals; nuclear power; fairy tales; museums; hurricanes; puzzles; kindergarten; the World Cup; lighthouses; canals;
forgetting; calendars; typewriters
"""


def chat(data: Path, rng: random.Random) -> list[str]:
    """Every template with new topics, and questions of StrategyQA and NQ-open."""
    topics = " ".join(TOPICS.split()).split("; ")
    pairs = [(template, topic) for template in first.TEMPLATES.strip().split("\n") for topic in topics]
    out = [t.format(topic) for t, topic in rng.sample(pairs, 1500)]
    asked = [line.split("\t")[0] for line in first._lines(data, "flan_cot/strategyqa_train.tsv")]
    out += [f"{question} Explain your answer." for question in rng.sample(asked, 500)]
    asked = [json.loads(line)["question"] for line in first._lines(data, "nq_open/NQ-open.dev.jsonl")]
    return out + [question[0].upper() + question[1:] + "?" for question in rng.sample(asked, 500)]


def code(data: Path, rng: random.Random) -> list[str]:
    """Functions of the whole standard library to complete, explain, document or test."""
    functions = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(file.relative_to(root).parts):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                body = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
                doc = ast.get_docstring(node)
                if 150 < len(body) < 1200:
                    functions.append((node.name, body, doc))
    out = []
    for name, body, doc in rng.sample(functions, min(2500, len(functions))):
        asked = rng.choice(("explain", "document", "test", "write", "complete"))
        if asked == "write" and doc and len(doc) > 30:
            out.append(f"Write a Python function `{name}` that does the following: {doc}")
        elif asked == "complete":
            lines = body.split("\n")
            out.append("Complete this Python function:\n\n" + "\n".join(lines[: max(2, len(lines) // 2)]))
        elif asked == "document":
            out.append(f"Write a docstring for this Python function:\n\n{body}")
        elif asked == "test":
            out.append(f"Write a few unit tests for this Python function:\n\n{body}")
        else:
            out.append(f"Explain what this Python function does:\n\n{body}")
    return out


def maths(data: Path, rng: random.Random) -> list[str]:
    """Problems of GSM8K's training half that the first set may lack, and of SVAMP."""
    rows = [json.loads(x)["question"] for x in first._lines(data, "gsm8k/train.jsonl")]
    found = json.loads((data / "svamp/SVAMP.json").read_text(encoding="utf-8"))
    return rng.sample(rows, 3500) + [
        row["Body"].rstrip(". ") + ". " + row["Question"] for row in rng.sample(found, 300)
    ]


def main(data: Path, out: Path) -> None:
    """Write all prompts that neither the first set nor Spec-Bench has, shuffled."""
    rng = random.Random(0)
    known = {text for make in (first.chat, first.code, first.maths) for text in make(data, rng)}
    asked = map(json.loads, first._lines(data, "spec_bench/question.jsonl"))  # some of its questions are NQ-open's
    evaluated = {_plain(turn) for row in asked for turn in row["turns"]}
    rng = random.Random(1)
    rows = {
        text: {"messages": [{"role": "user", "content": text}], "domain": make.__name__}
        for make in (chat, code, maths)
        for text in make(data, rng)
        if text not in known and _plain(text) not in evaluated
    }
    mixed = list(rows.values())
    rng.shuffle(mixed)
    write_atomic(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in mixed).encode())
    print(f"{len(mixed)} prompts -> {out}")  # noqa: T201


def _plain(text: str) -> str:
    return " ".join(text.casefold().replace("?", " ").split())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as err:
        sys.exit(f"error: {err.filename}: {err.strerror}; the head of this script says which files it reads.")
