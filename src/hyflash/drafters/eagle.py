"""EAGLE-3: an autoregressive layer over the target's features that learns on its own outputs (arXiv 2503.01840).

In: features of committed tokens, fused to one vector each; a token is paired with the feature before it, since it is
what that feature's position led to. Out: draft tokens, one step of one layer each: the step's output stands for the
feature that the target has not made yet. Training runs the same steps from each anchor on the layer's own outputs
(training-time test), so that it sees what it will see when it serves. Only keys and values of committed pairs are kept.
Norms of EAGLE 3.1 (arXiv 2605.09992) are options. Ours: window, slots for what left it (`eagle_memory.py`, after MASW,
arXiv 2608.30252), shared head with a reduced vocabulary, samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
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
    TrainBatch,
)
from hyflash.drafters import eagle_layouts, eagle_memory
from hyflash.drafters.base import DrafterConfig, State
from hyflash.drafters.compaction import Compaction, CompactState, Entries, state_bytes
from hyflash.drafters.context import BlockState, ContextShape, ContextStore, ContextView, new_store
from hyflash.drafters.eagle_layer import Chain, PairLayer
from hyflash.drafters.eagle_memory import MemoryState, SlotMaker
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.drafters.feature_drafter import FeatureDrafter
from hyflash.drafters.mirrors import with_mirrors
from hyflash.drafters.objective import block_labels, block_loss, own_head_loss
from hyflash.drafters.picking import Picker
from hyflash.drafters.vocab import HIDDEN_LOGIT, HeadRows, ServingHead
from hyflash.errors import HyflashError, UserError
from hyflash.layers import RMSNorm, TapNorm, init_linear
from hyflash.ops.attention import context_mask
from hyflash.ops.losses import LossKind
from hyflash.ops.rope import rope_tables, rotate


class EagleConfig(FeatureConfig):
    """Options of `eagle`."""

    sink: int = Field(default=0, ge=0, description="first tokens that stay when the window moves on")
    slot_ratio: int = Field(default=0, ge=0, description="tokens between sink and window that share a slot; 0 forgets")
    max_positions: int = Field(
        default=0, ge=0, description="longest context without window, or with sink or slots; 0 as the target"
    )
    num_taps: int = Field(default=3, ge=1, description="how many layers the default target_layer_ids spreads over")
    tap_norm: bool = Field(default=True, description="norm each tapped layer on its own (EAGLE 3.1's fc_norm)")
    input_norm: bool = Field(default=False, description="norm all taps as one vector (norm_before_fc of imports)")
    norm_output: bool = Field(default=True, description="steps hand on their normed output (EAGLE 3.1)")
    norm_before_residual: bool = Field(default=False, description="a step adds to its normed input, not to its input")
    qk_norm: bool = Field(default=False, description="norm queries and keys by head, as Qwen3 does")
    own_head: bool = Field(
        default=False,
        description="learn a head of draft_vocab_size tokens (0 all), as published drafters have; "
        "default: the target's, frozen",
    )
    loss: LossKind = Field(default="kl", description="kl to the target's distribution, ce or ce_tv")
    gamma: float = Field(default=4.48, ge=0, description="decay exp(-(k-1)/gamma) of the loss; 4.48 is 0.8 a step")

    @classmethod
    def tiny(cls) -> Self:
        return cls(num_draft_tokens=3, num_taps=2)

    @property
    def rule(self) -> Compaction | None:
        """Of the compact memory, in whose window a query is counted; None where there is neither sink nor slot."""
        if not self.sink and not self.slot_ratio:
            return None
        own = 0 if self.window_counts_slots else 1
        return Compaction(sink=self.sink, window=self.window + own, ratio=self.slot_ratio)

    def _check(self, hooks: TargetHooks) -> None:
        super()._check(hooks)
        if self.rule and not self.window:
            raise UserError(
                f"sink is {self.sink} and slot_ratio {self.slot_ratio} without a window; expected a window above 0, as "
                "they keep what has left it."
            )


class DrafterImpl(FeatureDrafter):
    """Autoregressive drafter with one layer; the context is attended to in full or through a window."""

    Config: ClassVar[type[DrafterConfig]] = EagleConfig
    source: ClassVar[str] = "EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE, SpecForge, vLLM speculators"
    samples = True
    addable: ClassVar[tuple[str, ...]] = ("window", "sink", "slot_ratio")
    config: EagleConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; zeros in the config are filled in from the target. Raises UserError."""
        if not isinstance(config, EagleConfig):
            raise HyflashError(f"expected the config of an eagle, found {type(config).__name__}.")
        cfg = config.resolved(hooks)
        super().__init__(cfg, hooks)
        dim, eps, taps = cfg.hidden_size, cfg.rms_norm_eps, len(cfg.taps)
        self.rule = cfg.rule
        # A ring counts positions from its oldest token; slots stand where their tokens stood.
        self.max_positions = None if cfg.window and not self.rule else cfg.max_positions
        self.input_norm = RMSNorm(taps * dim, eps) if cfg.input_norm else None
        self.tap_norm = TapNorm(taps, dim, eps) if cfg.tap_norm else None
        self.fc = init_linear(nn.Linear(taps * dim, dim, bias=False))
        self.midlayer = PairLayer(
            dim,
            inner=cfg.intermediate_size,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            eps=eps,
            bias=cfg.attention_bias,
            qk_norm=cfg.qk_norm,
            norm_before_residual=cfg.norm_before_residual,
            mirrored=cfg.slot_ratio > 0,
        )
        self.norm = RMSNorm(dim, eps)
        self.lm_head: nn.Linear | None = None
        if cfg.own_head:
            self.lm_head = nn.Linear(dim, cfg.draft_vocab_size or hooks.info.vocab_size, bias=False)
            self._start_head()

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Published names; see `eagle_layouts.py`. Slots over weights that know none start as copies."""
        assert isinstance(config, EagleConfig)
        own = eagle_layouts.own_names(weights, config)
        return with_mirrors(own) if config.slot_ratio else own

    def set_draft_vocab(self, ids: Tensor) -> None:
        """As usual; a head of its own starts from the target's rows wherever the list is another one."""
        same = self.draft_ids is not None and torch.equal(ids.to(self.draft_ids.device), self.draft_ids)
        super().set_draft_vocab(ids)
        if not same:
            self._start_head()

    @torch.no_grad()
    def _start_head(self) -> None:
        """Let the head of its own be the target's."""
        if self.lm_head is not None:
            rows, _ = (self._rows or HeadRows(self.hooks))(self._head_ids().to(self.hooks.info.device))
            self.lm_head.weight.copy_(rows)

    def _head_ids(self) -> Tensor:
        """Token ids (M,) of a head of its own."""
        if self.draft_ids is not None:
            return self.draft_ids
        return torch.arange(self.hooks.info.vocab_size, device=self.fc.weight.device)

    def context_features(self, taps: Tensor) -> Tensor:
        """Fuse clamped features (..., C, D) into one vector (..., D)."""
        if self.input_norm is not None:
            taps = self.input_norm(taps.flatten(-2)).view_as(taps)
        if self.tap_norm is not None:
            taps = self.tap_norm(taps)
        out: Tensor = self.fc(taps.flatten(-2))
        return out

    def _step(self, tokens: Tensor, features: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        """One token (B, A) after the feature (B, A, D) before it: the next feature and what the head reads."""
        after = self.midlayer(self._embed(tokens), features, chain)
        normed: Tensor = self.norm(after)
        return normed if self.config.norm_output else after, normed

    def _chain(self, keys: Tensor, values: Tensor, mask: Tensor, anchors: Tensor) -> Chain:
        """A draft from anchors (B, A) on, over rotated keys and values (B, T, G, K) by a mask (B, A, 1 or S, T)."""
        steps = torch.arange(self.config.num_slots, device=anchors.device)
        cos, sin = rope_tables(anchors[..., None] + steps, dim=self.config.head_dim, theta=self.config.rope_theta)
        return Chain(keys=keys, values=values, mask=mask, cos=cos, sin=sin)

    def _mask(self, positions: Tensor, first: Tensor, anchors: Tensor) -> Tensor:
        """What drafts from anchors (B, A) see of tokens at positions (B, T).

        The text's first token has no feature before it, so drafters are not trained on its pair; `first` (B, 1) is its
        position, or -1 where it is not there, and nobody sees it.
        """
        cfg = self.config
        window = torch.full_like(anchors[:, 0], cfg.window) if cfg.window else None
        mask = context_mask(
            positions, anchors, window=window, num_slots=cfg.num_slots, counts_slots=cfg.window_counts_slots
        )
        return mask & (positions != first)[:, None, None]

    def _memory_mask(self, rule: Compaction, known: Entries, anchors: Tensor) -> Tensor:
        """The same of tokens and slots."""
        cfg = self.config
        return eagle_memory.visible(rule, known, anchors, cfg.num_slots, counts_slots=cfg.window_counts_slots)

    def _slots(self, rule: Compaction) -> SlotMaker:
        return SlotMaker(rule=rule, attention=self.midlayer.self_attn, rope_theta=self.config.rope_theta)

    # --------------------------------------------------------------------------------------- training

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """Hidden states of all draft positions at all anchors: each step reads the label before it and the drafter's
        own output."""
        if torch.is_grad_enabled():
            self.forget()  # a step will follow
        before = _shifted(self.context_features(self._clean(batch.features)), None)
        num_tokens = batch.tokens.shape[1]
        anchors = batch.anchors.clamp(0, num_tokens - 1)
        chain = self._trained_chain(self.midlayer.pairs(self._embed(batch.tokens), before), anchors)
        rows = torch.arange(len(before), device=anchors.device)[:, None]
        features = before[rows, anchors]
        tokens, mask = block_labels(batch, self.config.num_draft_tokens)
        read = torch.cat((tokens[..., :1], tokens[..., 1:] * mask), dim=-1)  # what is no label has no say
        steps = []
        for k in range(self.config.num_draft_tokens):
            features, hidden = self._step(read[..., k], features, chain)
            steps.append(hidden)
        return DraftOutput(hidden=torch.stack(steps, dim=2), labels=tokens[..., 1:], mask=mask)

    def _trained_chain(self, pairs: Tensor, anchors: Tensor) -> Chain:
        """Drafts from anchors (B, A) on, over the pairs (B, T, 2D) of whole texts."""
        if self.rule is not None:
            keys, values, known = self._slots(self.rule).entries(pairs)
            return self._chain(keys, values, self._memory_mask(self.rule, known, anchors), anchors)
        positions = torch.arange(pairs.shape[1], device=anchors.device)[None]
        keys, values = self.midlayer.self_attn.keys_values(pairs)
        cos, sin = rope_tables(positions, dim=self.config.head_dim, theta=self.config.rope_theta)
        mask = self._mask(positions, torch.zeros_like(positions[:, :1]), anchors)
        return self._chain(rotate(keys, cos, sin), values, mask, anchors)

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        """Weighted sum of row losses over labelled positions, with accuracy per position and teacher-forced tau."""
        target = self._target_hidden(batch) if self.config.needs_final_tap_for_loss else None
        if self.lm_head is None:
            return block_loss(out, batch, config=self.config, hooks=self.hooks, reduced=self._reduced(), target=target)
        return own_head_loss(
            out,
            batch,
            config=self.config,
            hooks=self.hooks,
            reduced=self._reduced(),
            target=target,
            weight=self.lm_head.weight,
        )

    def logits(self, out: DraftOutput) -> Tensor:
        """Logits (B, A, L, V) of a training forward; a head of its own has next to none for tokens not listed."""
        if self.lm_head is None:
            return super().logits(out)
        listed: Tensor = self.lm_head(out.hidden).float()
        logits = listed.new_full((*listed.shape[:-1], self.hooks.info.vocab_size), HIDDEN_LOGIT)
        logits[..., self._head_ids()] = listed
        return logits

    # ---------------------------------------------------------------------------------------- serving

    def _shape(self) -> ContextShape:
        cfg = self.config
        return ContextShape.like(
            self.fc.weight, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim, rope_theta=cfg.rope_theta
        )

    def _new_store(self, num_rows: int) -> ContextStore:
        """Where keys and values of committed pairs are kept. One that drops later pairs before the first must hide the
        first itself, by a position at the anchor."""
        return new_store(self._shape(), num_rows, self.config.window)

    def _fixed(self, num_rows: int) -> dict[str, Tensor]:
        """Zeroed fixed-size entries of the state: the last token's feature, whose follower is the next anchor, and what
        a slot that is not full yet holds."""
        fixed = {} if self.lm_head is not None else self._words(num_rows)
        fixed["last"] = self.fc.weight.new_zeros(num_rows, self.config.hidden_size)
        if self.config.slot_ratio:
            size = (num_rows, 2 * self.config.hidden_size)
            fixed[eagle_memory.PARTIAL] = torch.zeros(size, device=self.fc.weight.device)
        return fixed

    def new_state(self, num_rows: int) -> BlockState:
        """Empty state: a ring is allocated whole, a growing store and slots as tokens come."""
        lengths, fixed = [0] * num_rows, self._fixed(num_rows)
        if self.rule is not None:
            memory = CompactState(self.rule, self._shape(), num_layers=1, num_rows=num_rows)
            return MemoryState(lengths=lengths, stores=[], fixed=fixed, memory=memory)
        return BlockState(lengths=lengths, stores=[self._new_store(num_rows)], fixed=fixed)

    @torch.no_grad()
    def commit(self, state: State, new: Commit) -> None:
        """Fuse the committed tokens' features; store keys and values of each token with the feature before it."""
        own = BlockState.of(state)
        if not any(new.tokens):
            return
        rows, lengths = list(new.rows), new.lengths
        features = self.context_features(self._clean(new.features))
        tokens = torch.zeros(features.shape[:2], dtype=torch.int64, device=features.device)
        for b, ids in enumerate(new.tokens):
            tokens[b, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        pairs = self.midlayer.pairs(self._embed(tokens), _shifted(features, own.fixed["last"][rows]))
        if self.rule is not None:
            self._slots(self.rule).take_in(MemoryState.of(own), rows, lengths, pairs)
        else:
            keys, values = self.midlayer.self_attn.keys_values(pairs)
            own.stores[0].append(rows, [own.lengths[row] for row in rows], lengths, keys, values)
        self._count(own, new)
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length > 0:
                own.fixed["last"][row] = features[b, length - 1]

    @torch.no_grad()
    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Draft tokens one after the other: the likeliest, samples in rows with a draw. As many steps as the longest
        draft has tokens."""
        own, rows = BlockState.of(state), list(request.rows)
        wanted = self._wanted(own, request)
        depth = max(wanted, default=0)
        if depth == 0:
            return Proposal([Draft()] * len(wanted))
        chain, features = self._served_chain(own, rows), own.fixed["last"][rows][:, None]
        head, picker = self._serving_head(own, request), Picker(request.draws)

        def step(_: int, previous: Tensor) -> Tensor:
            nonlocal features
            features, hidden = self._step(previous[:, None], features, chain)
            return head.logits(hidden)[:, 0]

        logits, _ = head.chain(self._anchors(request), depth, step, picker)
        return self._proposal(head, picker, logits, None, wanted)

    def _served_chain(self, state: BlockState, rows: list[int]) -> Chain:
        """Drafts over what rows hold."""
        lengths = [state.lengths[row] for row in rows]
        if self.rule is not None:
            held = MemoryState.of(state).memory.held(rows)
            anchors = torch.tensor(lengths, device=held.data.device)[:, None]
            keys, values = held.data[0].unbind(2)
            return self._chain(keys, values, self._memory_mask(self.rule, held.entries, anchors), anchors)
        view = state.stores[0].view(rows, lengths)
        anchors = view.anchors[:, None]
        return self._chain(
            view.keys, view.values, self._mask(view.positions, _first(view, state, rows), anchors), anchors
        )

    def _serving_head(self, state: BlockState, request: DraftRequest) -> ServingHead:
        if self.lm_head is None:
            return super()._serving_head(state, request)
        ids, weight = self._head_ids(), self.lm_head.weight
        allowed = torch.ones(len(request.rows), len(ids), dtype=torch.bool, device=ids.device)
        return ServingHead(hooks=self.hooks, ids=ids, parts=((weight, None),), allowed=allowed)

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `State.nbytes` counts them; FLOPs of all steps of a draft and of one committed token."""
        cfg, attention, ratio = self.config, self.midlayer.self_attn, self.config.slot_ratio
        fixed, per_token = self._store_bytes()
        weights = sum(p.numel() for name, p in self.midlayer.named_parameters() if ".slot_" not in name)
        seen = min(cfg.window, context_tokens) if cfg.window else context_tokens
        if self.rule is not None:
            seen = min(cfg.sink + cfg.window, context_tokens)
            seen += self.rule.num_slots(max(0, context_tokens - cfg.window))
        step = 2 * weights + 4 * cfg.num_heads * cfg.head_dim * (seen + cfg.num_draft_tokens)
        step += 2 * cfg.hidden_size * (self._head_size if self.lm_head is None else self.lm_head.out_features)
        copied = 0 if cfg.own_head else cfg.draft_vocab_size * cfg.hidden_size * self.fc.weight.itemsize
        pair = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
        return DraftCost(
            state_bytes=sum(t.nbytes for t in self._fixed(1).values()) + fixed,
            kv_bytes_per_token=per_token,
            weight_bytes=sum(t.nbytes for t in (*self.parameters(), *self.buffers())) + copied,
            propose_flops=cfg.num_draft_tokens * step,
            commit_flops_per_token=2 * (self.fc.weight.numel() + pair + (pair // ratio if ratio else 0)),
        )

    def _store_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values that do not grow, and bytes per token."""
        shape, window = self._shape(), self.config.window
        if self.rule is not None:
            return state_bytes(self.rule, shape, 1)
        return window * shape.token_bytes, 0 if window else shape.token_bytes


def _shifted(features: Tensor, last: Tensor | None) -> Tensor:
    """The feature before each of (B, T, D): `last` (B, D) before the first, zeros without."""
    if last is None:
        return F.pad(features[:, :-1], (0, 0, 1, 0))
    return torch.cat((last[:, None], features[:, :-1]), dim=1)


def _first(view: ContextView, state: BlockState, rows: list[int]) -> Tensor:
    """Position (B, 1) of a text's first token in a view: 0 while nothing has left the store, else -1."""
    lengths = torch.tensor([state.lengths[row] for row in rows], device=view.anchors.device)
    return torch.where(view.anchors == lengths, 0, -1)[:, None]
