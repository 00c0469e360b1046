"""What a benchmark decodes: prompts of one domain, as token ids, natural or stretched to a context length.

In: a prompt file, a dataset name or "demo" (twelve prompts of ours in three domains). Out: `Workload`s, one per
domain and context. Everything follows from the files and the seed, so a rerun decodes the same tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyflash.data.prompts import Prompt, load_prompts
from hyflash.errors import UserError
from hyflash.text import Tokenizer

DEMO = "demo"
_DEMO = {
    "chat": (
        "Why is the sky blue, and why is it red in the evening?",
        "Explain to a ten-year-old how a bicycle stays upright.",
        "Give me five tips for learning to cook at home on a small budget.",
        "Write a short letter to a neighbour whose dog barks at night.",
    ),
    "math": (
        "A box holds 12 eggs. A farmer sells 7 boxes and 5 single eggs. How many eggs are that? Think step by step.",
        "A train leaves at 9:40 and arrives at 12:15. How long does the journey take?",
        "Anna has three times as many marbles as Ben. Together they have 48. How many does each have?",
        "What is 15% of 240? Show how you get there.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number without recursion.",
        "Write a Python function that counts how often each word occurs in a text file.",
        "Explain what this does: sorted(d.items(), key=lambda kv: -kv[1])[:3]",
        "Write a Python class for a stack with push, pop and peek, with docstrings.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of one domain; `context` is the prompt length in tokens they were stretched to, None as they are."""

    domain: str
    context: int | None
    prompts: tuple[tuple[int, ...], ...]
    ids: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of the token ids: equal only for equal work."""
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()


def read(sources: Sequence[str], *, limit: int | None, seed: int = 0) -> dict[str, list[Prompt]]:
    """Prompts by domain, in file order, at most `limit` of each. Raises UserError for what cannot be read.

    With a limit below the size of a domain, a sample drawn by `seed` is taken, in file order; seed 0 is the first ones.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected a whole number of at least 1.")
    if twice := [source for i, source in enumerate(sources) if source in sources[:i]]:
        raise UserError(f"prompts {twice[0]} are named twice; name each source once.")
    domains: dict[str, list[Prompt]] = {}
    for source in sources:
        for prompt in _demo() if source == DEMO else load_prompts([source]).prompts:
            domains.setdefault(prompt.domain, []).append(prompt)
    return {domain: _sample(prompts, limit, seed) for domain, prompts in domains.items()}


def natural(domain: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, thinking: bool | None = None) -> Workload:
    """The prompts as they are, through the chat template where the model has one."""
    return Workload(
        domain=domain,
        context=None,
        prompts=tuple(tuple(_encode(p, tokenizer, thinking)) for p in prompts),
        ids=tuple(p.id for p in prompts),
    )


def in_turns(domains: Mapping[str, Sequence[Prompt]], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Natural prompts of all domains: the first of each, then the second of each, and so on."""
    kinds = [natural(domain, prompts, tokenizer).prompts for domain, prompts in domains.items()]
    return [ids[i] for i in range(max(map(len, kinds))) for ids in kinds if i < len(ids)]


def stretched(
    domain: str,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    context: int,
    seed: int = 0,
    thinking: bool | None = None,
) -> Workload:
    """Each prompt made `context` tokens long by text of the other prompts before its own.

    The filler stands at the start of the last user turn; a prompt that is longer loses the start of that turn.
    Raises UserError when the template alone does not fit.
    """
    texts = [p.messages[-1]["content"] for p in prompts]
    out = []
    for i, prompt in enumerate(prompts):
        ids = _encode(prompt, tokenizer, thinking)
        head = _head_length(prompt, tokenizer, thinking)
        missing = context - len(ids)
        if context <= head + 1:
            raise UserError(f"context is {context} tokens; the chat template alone takes {head}. Ask for more.")
        if missing > 0:
            filler = _filler(texts, i, tokenizer, num_tokens=missing, seed=seed)
            ids = [*ids[:head], *filler, *ids[head:]]
        elif missing < 0:
            ids = [*ids[:head], *ids[head - missing :]]
        out.append(tuple(ids))
    return Workload(domain=domain, context=context, prompts=tuple(out), ids=tuple(p.id for p in prompts))


def _demo() -> list[Prompt]:
    return [
        Prompt(id=f"demo-{domain}-{i}", messages=({"role": "user", "content": text},), domain=domain)
        for domain, texts in _DEMO.items()
        for i, text in enumerate(texts)
    ]


def _sample(prompts: list[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    if seed == 0:
        return prompts[:limit]
    return [prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), limit))]


def _encode(prompt: Prompt, tokenizer: Tokenizer, thinking: bool | None) -> list[int]:
    if tokenizer.has_template:
        return tokenizer.chat(prompt.messages, thinking)
    return tokenizer.encode("\n\n".join(m["content"] for m in prompt.messages))


def _head_length(prompt: Prompt, tokenizer: Tokenizer, thinking: bool | None) -> int:
    """Tokens before the last user turn's own text: what two different texts in its place have in common."""
    if not tokenizer.has_template:
        return len(tokenizer.encode(""))
    first, second = (
        tokenizer.chat([*prompt.messages[:-1], {"role": "user", "content": text}], thinking) for text in ("A", "7")
    )
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def _filler(texts: Sequence[str], own: int, tokenizer: Tokenizer, *, num_tokens: int, seed: int) -> list[int]:
    """`num_tokens` tokens of the other prompts' texts in an order drawn by (seed, own index), repeated as needed."""
    order = [i for i in range(len(texts)) if i != own] or [own]
    random.Random(f"{seed}:{own}").shuffle(order)
    pool: list[int] = []
    for i in order:
        pool += tokenizer.encode(texts[i] + "\n\n", begins=False)
        if len(pool) >= num_tokens:
            break
    return (pool * (num_tokens // len(pool) + 1))[:num_tokens]
