"""EAGLE-3: an autoregressive layer over the target's features that learns on its own outputs (arXiv 2503.01840).

In: features of committed tokens, fused to one vector each; a token is paired with the feature before it, since it is
what that feature's position led to. Out: draft tokens, one step of one layer each: the step's output stands for the
feature that the target has not made yet. Training runs the same steps from each anchor on the layer's own outputs
(training-time test), so that it sees what it will see when it serves. Only keys and values of committed pairs are kept.
Norms of EAGLE 3.1 (arXiv 2605.09992) are options. Ours: window, shared head with a reduced vocabulary, samples.
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
from hyflash.drafters import eagle_layouts
from hyflash.drafters.base import DrafterConfig, State
from hyflash.drafters.context import BlockState, ContextShape, ContextStore, ContextView, new_store
from hyflash.drafters.eagle_layer import Chain, PairLayer
from hyflash.drafters.feature_config import FeatureConfig
from hyflash.drafters.feature_drafter import FeatureDrafter
from hyflash.drafters.objective import block_labels, block_loss, own_head_loss
from hyflash.drafters.picking import Picker
from hyflash.drafters.vocab import HIDDEN_LOGIT, HeadRows, ServingHead
from hyflash.errors import HyflashError
from hyflash.layers import RMSNorm, TapNorm, init_linear
from hyflash.ops.attention import context_mask
from hyflash.ops.losses import LossKind
from hyflash.ops.rope import rope_tables, rotate


class EagleConfig(FeatureConfig):
    """Options of `eagle`."""

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


class DrafterImpl(FeatureDrafter):
    """Autoregressive drafter with one layer; the context is attended to in full or through a window."""

    Config: ClassVar[type[DrafterConfig]] = EagleConfig
    source: ClassVar[str] = "EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE, SpecForge, vLLM speculators"
    samples = True
    config: EagleConfig

    def __init__(self, config: DrafterConfig, hooks: TargetHooks) -> None:
        """Build with fresh weights; zeros in the config are filled in from the target. Raises UserError."""
        if not isinstance(config, EagleConfig):
            raise HyflashError(f"expected the config of an eagle, found {type(config).__name__}.")
        cfg = config.resolved(hooks)
        super().__init__(cfg, hooks)
        dim, eps, taps = cfg.hidden_size, cfg.rms_norm_eps, len(cfg.taps)
        self.max_positions = None if cfg.window else cfg.max_positions
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
        )
        self.norm = RMSNorm(dim, eps)
        self.lm_head: nn.Linear | None = None
        if cfg.own_head:
            self.lm_head = nn.Linear(dim, cfg.draft_vocab_size or hooks.info.vocab_size, bias=False)
            self._start_head()

    @classmethod
    def import_weights(cls, weights: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Published names; see `eagle_layouts.py`."""
        return eagle_layouts.own_names(weights, config) if isinstance(config, EagleConfig) else dict(weights)

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

    def _chain(self, keys: Tensor, values: Tensor, positions: Tensor, first: Tensor, anchors: Tensor) -> Chain:
        """A draft from anchors (B, A) on, over rotated keys and values (B, T, G, K) at positions (B, T).

        The text's first token has no feature before it, so drafters are not trained on its pair; `first` (B, 1) is its
        position, or -1 where it is not there, and nobody sees it.
        """
        cfg = self.config
        window = torch.full_like(anchors[:, 0], cfg.window) if cfg.window else None
        mask = context_mask(
            positions, anchors, window=window, num_slots=cfg.num_slots, counts_slots=cfg.window_counts_slots
        )
        steps = torch.arange(cfg.num_slots, device=anchors.device)
        cos, sin = rope_tables(anchors[..., None] + steps, dim=cfg.head_dim, theta=cfg.rope_theta)
        seen = (positions != first)[:, None, None]
        return Chain(keys=keys, values=values, mask=mask & seen, cos=cos, sin=sin)

    # --------------------------------------------------------------------------------------- training

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """Hidden states of all draft positions at all anchors: each step reads the label before it and the drafter's
        own output."""
        if torch.is_grad_enabled():
            self.forget()  # a step will follow
        before = _shifted(self.context_features(self._clean(batch.features)), None)
        num_tokens = batch.tokens.shape[1]
        anchors = batch.anchors.clamp(0, num_tokens - 1)
        positions = torch.arange(num_tokens, device=anchors.device)[None]
        keys, values = self.midlayer.keys_values(self._embed(batch.tokens), before)
        cos, sin = rope_tables(positions, dim=self.config.head_dim, theta=self.config.rope_theta)
        chain = self._chain(rotate(keys, cos, sin), values, positions, torch.zeros_like(positions[:, :1]), anchors)
        rows = torch.arange(len(before), device=anchors.device)[:, None]
        features = before[rows, anchors]
        tokens, mask = block_labels(batch, self.config.num_draft_tokens)
        read = torch.cat((tokens[..., :1], tokens[..., 1:] * mask), dim=-1)  # what is no label has no say
        steps = []
        for k in range(self.config.num_draft_tokens):
            features, hidden = self._step(read[..., k], features, chain)
            steps.append(hidden)
        return DraftOutput(hidden=torch.stack(steps, dim=2), labels=tokens[..., 1:], mask=mask)

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
        """Zeroed fixed-size entries of the state: the last token's feature, whose follower is the next anchor."""
        last = self.fc.weight.new_zeros(num_rows, self.config.hidden_size)
        return {"last": last, **({} if self.lm_head is not None else self._seen(num_rows))}

    def new_state(self, num_rows: int) -> BlockState:
        """Empty state: a ring is allocated whole, a growing store as tokens come."""
        return BlockState(lengths=[0] * num_rows, stores=[self._new_store(num_rows)], fixed=self._fixed(num_rows))

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
        keys, values = self.midlayer.keys_values(self._embed(tokens), _shifted(features, own.fixed["last"][rows]))
        (store,) = own.stores
        store.append(rows, [own.lengths[row] for row in rows], lengths, keys, values)
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
        view = own.stores[0].view(rows, [own.lengths[row] for row in rows])
        chain = self._chain(view.keys, view.values, view.positions, _first(view, own, rows), view.anchors[:, None])
        head, picker, features = (
            self._serving_head(own, request),
            Picker(request.draws),
            own.fixed["last"][rows][:, None],
        )

        def step(_: int, previous: Tensor) -> Tensor:
            nonlocal features
            features, hidden = self._step(previous[:, None], features, chain)
            return head.logits(hidden)[:, 0]

        logits, _ = head.chain(self._anchors(request), depth, step, picker)
        return self._proposal(head, picker, logits, None, wanted)

    def _serving_head(self, state: BlockState, request: DraftRequest) -> ServingHead:
        if self.lm_head is None:
            return super()._serving_head(state, request)
        ids, weight = self._head_ids(), self.lm_head.weight
        allowed = torch.ones(len(request.rows), len(ids), dtype=torch.bool, device=ids.device)
        return ServingHead(hooks=self.hooks, ids=ids, parts=((weight, None),), allowed=allowed)

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `State.nbytes` counts them; FLOPs of all steps of a draft and of one committed token."""
        cfg, shape = self.config, self._shape()
        seen = min(cfg.window, context_tokens) if cfg.window else context_tokens
        layer, attention = self.midlayer, self.midlayer.self_attn
        step = 2 * sum(p.numel() for p in layer.parameters())
        step += 4 * cfg.num_heads * cfg.head_dim * (seen + cfg.num_draft_tokens)
        step += 2 * cfg.hidden_size * (cfg.draft_vocab_size or self.hooks.info.vocab_size)
        copied = 0 if cfg.own_head else cfg.draft_vocab_size * cfg.hidden_size * self.fc.weight.itemsize
        pair = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
        return DraftCost(
            state_bytes=sum(t.nbytes for t in self._fixed(1).values()) + cfg.window * shape.token_bytes,
            kv_bytes_per_token=0 if cfg.window else shape.token_bytes,
            weight_bytes=sum(t.nbytes for t in (*self.parameters(), *self.buffers())) + copied,
            propose_flops=cfg.num_draft_tokens * step,
            commit_flops_per_token=2 * (self.fc.weight.numel() + pair),
        )


def _shifted(features: Tensor, last: Tensor | None) -> Tensor:
    """The feature before each of (B, T, D): `last` (B, D) before the first, zeros without."""
    if last is None:
        return F.pad(features[:, :-1], (0, 0, 1, 0))
    return torch.cat((last[:, None], features[:, :-1]), dim=1)


def _first(view: ContextView, state: BlockState, rows: list[int]) -> Tensor:
    """Position (B, 1) of a text's first token in a view: 0 while nothing has left the store, else -1."""
    lengths = torch.tensor([state.lengths[row] for row in rows], device=view.anchors.device)
    return torch.where(view.anchors == lengths, 0, -1)[:, None]
