"""A target and a drafter small enough for arithmetic by hand, shared by the tests of data and training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hyflash.core import (
    Commit,
    DraftCost,
    DraftOutput,
    DraftRequest,
    LossTerms,
    Proposal,
    Rows,
    TargetHooks,
    TargetInfo,
    TargetOutput,
    TrainBatch,
)
from hyflash.data.answers import Answer
from hyflash.drafters.base import Drafter, DrafterConfig, State
from hyflash.targets.base import Target

VOCAB, WIDTH = 32, 8


class FakeTarget(Target):
    """Features at a position are a function of its whole prefix and the tap, of nothing else."""

    exactness = "invariant"
    epsilon = 0.0

    def __init__(self, *, max_context: int = 4096, fingerprint: str = "fake-1", scale: float = 1.0) -> None:
        self.info = TargetInfo(
            name="fake",
            fingerprint=fingerprint,
            family="fake",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_layers=4,
            num_heads=2,
            num_kv_heads=2,
            head_dim=4,
            rope_theta=10000.0,
            rms_norm_eps=1e-6,
            max_context=max_context,
            eos_token_ids=(0,),
            dtype="float32",
        )
        self.states: dict[int, list[int]] = {}
        self.widths: list[int] = []
        self.scale = scale
        self.weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
        self._next = 0

    def open(self) -> int:
        self._next += 1
        self.states[self._next] = []
        return self._next

    def close(self, seq: int) -> None:
        del self.states[seq]

    def length(self, seq: int) -> int:
        return len(self.states[seq])

    def truncate(self, seq: int, length: int) -> None:
        del self.states[seq][length:]

    def forward(self, rows: Rows) -> TargetOutput:
        self.widths.append(len(rows.tokens))
        out, first = [], 0
        for seq, n in zip(rows.seqs, rows.lengths, strict=True):
            for token in rows.tokens[first : first + n].tolist():
                prefix = self.states[seq]
                prefix.append((prefix[-1] * 31 if prefix else 7) % 1009 + token)
                out.append(self.feature(prefix[-1], rows.taps))
            first += n
        assert first == len(rows.tokens)
        return TargetOutput(logits=None, features=torch.stack(out) if rows.taps else None)

    def feature(self, state: int, taps: tuple[int, ...]) -> Tensor:
        steps = torch.arange(1, WIDTH + 1, dtype=torch.float32)
        return torch.stack([torch.sin(steps * (state + 100 * tap)) * self.scale for tap in taps])

    def kv_view(self, seq: int, layer: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        first, last = self._kv_span(seq, layer, first, last)
        steps = torch.arange(2 * 2 * 4).view(2, 2, 4)  # keys and values of 2 heads of width 4
        states = self.states[seq][first:last]
        both = [torch.sin((state + 10.0 * layer) * (1 + steps)) * self.scale for state in states]
        both = torch.stack(both) if both else torch.zeros(0, 2, 2, 4)
        return both[:, 0], both[:, 1]

    def hooks(self) -> TargetHooks:
        return TargetHooks(
            info=self.info,
            embed=lambda ids: self.weight[ids],
            head=lambda h: h @ self.weight.T,
            head_rows=lambda ids: self.weight[ids],
        )

    def kv_bytes(self) -> int:
        return 8 * sum(len(s) for s in self.states.values())


def make_answers(num: int, *, longest: int = 23, seed: int = 0) -> list[Answer]:
    """Answers of odd and even lengths; tokens follow a rule that a drafter can learn."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for index in range(num):
        length = int(torch.randint(2, longest, (1,), generator=generator))
        start = int(torch.randint(1, VOCAB, (1,), generator=generator))
        tokens = [(start + 3 * i * i + i) % (VOCAB - 1) + 1 for i in range(length + 3)]
        answers.append(
            Answer(
                id=f"a{index:03d}", prompt_ids=tuple(tokens[:3]), answer_ids=tuple(tokens[3:]), domain="xyz"[index % 3]
            )
        )
    return answers


class FakeConfig(DrafterConfig):
    dropout: float = 0.0
    start: str = "none"
    draft_vocab_size: int = 0


class FakeDrafter(Drafter):
    """Predicts 3 tokens from the features before the anchor and the anchor's embedding."""

    Config = FakeConfig
    target_layer_ids = (1, 3)
    max_draft_tokens = 3

    def __init__(self, config: FakeConfig, hooks: TargetHooks) -> None:
        super().__init__(config, hooks)
        self.norm = nn.LayerNorm(3 * WIDTH)
        self.ridge = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(config.dropout)
        self.started: list[int] = []
        self.vocab: list[int] = []

    def forward(self, batch: TrainBatch) -> DraftOutput:
        rows = torch.arange(len(batch.tokens))[:, None]
        before = (batch.anchors - 1).clamp(min=0)
        context = batch.features[rows, before].flatten(2) * (batch.anchors > 0)[..., None]
        x = torch.cat((context, self.hooks.embed(batch.tokens.gather(1, batch.anchors))), -1)
        hidden = self.ridge(self.dropout(self.norm(x))).unflatten(-1, (3, WIDTH))
        places = batch.anchors[..., None] + 1 + torch.arange(3)
        inside = places < batch.lengths[:, None, None]
        places = places.clamp(max=batch.tokens.shape[1] - 1)
        mask = inside & batch.loss_mask[rows[..., None], places] & batch.anchor_mask[..., None]
        return DraftOutput(hidden=hidden, labels=batch.tokens[rows[..., None], places], mask=mask)

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        logits = self.hooks.head(out.hidden).float()
        ce = nn.functional.cross_entropy(logits.flatten(0, 2), out.labels.flatten(), reduction="none")
        weights = out.mask * batch.weights[..., None]
        hits = (logits.argmax(-1) == out.labels) & out.mask
        return LossTerms(
            numerator=(ce * weights.flatten()).sum(),
            denominator=weights.sum(),
            metrics={"acc@1": (float(hits[..., 0].sum()), float(out.mask[..., 0].sum()))},
        )

    def start(self, batches: list[TrainBatch]) -> dict[str, float]:
        self.started = [int(b.anchor_mask.sum()) for b in batches]
        return {"rows": float(sum(self.started))}

    def set_draft_vocab(self, ids: Tensor) -> None:
        self.vocab = ids.tolist()

    def new_state(self, num_rows: int) -> State:
        raise NotImplementedError

    def commit(self, state: State, new: Commit) -> None:
        raise NotImplementedError

    def propose(self, state: State, request: DraftRequest) -> Proposal:
        raise NotImplementedError

    def cost(self, context_tokens: int) -> DraftCost:
        raise NotImplementedError
