"""DFlash: a block of MASK slots filled in one pass from the target's features of the context (arXiv 2602.06036).

In: features of committed tokens; the block is [anchor, MASK x L]. Out: slot k's hidden state, which the target's
head turns into draft token anchor + k. Context keys and values come straight from the fused features, so a token
costs one projection when it is committed and nothing later. Its network is `block_model.py`'s.
Ours on top, each an option: window, reduced vocabulary, in-block correction, closed-form start, per-tap norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from hyflash.core import Commit, Draft, DraftCost, DraftOutput, DraftRequest, LossTerms, Proposal, TrainBatch
from hyflash.drafters.base import DrafterConfig, State
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.block_model import BlockModel
from hyflash.drafters.context import BlockState, ContextShape, ContextStore, new_store
from hyflash.drafters.objective import PLAIN, HeadTraining, block_labels, block_loss
from hyflash.drafters.packed_drafter import MemoryParts, PackedDrafter, PackedLayer
from hyflash.drafters.picking import Picker
from hyflash.drafters.vocab import ReducedHead, ServingHead, Step
from hyflash.errors import UserError
from hyflash.layers import GRUCorrection, LayerContext
from hyflash.ops.kernels import HEAD_STEP, Kernels
from hyflash.ops.ridge import NormalEquations
from hyflash.ops.rope import rope_tables, rotate

Reader = Callable[[Tensor], Tensor]


class DrafterImpl(BlockModel):
    """Block drafter with attention to the context features of the target, full or windowed."""

    Config: ClassVar[type[DrafterConfig]] = DFlashConfig
    source: ClassVar[str] = "DFlash, arXiv 2602.06036; z-lab/dflash"
    samples = True

    # --------------------------------------------------------------------------------------- training

    def _train_windows(self, batch: TrainBatch) -> list[Tensor | None]:
        """Window (B,) of each layer for each sequence; None is the full context."""
        return [torch.full_like(batch.lengths, width) if width else None for width in self.windows]

    def _train_readers(self, context: Tensor, batch: TrainBatch, anchors: Tensor) -> list[Reader | None]:
        """Memory read of each layer at the anchors."""
        return [None] * len(self.layers)

    def forward(self, batch: TrainBatch) -> DraftOutput:
        """Hidden states of all draft positions at all anchors, corrections teacher-forced."""
        if torch.is_grad_enabled():
            self.forget()  # a step will follow
        taps = self._clean(batch.features)
        context = self.context_features(taps)  # (B, T, D)
        num_tokens = batch.tokens.shape[1]
        anchors = batch.anchors.clamp(0, num_tokens - 1)
        positions = torch.arange(num_tokens, device=anchors.device)
        key_cos, key_sin = rope_tables(positions, dim=self.config.head_dim, theta=self.config.rope_theta)
        cos, sin = self._block_tables(anchors)
        windows, readers = self._train_windows(batch), self._train_readers(context, batch, anchors)
        contexts = []
        for i, layer in enumerate(self._layers()):
            keys, values = layer.self_attn.keys_values(context)
            contexts.append(
                LayerContext(
                    keys=rotate(keys, key_cos, key_sin),
                    values=values,
                    mask=self._mask(positions[None], anchors, windows[i]),
                    cos=cos,
                    sin=sin,
                    causal=self._causal(i),
                    memory=readers[i],
                )
            )
        x = self._slot_inputs(batch.tokens.gather(1, anchors), self._before(taps, anchors))
        return self._output(self._run(x, contexts), batch)

    def _output(self, hidden: Tensor, batch: TrainBatch) -> DraftOutput:
        """The training forward's result from the layers' (B, A, L, D): correction, labels and their mask."""
        tokens, mask = block_labels(batch, self.config.num_draft_tokens)
        if self.correction is not None:
            previous = self._embed(tokens[..., :-1]).flatten(0, 1)
            state = previous.new_zeros(len(previous), self.correction.state_width)
            hidden = self.correction(hidden.flatten(0, 1), previous, state)[0].view_as(hidden)
        return DraftOutput(hidden=hidden, labels=tokens[..., 1:], mask=mask)

    def _before(self, taps: Tensor, anchors: Tensor) -> Tensor:
        """Start taps (B, A, C', D) of the token before each anchor, zeros before the first token."""
        chosen = taps[:, :, self.start_index]
        rows = torch.arange(len(taps), device=taps.device)[:, None]
        return chosen[rows, (anchors - 1).clamp(min=0)] * (anchors > 0)[..., None, None]

    def loss(self, out: DraftOutput, batch: TrainBatch) -> LossTerms:
        """Weighted sum of row losses over labelled positions, with accuracy per position and teacher-forced tau."""
        target = self._target_hidden(batch) if self.config.needs_final_tap_for_loss else None
        reduced, extra = self._reduced(), self._head_training(out, batch)
        return block_loss(out, batch, config=self.config, hooks=self.hooks, reduced=reduced, target=target, extra=extra)

    def _head_training(self, out: DraftOutput, batch: TrainBatch) -> HeadTraining:
        """What a head of the drafter's own brings into the loss; DFlash has none."""
        return PLAIN

    @torch.no_grad()
    def start(self, batches: list[TrainBatch]) -> dict[str, float]:
        """Fit the ridge start: slot k's input is the target's final hidden state that predicts anchor + k."""
        if self.ridge is None:
            return {}
        self.forget()
        cfg, ridge = self.config, self.ridge
        sums = NormalEquations(ridge.num_inputs, cfg.num_draft_tokens * cfg.hidden_size)
        for batch in batches:
            last = batch.anchors[..., None] + cfg.num_draft_tokens
            whole = batch.anchor_mask & (last[..., 0] < batch.lengths[:, None])
            anchors = batch.anchors.clamp(0, batch.tokens.shape[1] - 1)
            embeds = self._embed(batch.tokens.gather(1, anchors))
            inputs = ridge.inputs(self._before(self._clean(batch.features), anchors), embeds)
            sums.add(inputs[whole], self._target_hidden(batch)[whole].flatten(1), batch.weights[whole])
        if sums.num_rows == 0:
            raise UserError(f"ridge start: no anchor with {cfg.num_draft_tokens} tokens after it; give longer answers.")
        return {"start_rows": float(sums.num_rows), "start_explained": ridge.fit(sums, cfg.start_lambda)}

    # ---------------------------------------------------------------------------------------- serving

    def _shape(self) -> ContextShape:
        cfg = self.config
        return ContextShape.like(
            self.fc.weight, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim, rope_theta=cfg.rope_theta
        )

    def _fixed(self, num_rows: int) -> dict[str, Tensor]:
        """Zeroed fixed-size entries of the state, (num_rows, ...) each."""
        device, fixed = self.fc.weight.device, {}
        if self.ridge is not None:
            shape = (num_rows, len(self.start_index), self.config.hidden_size)
            fixed["last"] = torch.zeros(shape, dtype=self.fc.weight.dtype, device=device)
        return {**fixed, **self._words(num_rows)}

    def new_state(self, num_rows: int) -> BlockState:
        """Empty state: rings are allocated whole, growing stores as tokens come."""
        shape = self._shape()
        stores = [self._new_store(shape, num_rows, width) for width in self.windows]
        return BlockState(lengths=[0] * num_rows, stores=stores, fixed=self._fixed(num_rows))

    def _new_store(self, shape: ContextShape, num_rows: int, window: int) -> ContextStore:
        """Store of a layer; window 0 sees all."""
        return new_store(shape, num_rows, window)

    def pack(self, kernels: Kernels) -> PackedDrafter | None:
        """For heads whose width is a multiple of 16, and windows that all slots share."""
        if self.config.head_dim % HEAD_STEP or self.config.window_counts_slots:
            return None
        layers = enumerate(self._layers())
        packed = PackedDrafter(
            kernels,
            [PackedLayer(kernels, layer, self._memory_parts(i), causal=self._causal(i)) for i, layer in layers],
            fc=self.fc,
            tap_norm=self.tap_norm,
            hidden_norm=self.hidden_norm,
            ridge=self.ridge,
            gru=self._packed_gru(),
            norm=self.norm,
            mask=None if self.ridge is not None else self._embed(torch.tensor(self.config.mask_token_id)),
            num_slots=self.config.num_slots,
            first_slot=self.config.first_slot,
            hooks=self.hooks,
        )
        if self._head_packs():
            packed.take_head(self._packed_head())
        return packed

    def _packed_gru(self) -> GRUCorrection | None:
        """The correction in the kernels' own pass."""
        return self.correction if isinstance(self.correction, GRUCorrection) else None

    def _packed_head(self) -> ReducedHead:
        """The head of the kernels' own pass."""
        return self._reduced_head()

    def _memory_parts(self, layer: int) -> MemoryParts | None:
        """Memory of a layer; DFlash has none."""
        return None

    @torch.no_grad()
    def commit(self, state: State, new: Commit) -> None:
        """Project the committed tokens' features and store keys and values."""
        own = BlockState.of(state)
        if not any(new.tokens):
            return
        rows, lengths = list(new.rows), new.lengths
        taps = self._clean(new.features)
        starts = [own.lengths[row] for row in rows]
        if self.packed is not None:
            self.packed.commit(own, rows, starts, lengths, taps)
        else:
            self._take(own, new, starts, taps)
        self._count(own, new)
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length > 0 and "last" in own.fixed:
                own.fixed["last"][row] = self._kept(taps[b, length - 1])

    def _take(self, state: BlockState, new: Commit, starts: list[int], taps: Tensor) -> None:
        """Take clean features (B, T, C, D) of tokens from `starts` on into what the layers read."""
        rows, lengths, context = list(new.rows), new.lengths, self.context_features(taps)
        for layer, store in zip(self._layers(), state.stores, strict=True):
            keys, values = layer.self_attn.keys_values(context)
            store.append(rows, starts, lengths, keys, values)
        self._write_memory(state, rows, lengths, context)

    def _kept(self, taps: Tensor) -> Tensor:
        """What a row keeps of its last token's taps (C, D)."""
        return taps.index_select(0, self.start_index)

    def _write_memory(self, state: BlockState, rows: list[int], lengths: list[int], context: Tensor) -> None:
        """Take context features (B, T, D) into the memories."""

    def _serve_reader(self, layer: int, state: BlockState, rows: list[int]) -> Reader | None:
        """Memory read of a layer for rows of the state."""
        return None

    def _memory_flops(self) -> tuple[int, int]:
        """FLOPs of the memories for one block and for one committed token."""
        return 0, 0

    @torch.no_grad()
    def block_hidden(self, state: State, request: DraftRequest) -> Tensor:
        """Hidden states (B, L, D) of a full block after each row's anchor, before correction and head."""
        own, rows = BlockState.of(state), list(request.rows)
        lengths = [own.lengths[row] for row in rows]
        before = own.fixed["last"][rows] if "last" in own.fixed else self.fc.weight.new_zeros(len(rows), 0)
        x = self._slot_inputs(self._anchors(request)[:, None], before[:, None], self.packed)
        if self.packed is not None:
            x = self.packed.run(x[:, 0], own, rows)
            return x if self.norm is None else self.norm(x)
        contexts = [self._serve_context(i, own, rows, lengths) for i in range(len(own.stores))]
        return self._run(x, contexts)[:, 0]

    def _serve_context(self, layer: int, own: BlockState, rows: list[int], lengths: list[int]) -> LayerContext:
        """What a layer sees of rows of these lengths."""
        view = own.stores[layer].view(rows, lengths)
        anchors = view.anchors[:, None]
        cos, sin = self._block_tables(anchors)
        window = torch.full_like(view.anchors, self.windows[layer]) if self.windows[layer] else None
        return LayerContext(
            keys=view.keys,
            values=view.values,
            mask=self._mask(view.positions, anchors, window),
            cos=cos,
            sin=sin,
            causal=self._causal(layer),
            memory=self._serve_reader(layer, own, rows),
        )

    @torch.no_grad()
    def propose(self, state: State, request: DraftRequest) -> Proposal:
        """Greedy draft tokens, samples in rows with a draw. The whole block is always computed: tokens do not depend on
        how many are asked. The kernels' own pass knows greedy tokens only."""
        own = BlockState.of(state)
        wanted = self._wanted(own, request)
        depth = max(wanted, default=0)
        if depth == 0:
            return Proposal([Draft()] * len(wanted))
        if self.packed is not None and self._head_packs() and request.draws is None:
            return self.packed.propose(own, request, wanted, reduced=self._packed_head())
        hidden = self.block_hidden(state, request)[:, :depth]
        return self._choose(own, request, hidden, wanted)

    def _choose(self, state: BlockState, request: DraftRequest, hidden: Tensor, wanted: tuple[int, ...]) -> Proposal:
        """Tokens of hidden (B, L, D), cut as `pick_tokens` does, with the confidence stated where one is."""
        head, picker = self._serving_head(state, request), Picker(request.draws)
        logits, stated = self._draft(hidden, head, self._anchors(request), picker)
        return self._proposal(head, picker, logits, stated, wanted)

    def _draft(
        self, hidden: Tensor, head: ServingHead, anchors: Tensor, picker: Picker
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, L, M) of hidden (B, L, D) after what the picker picks, and finite confidences (B, L) from the
        tokens before each; None: the tokens' own probabilities."""
        if self.correction is None and picker.draws is None:
            return head.logits(hidden), None
        return head.chain(anchors, hidden.shape[1], self._step(hidden, head), picker)[0], None

    def _step(self, hidden: Tensor, head: ServingHead) -> Step:
        """The logits of hidden (B, L, D) with the in-block correction, if there is one, position after position."""
        if self.correction is not None:
            return head.corrected(hidden, self.correction, self._embed)
        logits = head.logits(hidden)
        return lambda k, _: logits[:, k]

    def _head_packs(self) -> bool:
        """Whether the kernels can do a whole pass: an embedding they can read, a reduced vocabulary, at most a GRU,
        and an anchor that drafts nothing."""
        known = self.correction is None or isinstance(self.correction, GRUCorrection)
        known = known and not self.config.sample_from_anchor
        return known and self.draft_ids is not None and self.hooks.table is not None

    def cost(self, context_tokens: int) -> DraftCost:
        """Bytes as `State.nbytes` counts them; FLOPs of one full block and of one committed token."""
        cfg, shape = self.config, self._shape()
        dim, slots = cfg.hidden_size, cfg.num_slots
        state_bytes = sum(t.nbytes for t in self._fixed(1).values())
        state_bytes += sum(width * shape.token_bytes for width in self.windows)
        seen = sum(min(width, context_tokens) if width else context_tokens for width in self.windows)
        layer_weights = sum(p.numel() for name, p in self.layers.named_parameters() if ".memory." not in name)
        flops = 2 * slots * layer_weights + 4 * slots * cfg.num_heads * cfg.head_dim * (seen + slots * cfg.num_layers)
        flops += 2 * cfg.num_draft_tokens * dim * self._head_size
        flops += 2 * sum(p.numel() for part in (self.ridge,) if part is not None for p in part.parameters())
        if self.correction is not None:
            flops += 2 * cfg.num_draft_tokens * sum(p.numel() for p in self.correction.parameters())
        per_layer = 2 * dim * 2 * cfg.num_kv_heads * cfg.head_dim
        memory_propose, memory_commit = self._memory_flops()
        weight_bytes = sum(t.nbytes for t in (*self.parameters(), *self.buffers()))
        return DraftCost(
            state_bytes=state_bytes,
            kv_bytes_per_token=sum(shape.token_bytes for width in self.windows if not width),
            weight_bytes=weight_bytes + cfg.draft_vocab_size * dim * self.fc.weight.dtype.itemsize,
            propose_flops=flops + memory_propose,
            commit_flops_per_token=2 * self.fc.weight.numel() + cfg.num_layers * per_layer + memory_commit,
        )
