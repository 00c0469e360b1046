"""Compact memory: a small language model drafts, and remembers old text by one slot in several tokens.

After MASW, "Strong Drafts Need Compact Memories" (arXiv 2608.30252). In: committed tokens, no features. Of the model's
keys and values those of the first tokens stay, of the last ones, and of slots, one for every `ratio` tokens between
(`compaction.py`); only the projections that make slots' keys and values are trained, from text alone. Out: the model's
own greedy continuation, or samples. Drafts live in scratch memory; nothing is written before it is committed, so
nothing rolls back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hyflash.core import (
    Commit,
    Draft,
    DraftCost,
    DraftOutput,
    DraftRequest,
    LossTerms,
    Proposal,
    TargetHooks,
    TargetInfo,
    TrainBatch,
)
from hyflash.drafters import small_lm
from hyflash.drafters.base import Drafter, DrafterConfig, State, pick_tokens, to_proposal
from hyflash.drafters.compaction import NOWHERE, Compaction, CompactState, Entries, Held, state_bytes
from hyflash.drafters.context import ContextShape
from hyflash.drafters.objective import at_positions, block_labels, hit_metrics
from hyflash.drafters.picking import Picker
from hyflash.drafters.small_lm import Reading, Sizes, SlotLayer
from hyflash.drafters.vocab import ServingHead, head_logits
from hyflash.errors import UserError
from hyflash.layers import RMSNorm
from hyflash.ops.losses import Addition, head_losses
from hyflash.ops.rope import rope_tables

CHUNK_TOKENS = 256
"""Tokens of a row that are taken in at a time."""


class CompactConfig(DrafterConfig):
    """Options of `compact`: of the memory, and of the model, where 0 is as the target has it."""

    sink: int = Field(default=128, ge=0, description="first tokens that stay")
    window: int = Field(default=128, ge=1, description="last tokens that stay, the newest counted")
    ratio: int = Field(default=4, ge=0, description="tokens between them that share a slot; 0 forgets them")
    num_draft_tokens: int = Field(default=5, ge=1, le=64, description="most draft tokens in a round")
    num_layers: int = Field(default=0, ge=0, description="layers of the model")
    hidden_size: int = Field(default=0, ge=0, description="its width")
    intermediate_size: int = Field(default=0, ge=0, description="width inside its MLP")
    num_heads: int = Field(default=0, ge=0, description="query heads")
    num_kv_heads: int = Field(default=0, ge=0, description="key and value heads")
    head_dim: int = Field(default=0, ge=0, description="width of a head")
    vocab_size: int = Field(default=0, ge=0, description="rows of its embedding")
    max_positions: int = Field(default=0, ge=0, description="longest text it drafts for")
    rope_theta: float = Field(default=0.0, ge=0, description="rotary base")
    rms_norm_eps: float = Field(default=1e-5, gt=0, description="added inside the norms")
    attention_bias: bool = Field(default=False, description="bias of queries, keys and values, as in Qwen2")
    tied_head: bool = Field(default=True, description="the head is the embedding")

    @classmethod
    def tiny(cls) -> Self:
        return cls(sink=2, window=5, num_draft_tokens=3, num_layers=1)

    @property
    def rule(self) -> Compaction:
        """The memory's rule."""
        return Compaction(sink=self.sink, window=self.window, ratio=self.ratio)

    def resolved(self, info: TargetInfo) -> Self:
        """Fill in what the target decides and check the whole. Raises UserError."""
        given = {
            "num_layers": info.num_layers,
            "hidden_size": info.hidden_size,
            "intermediate_size": info.intermediate_size,
            "num_heads": info.num_heads,
            "num_kv_heads": info.num_kv_heads,
            "head_dim": info.head_dim,
            "vocab_size": info.vocab_size,
            "max_positions": info.max_context,
            "rope_theta": info.rope_theta,
        }
        out = self.model_copy(update={name: getattr(self, name) or value for name, value in given.items()})
        out.rule.check(out.num_draft_tokens)
        if out.num_heads % out.num_kv_heads or out.head_dim % 2:
            raise UserError(
                f"heads are {out.num_heads} over {out.num_kv_heads} of width {out.head_dim}; expected a multiple, and "
                "an even width."
            )
        return out


class DrafterImpl(Drafter):
    """Drafts with a small language model of the target's vocabulary."""

    Config: ClassVar[type[DrafterConfig]] = CompactConfig
    source: ClassVar[str] = "MASW, Strong Drafts Need Compact Memories, arXiv 2608.30252"
    owns_words: ClassVar[bool] = True
    samples = True
    config: CompactConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights. Raises UserError."""
        assert isinstance(config, CompactConfig)
        cfg = config.resolved(hooks.info)
        super().__init__(cfg, hooks)
        self.rule = cfg.rule
        self.max_draft_tokens, self.max_positions = cfg.num_draft_tokens, cfg.max_positions
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        sizes = Sizes(
            hidden=cfg.hidden_size,
            inner=cfg.intermediate_size,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            eps=cfg.rms_norm_eps,
            bias=cfg.attention_bias,
            mirrored=cfg.ratio > 0,
        )
        self.layers = nn.ModuleList(SlotLayer(sizes) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tied_head:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    @classmethod
    def read_config(cls, config: Mapping[str, Any], info: TargetInfo, *, directory: Path) -> dict[str, Any]:
        """Sizes of a Llama or Qwen2 from its config.json; the memory's options are left to the caller."""
        return small_lm.read_config(config, info, directory=directory)

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Tensors of a transformers checkpoint, with mirrors as copies; our own as they are."""
        assert isinstance(config, CompactConfig)
        if not any(name.startswith("model.") for name in weights):
            return dict(weights)
        return small_lm.own_names(weights, mirrored=config.ratio > 0, tied=config.tied_head)

    # ---------------------------------------------------------------------------------------- the model

    def _run(self, ids: Tensor, entries: Entries, held: Held | None = None, *, keys_only: bool = False) -> Tensor:
        """Token ids (B, N), slots behind tokens -> final-normed hidden states (B, T, D) of the tokens.

        Keys and values of all N go behind those that are held. `keys_only` spares what only hidden states need.
        """
        seen = entries if held is None else _joined(held.entries, entries)
        cos, sin = rope_tables(entries.positions, dim=self.config.head_dim, theta=self.config.rope_theta)
        reading = Reading(
            cos=cos,
            sin=sin,
            mask=self.rule.visible(entries, seen)[:, None],
            num_tokens=int((~entries.is_slot).sum()),
            held=None if held is None else held.data,
            num_held=seen.positions.shape[1] - ids.shape[1],
        )
        x = self.embed_tokens(ids.clamp(max=self.config.vocab_size - 1))  # a target's padding has no row here
        for i, layer in enumerate(self.layers):
            x = layer(x, reading, i, keys_only=keys_only and i == len(self.layers) - 1)
        out: Tensor = self.norm(x[:, : reading.num_tokens])
        return out

    def _with_slots(self, tokens: Tensor, positions: Tensor, slots: Sequence[Sequence[int]]) -> tuple[Tensor, Entries]:
        """Ids (B, T + n) and entries of tokens (B, T) at positions (B, T), and behind them slots at the positions given
        for each row. A slot's input is the last of its tokens."""
        num = max(map(len, slots))
        places = torch.full((len(slots), num), NOWHERE, dtype=torch.int64)
        for b, row in enumerate(slots):
            places[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        places = places.to(tokens.device)
        last = (places - positions[:, :1]).clamp(max=tokens.shape[1] - 1)
        is_slot = torch.arange(tokens.shape[1] + num, device=tokens.device) >= tokens.shape[1]
        entries = Entries(positions=torch.cat((positions, places), dim=1), is_slot=is_slot)
        return torch.cat((tokens, tokens.gather(1, last)), dim=1), entries

    def _head_weight(self) -> Tensor:
        """Rows of the head whose tokens the target has too."""
        weight = self.embed_tokens.weight if self.config.tied_head else self.lm_head.weight
        return weight[: self.hooks.info.vocab_size]

    # ------------------------------------------------------------------------------------------ training

    @property
    def trains_on_text(self) -> bool:
        """Always: there are no features."""
        return True

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """One pass over the sequences; drafts at an anchor are predictions of its tokens, since teacher-forced drafts
        are the text. `extra` has the hidden states of all tokens, "all" (B, T, D), and where blocks lie, "places"."""
        num_rows, length = batch.tokens.shape
        positions = torch.arange(length, device=batch.tokens.device).expand(num_rows, length)
        slots = self.rule.slot_positions(0, self.rule.num_slots(length))
        hidden = self._run(*self._with_slots(batch.tokens, positions, [slots] * num_rows))
        tokens, mask = block_labels(batch, self.config.num_draft_tokens)
        places = batch.anchors.clamp(min=0)[..., None] + torch.arange(mask.shape[-1], device=hidden.device)
        inside, places = places < batch.lengths[:, None, None], places.clamp(max=length - 1)
        return DraftOutput(
            hidden=at_positions(hidden, places) * inside[..., None],
            labels=tokens[..., 1:],
            mask=mask & (tokens[..., 1:] < self.config.vocab_size),
            extra={"all": hidden, "places": places},
        )

    def logits(self, out: DraftOutput) -> Tensor:
        """By the model's own head."""
        return head_logits(out.hidden, self._head_weight(), None)

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        """Cross-entropy of every token in some anchor's block, once, weighted by how many blocks hold it."""
        places, weights = out.extra["places"].flatten(1), (out.mask * batch.weights[..., None]).flatten(1)
        total = weights.new_zeros(batch.tokens.shape).scatter_add_(1, places, weights)
        counted = total > 0
        labels = batch.tokens.roll(-1, dims=1)[counted]
        hidden, head = out.extra["all"][counted], self._head_weight()
        if head.requires_grad:
            nothing = hidden.new_zeros(1, len(head))
            table = Addition(latent=hidden, table=head)
            rows = head_losses(hidden, labels, head=lambda some: nothing.expand(len(some), -1), addition=table)
        else:
            rows = head_losses(hidden, labels, head=lambda some: head_logits(some, head, None))
        right = torch.zeros_like(counted).masked_scatter(counted, rows.correct)
        hits = right.gather(1, places).view(out.mask.shape)
        return LossTerms(
            numerator=(rows.loss * total[counted]).sum(),
            denominator=total.sum(),
            metrics=hit_metrics(hits[out.mask], out.mask),
        )

    # ------------------------------------------------------------------------------------------- serving

    def _shape(self) -> ContextShape:
        cfg = self.config
        return ContextShape.like(
            self.embed_tokens.weight, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim, rope_theta=cfg.rope_theta
        )

    def new_state(self, num_rows: int) -> CompactState:
        """Empty rows."""
        return CompactState(self.rule, self._shape(), num_layers=self.config.num_layers, num_rows=num_rows)

    @torch.no_grad()
    def commit(self, state: State, new: Commit) -> None:
        """Run the model over the tokens, a chunk of each row at a time, and keep their keys, values and slots."""
        own, done = CompactState.of(state), 0
        while any(len(tokens) > done for tokens in new.tokens):
            pieces = {
                row: tokens[done : done + CHUNK_TOKENS]
                for row, tokens in zip(new.rows, new.tokens, strict=True)
                if len(tokens) > done
            }
            self._take_in(own, list(pieces), list(pieces.values()))
            done += CHUNK_TOKENS

    def _take_in(self, state: CompactState, rows: list[int], pieces: list[Sequence[int]]) -> None:
        starts, rule, longest = [state.lengths[row] for row in rows], self.rule, max(map(len, pieces))
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        positions = torch.full((len(rows), longest), NOWHERE)
        slots = []
        for b, (start, piece) in enumerate(zip(starts, pieces, strict=True)):
            stop = start + len(piece)
            tokens[b, : len(piece)] = torch.tensor(piece)
            positions[b, : len(piece)] = torch.arange(start, stop)
            slots.append(rule.slot_positions(rule.num_slots(start), rule.num_slots(stop)))
        device = self.embed_tokens.weight.device
        ids, entries = self._with_slots(tokens.to(device), positions.to(device), slots)
        held = state.held(rows, spare=ids.shape[1])
        self._run(ids, entries, held, keys_only=True)
        fresh = held.data[:, :, held.entries.positions.shape[1] :]
        for b, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            state.append(row, fresh[:, b, : len(piece)], fresh[:, b, longest : longest + len(slots[b])])

    @torch.no_grad()
    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Tokens one after another, greedy or sampled, each from the memory and the drafts before it."""
        own, rows = CompactState.of(state), list(request.rows)
        wanted = tuple(self._room(own, row, n) for row, n in zip(rows, request.num_tokens, strict=True))
        depth = max(wanted, default=0)
        if depth == 0:
            return Proposal([Draft()] * len(wanted))
        device = self.embed_tokens.weight.device
        anchors = torch.tensor(request.anchors, device=device)
        starts = torch.tensor([own.lengths[row] for row in rows], device=device)[:, None]
        is_token, held, head = (
            torch.zeros(1, dtype=torch.bool, device=device),
            own.held(rows, depth),
            self._head_weight(),
        )

        def step(k: int, previous: Tensor) -> Tensor:
            nonlocal held
            entry = Entries(positions=starts + k, is_slot=is_token)
            hidden = self._run(previous[:, None], entry, held)
            held = replace(held, entries=_joined(held.entries, entry))
            return head_logits(hidden[:, 0], head, None)

        words, picker = ServingHead(hooks=self.hooks, ids=None, parts=(), allowed=None), Picker(request.draws)
        logits, _ = words.chain(anchors, depth, step, picker)
        greedy, lengths, probs, cut = pick_tokens(logits, wanted)
        proposal = to_proposal(picker.columns(greedy), lengths, probs, cut)
        return picker.finish(proposal, words.all_ids(logits), self.hooks.info.vocab_size, stated=False)

    def _room(self, state: CompactState, row: int, asked: int) -> int:
        """Tokens that may be drafted for a row: no more than asked, than options allow, than positions are left."""
        return max(0, min(asked, self.max_draft_tokens, self.config.max_positions - 1 - state.lengths[row]))

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `State.nbytes` counts them; FLOPs of one full proposal and of one committed token with its share of
        a slot."""
        cfg, rule = self.config, self.rule
        fixed, per_token = state_bytes(rule, self._shape(), cfg.num_layers)
        seen = min(context_tokens, rule.sink + rule.window) + rule.num_slots(max(0, context_tokens - rule.window))
        weights = sum(p.numel() for name, p in self.layers.named_parameters() if ".slot_" not in name)
        entry = 2 * weights + 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seen
        entries_per_token = 1 + (1 / cfg.ratio if cfg.ratio else 0)
        return DraftCost(
            state_bytes=fixed,
            kv_bytes_per_token=per_token,
            weight_bytes=sum(p.nbytes for p in self.parameters()),
            propose_flops=cfg.num_draft_tokens * (entry + 2 * self._head_weight().numel()),
            commit_flops_per_token=round(entry * entries_per_token),
        )


def _joined(first: Entries, second: Entries) -> Entries:
    return Entries(
        positions=torch.cat((first.positions, second.positions), dim=1),
        is_slot=torch.cat((first.is_slot, second.is_slot)),
    )
