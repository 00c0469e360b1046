"""Write the training prompts of the shipped drafter: `python recipes/smol_prompts.py DATA_DIR OUT.jsonl`.

In: a folder with gsm8k/train.jsonl, mbpp/mbpp.jsonl (ids 1-10 and 511-974), open_assistant and self_instruct as their
authors publish them. Out: one chat prompt a line, in three domains: maths, code, chat. Code prompts also come from the
running Python's own standard library (complete or explain a function), chat prompts from topics and templates below.
Evaluation sets are never read.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from pathlib import Path

from hyflash.data.disk import write_atomic

TOPICS = """
black holes; the French Revolution; sourdough bread; time management; electric cars; the human heart; jazz
music; learning Spanish; small gardens; the Great Barrier Reef; job interviews; climate change; chess openings;
the Roman Empire; solar panels; healthy breakfasts; travelling in Japan; public speaking; dinosaurs; the stock
market; yoga for beginners; the water cycle; remote work; Shakespeare's plays; vaccines; board games; the Moon
landing; saving money; photography; artificial intelligence; the Amazon rainforest; sleep; cats and dogs; the
Industrial Revolution; vegetarian cooking; bridges; volcanoes; modern art; running a marathon; the internet;
democracy; honey bees; film noir; a first apartment; space tourism; the immune system; coffee; recycling;
poetry; the Silk Road; robots in factories; bicycle repair; friendship; glaciers; the periodic table; small
businesses; mountains; social media; tea ceremonies; wind energy; mythology; libraries; earthquakes; video
games; teaching children to read; the Olympic Games; old maps; rivers; memory; clocks; the printing press
"""

TEMPLATES = """
Explain {} to a ten year old.
Write a short blog post about {}.
What are the main advantages and disadvantages of {}?
Give me five tips about {}.
Write a short story that involves {}.
Summarize the history of {} in a few paragraphs.
What are common misconceptions about {}?
Compare {} with something similar and explain the differences.
Write an email to a friend about {}.
Create a one-week plan to learn more about {}.
Write a poem about {}.
What questions would you ask an expert on {}?
Describe {} step by step.
Why does {} matter today?
Draft an outline for a talk about {}.
List ten interesting facts about {}.
Write a dialogue between two people about {}.
How would you describe {} to someone who has never heard of it?
What does the future of {} look like?
Write a persuasive paragraph about {}.
What should a beginner know about {}?
Write a product review related to {}.
Imagine you are a journalist and write a news report about {}.
Give pros and cons of {} in a table.
"""


def chat(data: Path, rng: random.Random) -> list[str]:
    """Open questions: user-written ones and every template with random topics."""
    files = ("open_assistant/en_100_text.jsonl", "open_assistant/prompt_lottery_en_250_text.jsonl")
    out = [json.loads(line) for file in files for line in _lines(data, file)]
    for name in ("seed_tasks", "user_oriented_instructions"):
        for row in map(json.loads, _lines(data, f"self_instruct/{name}.jsonl")):
            given = row["instances"][0]["input"]
            out.append(row["instruction"] + (f"\n\n{given}" if given else ""))
    topics = " ".join(TOPICS.split()).split("; ")
    pairs = [(template, topic) for template in TEMPLATES.strip().split("\n") for topic in topics]
    return out + [t.format(topic) for t, topic in rng.sample(pairs, 1400)]


def code(data: Path, rng: random.Random) -> list[str]:
    """MBPP's training tasks, and functions of the standard library to complete or explain."""
    out = []
    for row in map(json.loads, _lines(data, "mbpp/mbpp.jsonl")):
        if row["task_id"] <= 10 or row["task_id"] >= 511:
            out.append(row["text"] + f" Your code should pass this test: {row['test_list'][0]}")
    functions = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)):
            doc = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
            if doc and 40 < len(doc) < 600 and not node.name.startswith("__"):
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                head = "\n".join(lines[: node.body[0].end_lineno - node.lineno + 1])
                functions.append((head, "\n".join(lines)))
    for head, body in rng.sample(functions, min(1000, len(functions))):
        if len(body) < 1500 and rng.random() < 0.25:
            out.append(f"Explain what this Python function does:\n\n{body}")
        else:
            out.append(head if rng.random() < 0.6 else f"Complete this Python function:\n\n{head}")
    return out


def maths(data: Path, rng: random.Random) -> list[str]:
    """Grade-school problems of GSM8K's training half."""
    rows = [json.loads(x)["question"] for x in _lines(data, "gsm8k/train.jsonl")]
    return rng.sample(rows, 1600)


def _lines(data: Path, name: str) -> list[str]:
    return [x for x in (data / name).read_text(encoding="utf-8").split("\n") if x.strip()]


def main(data: Path, out: Path) -> None:
    """Write all prompts, shuffled, so that any prefix of the file is a fair mix."""
    rng = random.Random(0)
    rows = [
        {"messages": [{"role": "user", "content": text}], "domain": make.__name__}
        for make in (chat, code, maths)
        for text in make(data, rng)
    ]
    rng.shuffle(rows)
    write_atomic(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())
    print(f"{len(rows)} prompts -> {out}")  # noqa: T201


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as err:
        sys.exit(f"error: {err.filename}: {err.strerror}; the head of this script says which files it reads.")
