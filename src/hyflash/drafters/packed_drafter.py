"""A block drafter on the CPU kernels: its layers, fusion, start, correction and reduced head with packed weights.

In: the drafter's own modules, which stay the one description of the network. Out: the steps `dflash.py` takes on torch
when it serves, to the rounding of packed weights. The weights are copies: whoever changes the modules packs anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyflash.core import Draft, DraftRequest, Proposal, TargetHooks
from hyflash.drafters.context import BlockState
from hyflash.drafters.vocab import WORDS, ReducedHead, head_logits, words_of
from hyflash.errors import HyflashError
from hyflash.layers import DraftLayer, GRUCorrection, RidgeStart, RMSNorm, TapNorm
from hyflash.ops.blocks import (
    Block,
    BlockParts,
    BlockRow,
    LayerParts,
    MemoryRead,
    MemoryWrite,
    TakeLayer,
    TakeParts,
    make_block,
    make_layer,
    make_take,
    run_block,
    run_layer,
    run_take,
)
from hyflash.ops.kernels import Kernels, Matrix, Ring, RowHead
from hyflash.ops.losses import best_logprobs

KEPT_ROWS = 2048
"""Head rows beside the static list that are kept from round to round; a context of 8192 tokens adds about 500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What a layer's recurrent memory is made of (`hyflash.PrefixMemory`)."""

    core: str
    queries: nn.Linear
    gates: nn.Linear
    keys: nn.Linear
    values: nn.Linear
    decay: nn.Linear
    strength: nn.Linear | None
    a_log: Tensor
    dt_bias: Tensor
    norm: RMSNorm
    out: nn.Linear


class PackedLayer:
    """A `layers.DraftLayer`, with its memory if it has one."""

    def __init__(self, kernels: Kernels, layer: DraftLayer, memory: MemoryParts | None, *, causal: bool) -> None:
        attention, mlp, before, after = (
            layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm,
        )  # fmt: skip
        keys, values = kernels.pack(attention.k_proj), kernels.pack(attention.v_proj)
        k_norm, read, write = attention.k_norm.weight.detach(), None, None
        if memory is not None:
            read = MemoryRead(
                width=memory.norm.weight.numel(),
                queries=kernels.pack(memory.queries),
                gates=kernels.pack(memory.gates),
                out=kernels.pack(memory.out),
                norm=memory.norm.weight.detach(),
                eps=memory.norm.eps,
            )
            write = MemoryWrite(
                core=memory.core,
                keys=kernels.pack(memory.keys),
                values=kernels.pack(memory.values),
                decay=kernels.pack(memory.decay),
                strength=None if memory.strength is None else kernels.pack(memory.strength),
                a_log=memory.a_log.detach(),
                dt_bias=memory.dt_bias.detach(),
            )
        self.take = TakeLayer(
            num_kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            k=keys,
            v=values,
            k_norm=k_norm,
            eps=attention.q_norm.eps,
            memory=write,
        )
        """What `commit` keeps of context features."""
        self.layer = make_layer(
            kernels,
            LayerParts(
                num_heads=attention.q_proj.out_features // attention.head_dim,
                num_kv_heads=self.take.num_kv_heads,
                head_dim=attention.head_dim,
                causal=causal,
                norm=before.weight.detach(),
                eps=before.eps,
                q_norm=attention.q_norm.weight.detach(),
                k_norm=k_norm,
                head_eps=attention.q_norm.eps,
                q=kernels.pack(attention.q_proj),
                k=keys,
                v=values,
                o=kernels.pack(attention.o_proj),
                mlp_norm=after.weight.detach(),
                mlp_eps=after.eps,
                gate=kernels.pack(mlp.gate_proj),
                up=kernels.pack(mlp.up_proj),
                down=kernels.pack(mlp.down_proj),
                memory=read,
            ),
        )


class PackedHead:
    """A `ReducedHead`: the static list packed, and as many single rows as lately were needed, so that a round need not
    make them anew."""

    def __init__(self, kernels: Kernels, reduced: ReducedHead) -> None:
        self.reduced = reduced
        self.static = kernels.pack_head(*reduced.static)
        self._place = np.full(len(reduced.outside), -1)  # of each token's row among the kept ones
        self._rows = torch.empty(KEPT_ROWS, reduced.static[0].shape[1])
        self._num_rows = 0

    def of_row(self, words: Tensor, anchor: int) -> RowHead:
        """Head of one context with its words (N,): the static list, the words, and the anchor."""
        ids = words_of(words, anchor, self.reduced.outside)
        places = self._place[ids]
        if places.size and places.min() < 0:
            self._keep(ids[places < 0], ids)
            places = self._place[ids]
        bias, token_ids = self.reduced.rows.bias, torch.from_numpy(ids)
        return RowHead(
            static=self.static,
            ids=self.reduced.ids,
            rows=self._rows,
            more=torch.from_numpy(places),
            more_bias=None if bias is None else bias[token_ids],
            more_ids=token_ids,
        )

    def _keep(self, missing: NDArray[np.int64], wanted: NDArray[np.int64]) -> None:
        """Add rows; where there is no room for them, drop all that are not wanted now."""
        if self._num_rows + len(missing) > len(self._rows):
            self._place[:] = -1
            self._num_rows, missing = 0, wanted
            if len(wanted) > len(self._rows):
                self._rows = torch.empty(2 * len(wanted), self._rows.shape[1])
        stop = self._num_rows + len(missing)
        self._rows[self._num_rows : stop] = self.reduced.rows(torch.from_numpy(missing))[0]
        self._place[missing] = np.arange(self._num_rows, stop)
        self._num_rows = stop


class PackedDrafter:
    """Packed weights of a whole block drafter on one `Kernels`."""

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[PackedLayer],
        *,
        fc: nn.Linear,
        tap_norm: TapNorm | None,
        hidden_norm: RMSNorm,
        ridge: RidgeStart | None,
        gru: GRUCorrection | None,
        norm: RMSNorm | None,
        mask: Tensor | None,
        num_slots: int,
        first_slot: int,
        hooks: TargetHooks,
    ) -> None:
        self._kernels, self._layers = kernels, tuple(layers)
        self._take = make_take(
            kernels,
            TakeParts(
                fuse=kernels.pack(fc),
                parts=fc.in_features // fc.out_features,
                tap_norm=None if tap_norm is None else tap_norm.weight.detach().flatten(),
                norm=hidden_norm.weight.detach(),
                eps=hidden_norm.eps,
                layers=[layer.take for layer in layers],
            ),
        )
        self._ridge, self._start = ridge, list[Matrix]()
        if ridge is not None:
            self._start = [kernels.pack(part) for part in ((ridge.down, ridge.up) if ridge.rank > 0 else (ridge.up,))]
            self._ones = torch.ones(ridge.num_inputs)
        self._norm, self._mask, self._hooks = norm, mask, hooks
        self._num_slots, self._first_slot = num_slots, first_slot
        self._gru, self._gru_eps = None, 0.0
        if gru is not None:
            inputs, own = (kernels.pack_rows(gru.gru.get_parameter(f"weight_{kind}_l0")) for kind in ("ih", "hh"))
            self._gru, self._gru_eps = (inputs, own, kernels.pack(gru.down), kernels.pack(gru.up)), gru.eps
        self._head: PackedHead | None = None
        self._block: Block | None = None

    def commit(
        self, state: BlockState, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], taps: Tensor
    ) -> None:
        """Take clean features (B, T, C, D), the first `lengths[b]` of each row, into stores and memories."""
        kept = [b for b, count in enumerate(lengths) if count]
        pieces = [taps[b, : lengths[b]] for b in kept]
        places = [
            store.place(rows[b], starts[b], lengths[b], self._memory(state, i, rows[b]))
            for i, store in enumerate(state.stores)
            for b in kept
        ]
        features = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        run_take(self._kernels, self._take, features, [lengths[b] for b in kept], places)

    def start(self, taps: Tensor, anchor: Tensor) -> Tensor:
        """`RidgeStart.forward`: taps (..., C, D) and the anchor's embedding (..., D) -> slot inputs (..., L, D)."""
        ridge = self._ridge
        if ridge is None:
            raise HyflashError("this drafter has no closed-form start.")
        x = torch.cat((taps.flatten(-2), anchor), dim=-1)
        parts = ridge.num_inputs // ridge.dim
        (x,) = self._kernels.dense(x, self._start[:1], norm=self._ones, parts=parts, eps=ridge.eps)
        for matrix in self._start[1:]:
            (x,) = self._kernels.dense(x, [matrix])
        return x.view(*x.shape[:-1], ridge.num_slots, ridge.dim)

    def run(self, x: Tensor, state: BlockState, rows: Sequence[int]) -> Tensor:
        """All layers: slots (B, S, D) -> (B, L, D). A slot that drafts nothing ends with the last layer."""
        seen = [self._seen(state, row) for row in rows]
        for i, packed in enumerate(self._layers):
            rings, memories = zip(*[own[i] for own in seen], strict=True)
            first = self._first_slot if i == len(self._layers) - 1 else 0
            x = run_layer(self._kernels, packed.layer, x, rings, memories, first)
        return x

    def propose(
        self, state: BlockState, request: DraftRequest, wanted: Sequence[int], *, reduced: ReducedHead
    ) -> Proposal:
        """Greedy tokens, `wanted[b]` of each row, cut at the first that is not finite, through a reduced head."""
        head = self._head_of(reduced)
        if self._block is None:
            self._block = self._new_block(head)
        asked, rows = [b for b, most in enumerate(wanted) if most], []
        anchors = request.anchors
        for b in asked:
            row = request.rows[b]
            if not 0 <= anchors[b] < self._hooks.info.vocab_size:
                raise IndexError(f"the anchor {anchors[b]} is outside 0 to {self._hooks.info.vocab_size - 1}")
            rows.append(
                BlockRow(
                    anchor=anchors[b],
                    num_tokens=wanted[b],
                    before=state.fixed["last"][row] if self._start else None,
                    head=head.of_row(state.fixed[WORDS][row], anchors[b]),
                    seen=self._seen(state, row),
                )
            )
        tokens, shares, found = run_block(self._kernels, self._block, rows)
        drafts = [Draft()] * len(wanted)
        for b, ids, rates, n in zip(asked, tokens.tolist(), shares.tolist(), found, strict=True):
            drafts[b] = Draft(ids[:n], rates[:n])
        cut = sum(n < row.num_tokens for n, row in zip(found, rows, strict=True))
        return Proposal(drafts, num_nonfinite=cut)

    def candidates(
        self, state: BlockState, request: DraftRequest, hidden: Tensor, count: int, *, reduced: ReducedHead
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids (B, L, K) of the `count` best tokens of hidden (B, L, D) by a reduced head."""
        packed, lists = self._head_of(reduced), []
        for row, anchor, states in zip(request.rows, request.anchors, hidden, strict=True):
            head = packed.of_row(state.fixed[WORDS][row], anchor)
            (static,) = self._kernels.dense(states, [head.static])
            more = head_logits(states, head.rows[head.more], head.more_bias)
            logprobs, columns = best_logprobs(torch.cat((static, more), dim=-1), count)
            lists.append((logprobs, torch.cat((head.ids, head.more_ids))[columns]))
        logprobs, ids = (torch.stack(parts) for parts in zip(*lists, strict=True))
        return logprobs, ids

    def take_head(self, reduced: ReducedHead) -> None:
        """Pack a reduced head, for `propose`."""
        self._block = self._new_block(self._head_of(reduced))

    def _head_of(self, reduced: ReducedHead) -> PackedHead:
        """The packed form of a reduced head, kept until another comes."""
        if self._head is None or self._head.reduced is not reduced:
            self._head, self._block = PackedHead(self._kernels, reduced), None
        return self._head

    def _seen(self, state: BlockState, row: int) -> list[tuple[Ring, Tensor | None]]:
        """What the slots of a row may see, layer by layer: the ring of its context, and its memory if there is one."""
        return [
            (store.ring(row, state.lengths[row], self._num_slots), self._memory(state, i, row))
            for i, store in enumerate(state.stores)
        ]

    @staticmethod
    def _memory(state: BlockState, layer: int, row: int) -> Tensor | None:
        memory = state.fixed.get(f"memory.{layer}")
        return None if memory is None else memory[row]

    def _new_block(self, head: PackedHead) -> Block:
        if self._hooks.table is None:
            raise HyflashError("the kernels cannot read this target's embedding.")
        ridge, norm = self._ridge, self._norm
        return make_block(
            self._kernels,
            BlockParts(
                num_slots=self._num_slots,
                layers=[layer.layer for layer in self._layers],
                start=self._start,
                start_parts=1 if ridge is None else ridge.num_inputs // ridge.dim,
                start_eps=0.0 if ridge is None else ridge.eps,
                mask=self._mask,
                norm=None if norm is None else norm.weight.detach(),
                norm_eps=0.0 if norm is None else norm.eps,
                head=head.static,
                ids=head.reduced.ids,
                gru=self._gru,
                gru_eps=self._gru_eps,
                table=self._hooks.table,
            ),
        )
