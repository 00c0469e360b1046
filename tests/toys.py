"""Toy target and scripted drafters for engine tests: exact, instant, no model.

`ToyTarget(rows)` maps the last token to a row of logits, so its text is a walk in a table. `ScriptDrafter` proposes
what a function of the committed text says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyflash.core import Commit, Draft, DraftCost, DraftRequest, Proposal, Rows, TargetHooks, TargetInfo, TargetOutput
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.targets.base import Exactness, Target


def toy_info(vocab_size: int = 32, *, max_context: int = 512, eos: tuple[int, ...] = (2,)) -> TargetInfo:
    return TargetInfo(
        name="toy", fingerprint="toy", family="toy", vocab_size=vocab_size, hidden_size=vocab_size,
        intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4, rms_norm_eps=1e-6,
        max_context=max_context, eos_token_ids=eos, dtype="float32",
    )  # fmt: skip


def weightless_hooks() -> TargetHooks:
    """Of a target whose weights no drafter may touch."""

    def none(ids: Tensor) -> Tensor:
        raise AssertionError("this drafter uses no weights of the target")

    info = replace(toy_info(100, max_context=4096, eos=(0,)), hidden_size=8, num_layers=2)
    return TargetHooks(info=info, embed=none, head=none, head_rows=none)


class ToyTarget(Target):
    """Logits depend on the last token only: `table` (V, V). Features are the one-hot of the token, (N, 1, V)."""

    def __init__(self, table: Tensor, *, max_context: int = 512, eos: tuple[int, ...] = (2,)) -> None:
        self.table = table
        self.info = toy_info(table.shape[0], max_context=max_context, eos=eos)
        self.exactness: Exactness = "invariant"
        self.epsilon = 0.0
        self.cached: dict[int, list[int]] = {}
        self.forwards: list[tuple[int, ...]] = []
        self.noise: Callable[[int, int], float] = lambda _width, _position: 0.0
        self._next = 0

    @classmethod
    def chain(cls, chain: Sequence[int], vocab_size: int = 32, **options: Any) -> ToyTarget:
        """The text that follows `chain` wherever it is; other tokens lead to their successor."""
        table = torch.full((vocab_size, vocab_size), -4.0)
        for token in range(vocab_size):
            table[token, (token + 1) % vocab_size] = 4.0
        for token, following in itertools.pairwise(chain):
            table[token] = -4.0
            table[token, following] = 4.0
        return cls(table, **options)

    def open(self) -> int:
        self._next += 1
        self.cached[self._next] = []
        return self._next

    def close(self, seq: int) -> None:
        del self.cached[seq]

    def length(self, seq: int) -> int:
        return len(self.cached[seq])

    def truncate(self, seq: int, length: int) -> None:
        assert 0 <= length <= len(self.cached[seq])
        del self.cached[seq][length:]

    def forward(self, rows: Rows) -> TargetOutput:
        self.forwards.append(rows.lengths)
        logits, first, width = [], 0, len(rows.tokens)
        for seq, n in zip(rows.seqs, rows.lengths, strict=True):
            for token in rows.tokens[first : first + n].tolist():
                row = self.table[token].clone()
                row[0] += self.noise(width, len(self.cached[seq]))
                self.cached[seq].append(token)
                logits.append(row)
            assert len(self.cached[seq]) <= self.info.max_context
            first += n
        features = torch.nn.functional.one_hot(rows.tokens, self.info.vocab_size).float()[:, None]
        return TargetOutput(
            logits=None if rows.logits == "none" else torch.stack(logits), features=features if rows.taps else None
        )

    def hooks(self) -> TargetHooks:
        eye = torch.eye(self.info.vocab_size)
        return TargetHooks(info=self.info, embed=lambda i: eye[i], head=lambda h: h, head_rows=lambda i: eye[i])

    def kv_bytes(self) -> int:
        return sum(map(len, self.cached.values()))


class ScriptState(State):
    def __init__(self, num_rows: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]

    def reset(self, row: int) -> None:
        self.texts[row] = []

    def nbytes(self, row: int) -> int:
        return 8 * len(self.texts[row])

    def snapshot(self, row: int) -> dict[str, Any]:
        return {"text": list(self.texts[row])}

    def restore(self, row: int, saved: dict[str, Any]) -> None:
        self.texts[row] = list(saved["text"])


class ScriptDrafter(Drafter):
    """Proposes `script(text, n)`: the committed text with its anchor, and the wanted length. Its notes say the same."""

    Config = DrafterConfig

    def __init__(self, script: Callable[[list[int], int], list[int]], info: TargetInfo, *, most: int = 16) -> None:
        eye = torch.eye(1)
        super().__init__(
            DrafterConfig(), TargetHooks(info=info, embed=lambda i: eye, head=lambda h: h, head_rows=lambda i: eye)
        )
        self.script = script
        self.target_layer_ids = (0,)
        self.max_draft_tokens = most
        self.commits: list[Commit] = []
        self.num_nonfinite = 0

    def new_state(self, num_rows: int) -> ScriptState:
        return ScriptState(num_rows)

    def commit(self, state: State, new: Commit) -> None:
        assert isinstance(state, ScriptState)
        self.commits.append(new)
        for b, row in enumerate(new.rows):
            tokens = list(new.tokens[b])
            state.texts[row] += tokens
            assert new.features is not None
            # Features belong to their tokens: one-hot of the token itself.
            assert new.features[b, : len(tokens), 0].argmax(-1).tolist() == tokens

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        assert isinstance(state, ScriptState)
        scripts = [
            self.script([*state.texts[row], anchor], n)[:n]
            for row, anchor, n in zip(request.rows, request.anchors, request.num_tokens, strict=True)
        ]
        drafts = [Draft(tokens, [1 / (2 + i) for i in range(len(tokens))], notes=tuple(tokens)) for tokens in scripts]
        return Proposal(drafts, num_nonfinite=self.num_nonfinite)

    def cost(self, context_tokens: int) -> DraftCost:
        return DraftCost(state_bytes=0, kv_bytes_per_token=8, weight_bytes=0, propose_flops=0, commit_flops_per_token=0)


def oracle(target: ToyTarget, *, wrong_at: int | None = None) -> Callable[[list[int], int], list[int]]:
    """A script that says what greedy decoding will say, with one wrong token at `wrong_at` of each block."""

    def script(text: list[int], n: int) -> list[int]:
        out, token = [], text[-1]
        for i in range(n):
            token = int(target.table[token].argmax())
            out.append((token + 1) % target.info.vocab_size if i == wrong_at else token)
        return out

    return script
