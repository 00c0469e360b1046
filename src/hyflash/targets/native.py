"""Targets on our CPU kernels: GGUF files and safetensors directories of the Llama kind.

In: a file or directory (`load`), or a `DecoderSpec` and its `Weights`. Out: a `NativeTarget` whose rows have the same
bits at every width, batch, thread count and instruction set, because the kernels compute each row in one fixed order
(design, section 3). One call into native code per forward. The kernels keep every value that is not finite inside its
own row and the rows after it: a rejected row leaves nothing behind that a later one could read.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import hyflash_kernels as hk
from hyflash import environment
from hyflash.core import EmbeddingTable, Rows, TargetHooks, TargetInfo, TargetOutput
from hyflash.errors import HyflashError, UserError, nearest
from hyflash.hub import Progress
from hyflash.ops.kernels import Kernels
from hyflash.targets import decoder
from hyflash.targets.base import Exactness, Target
from hyflash.targets.decoder import DecoderSpec, Weights
from hyflash.targets.fingerprint import fingerprint as fingerprint_of
from hyflash.targets.gguf_file import GgufFile
from hyflash.targets.hf_files import HfFiles
from hyflash.targets.packed import Packed, load_packed, packed_key

_LOGITS = {"none": 0, "last": 1, "all": 2}


def load(
    path: str | Path,
    *,
    quant: str = "none",
    kv: str = "float16",
    num_threads: int | None = None,
    isa: str = "",
    name: str = "",
    report: Progress | None = None,
) -> NativeTarget:
    """Load a `.gguf` file or a model directory. Raises UserError for one that the kernels cannot serve.

    `quant` is for directories: q8_0, q4_0 or q4_1 on load, none keeps what is stored. Without `num_threads` all
    physical cores are tried against one, and the faster number is taken. `report` hears of weights being packed.
    """
    path = Path(path)
    if path.is_dir():
        files: GgufFile | HfFiles = HfFiles(path, quant=quant)
    elif quant != "none":
        raise UserError(f"quant is {quant!r}, and {path.name} is quantised already; leave it out for .gguf files.")
    else:
        files = GgufFile(path)
    spec = files.spec()
    weights = files.weights(spec)
    default = environment.num_threads()
    target = NativeTarget(
        spec,
        weights,
        load_packed(weights, packed_key(path, quant), report=report),
        name=name or (path.name if path.is_dir() else path.stem),
        fingerprint=fingerprint_of(path),
        num_threads=num_threads or default,
        kv=kv,
        isa=isa,
    )
    if num_threads is None and default > 1:
        target.choose_threads(default)
    return target


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Where a contiguous array lies."""
    return ctypes.c_void_p(array.ctypes.data)


class NativeTarget(Target):
    """A decoder on the CPU kernels, behind the target contract (`targets/base.py`)."""

    exactness: Exactness = "invariant"
    epsilon = 0.0

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        packed: Packed,
        *,
        name: str,
        fingerprint: str,
        num_threads: int,
        kv: str = "float16",
        isa: str = "",
    ) -> None:
        if kv not in hk.KV_TYPES:
            raise UserError(f"kv is {kv!r}; expected {' or '.join(hk.KV_TYPES)}.{nearest(kv, hk.KV_TYPES)}")
        self._lib = hk.library()
        self._isa = isa or self._lib.hk_isa().decode()
        self._spec, self._weights, self._packed = spec, weights, packed
        self._kv, self._num_threads = kv, num_threads
        self._vectors: list[NDArray[Any]] = []
        self._dense_head: Tensor | None = None
        self._lengths: dict[int, int] = {}  # tokens in the caches of open sequences, as the kernels have them
        self._model = self._lib.hk_model_new(ctypes.byref(_config(spec, kv)), self._isa.encode(), num_threads)
        if not self._model:
            raise UserError(
                f"the CPU kernels cannot start with instruction set {self._isa or '(unknown)'!r} and {num_threads} "
                "threads here; leave HYFLASH_KERNELS_ISA unset, or use --backend torch."
            )
        self._fill()
        types: Counter[str] = Counter()
        for layer in weights.layers:
            for rows in layer.values():
                types[rows.type] += rows.num_outputs * rows.row_bytes
        self.weight_type = types.most_common(1)[0][0]
        """GGUF's name of what most weights of the layers are stored as."""
        self.info = _info(spec, name=name, fingerprint=fingerprint, dtype=f"native {self.weight_type}, {kv} KV")

    def __del__(self) -> None:
        if getattr(self, "_model", None):  # absent when the constructor failed
            self._lib.hk_model_free(self._model)
            self._model = None

    # ------------------------------------------------------------------------------------ contract

    def open(self) -> int:
        """Start an empty sequence."""
        seq = int(self._lib.hk_seq_open(self._model))
        if seq < 0:
            raise HyflashError("no memory for another sequence.")
        self._lengths[seq] = 0
        return seq

    def close(self, seq: int) -> None:
        """Forget a sequence; its pages go to the next one."""
        self._check_open(seq)
        del self._lengths[seq]
        self._lib.hk_seq_close(self._model, seq)

    def length(self, seq: int) -> int:
        """Tokens in the sequence's cache."""
        self._check_open(seq)
        return self._lengths[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Drop cached tokens at positions >= length."""
        held = self.length(seq)
        if not 0 <= length <= held:
            raise ValueError(f"cannot truncate a cache of {held} tokens to {length}")
        if length < held:
            self._lib.hk_seq_truncate(self._model, seq, length)
            self._lengths[seq] = length

    def kv_bytes(self) -> int:
        """Bytes of KV the open sequences hold."""
        return int(self._lib.hk_kv_bytes(self._model))

    def kv_view(self, seq: int, layer: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Copies, made of the pages and of the stored type; see `Target.kv_view`."""
        first, last = self._kv_span(seq, layer, first, last)
        out = torch.empty(2, last - first, self.info.num_kv_heads, self.info.head_dim)
        for which in (0, 1):
            self._lib.hk_kv_read(self._model, seq, layer, which, first, last - first, out[which].data_ptr())
        keys, width = out[0], 2 * len(self._spec.ropes[0].frequencies)
        if self._spec.rope_interleaved:
            keys = torch.cat((keys[..., :width:2], keys[..., 1:width:2], keys[..., width:]), dim=-1)
        return keys, out[1]

    def kv_attend(self, seq: int, layer: int, first: int, last: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """By the kernels, in the pages themselves; see `Target.kv_attend`. Raises HyflashError without memory."""
        first, last = self._kv_span(seq, layer, first, last)
        self._check_queries(first, last, queries)
        if self._spec.rope_interleaved:
            half = len(self._spec.ropes[0].frequencies)
            turned = torch.stack((queries[..., :half], queries[..., half : 2 * half]), dim=-1).flatten(-2)
            queries = torch.cat((turned, queries[..., 2 * half :]), dim=-1)
        asked = queries.float().contiguous()
        out, lse = torch.empty_like(asked), torch.empty(asked.shape[:2])
        request = hk.KVAttention(
            seq=seq,
            layer=layer,
            num_queries=asked.shape[0],
            num_heads=asked.shape[1],
            first=first,
            last=last,
            q=asked.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
        )
        if self._lib.hk_kv_attend(self._model, ctypes.byref(request)):
            raise HyflashError("there is no memory to attend to the target's keys and values.")
        return out, lse

    def forward(self, rows: Rows) -> TargetOutput:
        """One forward of packed rows; see `Target.forward`."""
        self._check(rows)
        tokens = rows.tokens.to(torch.int64).contiguous()
        num = 0 if rows.logits == "none" else len(rows.seqs) if rows.logits == "last" else len(tokens)
        top = min(rows.top, self.info.vocab_size) if num else 0
        logits = torch.empty(num, self.info.vocab_size) if num and not top else None
        ids = torch.empty(num, top, dtype=torch.int32) if top else None
        values = torch.empty(num, top) if top else None
        features = torch.empty(len(tokens), len(rows.taps), self.info.hidden_size) if rows.taps else None
        ints = torch.tensor([*rows.seqs, *rows.lengths, *rows.taps], dtype=torch.int32)
        at, n = ints.data_ptr(), len(rows.seqs)
        batch = hk.Batch(
            tokens=tokens.data_ptr(),
            seqs=at,
            lengths=at + 4 * n,
            num_seqs=n,
            taps=at + 8 * n,
            num_taps=len(rows.taps),
            features=_pointer(features),
            logits_mode=_LOGITS[rows.logits],
            logits=_pointer(logits),
            num_top=top,
            top_ids=_pointer(ids),
            top_values=_pointer(values),
        )
        if self._lib.hk_forward(self._model, ctypes.byref(batch)):
            raise MemoryError(f"not enough memory for a forward of {len(tokens)} tokens of {n} sequences")
        for seq, new in zip(rows.seqs, rows.lengths, strict=True):
            self._lengths[seq] += new
        return TargetOutput(
            logits=logits,
            features=features,
            top_ids=None if ids is None else ids.tolist(),
            top_values=None if values is None else values.tolist(),
        )

    def hooks(self) -> TargetHooks:
        """Embedding and head for drafters."""
        table = EmbeddingTable(
            kind=self._weights.embedding.type,
            address=self._packed.embedding.ctypes.data,
            scale=self._spec.embed_scale,
        )
        return TargetHooks(
            info=self.info,
            embed=self._embed,
            head=self._head,
            head_rows=self._head_rows,
            table=table,
            rotation=self._rotation,
        )

    def kernels(self, weights: str) -> Kernels:
        """The kernels on this target's threads, for a drafter that runs between its forwards."""
        return Kernels(self._lib.hk_model_pool(self._model), self, weights=weights)

    def describe(self) -> dict[str, Any]:
        """Backend, weight type, KV type, instruction set, threads."""
        return {
            "backend": "native",
            "weights": self.weight_type,
            "kv": self._kv,
            "isa": self._isa,
            "num_threads": self._num_threads,
        }

    def memory(self) -> dict[str, int]:
        """Bytes of packed weights (with embedding and vectors), of the KV that sequences hold, of all memory kept for
        KV, and of what is kept between forwards."""
        arrays = (*self._packed.matrices.values(), self._packed.embedding, *self._vectors)
        return {
            "weights_bytes": sum(array.nbytes for array in arrays),
            "kv_bytes": self.kv_bytes(),
            "kv_reserved_bytes": int(self._lib.hk_kv_reserved_bytes(self._model)),
            "scratch_bytes": int(self._lib.hk_scratch_bytes(self._model)),
        }

    # ------------------------------------------------------------------------------------- threads

    def set_threads(self, num_threads: int) -> None:
        """Compute with this many threads from now on. Results do not depend on it."""
        if self._lib.hk_model_set_threads(self._model, num_threads):
            raise HyflashError(f"no memory for {num_threads} threads.")
        self._num_threads = num_threads

    def choose_threads(self, most: int, *, width: int = 4, num_repeats: int = 5, max_sec: float = 0.5) -> int:
        """Take `most` threads, or one where that is clearly faster: shared cores make threads wait for each other.

        Times forwards of `width` rows in turns, at most about `max_sec` in all.
        """
        times: dict[int, list[float]] = {most: [], 1: []}
        rows = Rows(tokens=torch.arange(width) % self.info.vocab_size, seqs=(self.open(),), lengths=(width,), top=1)
        began = time.perf_counter()
        for repeat in range(-1, num_repeats):  # the first pass warms up
            for number, seconds in times.items():
                self.set_threads(number)
                begin = time.perf_counter()
                self.forward(rows)
                if repeat >= 0:
                    seconds.append(time.perf_counter() - begin)
                self.truncate(rows.seqs[0], 0)
            if repeat >= 0 and time.perf_counter() - began > max_sec:
                break
        self.close(rows.seqs[0])
        alone, together = statistics.median(times[1]), statistics.median(times[most])
        self.set_threads(1 if alone < 0.9 * together else most)
        return self._num_threads

    # --------------------------------------------------------------------------------------- parts

    def _fill(self) -> None:
        """Hand all tensors to the kernels, which read them where they lie; they live as long as this object."""
        lib, spec, weights = self._lib, self._spec, self._weights
        for rope in spec.ropes:
            table = np.array(rope.frequencies, np.float64)
            lib.hk_model_add_rope(self._model, address(table), len(table))
        for index in range(spec.num_layers):
            lib.hk_model_set_layer(self._model, index, spec.windows[index], spec.rope_of_layer[index])
            for slot, name in enumerate(decoder.MATRICES):
                self._set_matrix(index, slot, f"{index}.{name}", weights.layers[index][name])
            for slot, name in enumerate(decoder.VECTORS):
                if name in weights.vectors[index]:
                    lib.hk_model_set_vector(self._model, index, slot, self._keep(weights.vectors[index][name]))
        lib.hk_model_set_vector(self._model, -1, 0, self._keep(weights.final_norm))
        self._set_matrix(-1, 0, "head", weights.head)
        lib.hk_model_set_embedding(self._model, hk.TYPES[weights.embedding.type], address(self._packed.embedding))

    def _set_matrix(self, layer: int, slot: int, name: str, rows: decoder.Rows) -> None:
        kind, packed = hk.TYPES[rows.type], address(self._packed.matrices[name])
        bias = None if rows.bias is None else self._keep(rows.bias)
        self._lib.hk_model_set_matrix(self._model, layer, slot, kind, rows.num_outputs, rows.num_inputs, packed, bias)

    def _rotation(self, layer: int) -> tuple[Sequence[float], float]:
        return self._spec.ropes[self._spec.rope_of_layer[layer]].frequencies, self._spec.rope_scale

    def _keep(self, vector: NDArray[np.float32]) -> ctypes.c_void_p:
        own = np.ascontiguousarray(vector, np.float32)
        self._vectors.append(own)
        return address(own)

    def _unpack(self, kind: str, data: NDArray[np.uint8], ids: Tensor) -> Tensor:
        """Rows `ids` (...) of stored rows as float32 (..., D)."""
        wanted, D = ids.to(torch.int64).contiguous(), self.info.hidden_size
        if wanted.numel():
            low, high = (int(x) for x in wanted.aminmax())
            if low < 0 or high >= len(data):
                raise IndexError(f"a token id is outside 0 to {len(data) - 1}")
        out = torch.empty(*ids.shape, D)
        self._lib.hk_unpack_rows(hk.TYPES[kind], D, data.ctypes.data, wanted.data_ptr(), wanted.numel(), out.data_ptr())
        return out

    def _embed(self, ids: Tensor) -> Tensor:
        rows = self._unpack(self._weights.embedding.type, self._packed.embedding, ids)
        return rows if self._spec.embed_scale == 1.0 else rows * self._spec.embed_scale

    def _head_rows(self, ids: Tensor) -> Tensor:
        return self._unpack(self._weights.head.type, self._packed.head, ids)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of final-normed states, as the target's own forward computes them; dense where gradients flow."""
        if hidden.requires_grad and torch.is_grad_enabled():
            return self._head_with_gradient(hidden)
        flat = hidden.reshape(-1, self.info.hidden_size).float().contiguous()
        out = torch.empty(len(flat), self.info.vocab_size)
        if len(flat) and self._lib.hk_head(self._model, flat.data_ptr(), len(flat), out.data_ptr()):
            raise MemoryError(f"not enough memory for the logits of {len(flat)} rows")
        return out.view(*hidden.shape[:-1], self.info.vocab_size)

    def _head_with_gradient(self, hidden: Tensor) -> Tensor:
        if self._dense_head is None:
            self._dense_head = self._head_rows(torch.arange(self.info.vocab_size))
        logits = hidden.float() @ self._dense_head.T * self._spec.logit_scale
        cap = self._spec.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _check_open(self, seq: int) -> None:
        if seq not in self._lengths:
            raise HyflashError(f"sequence {seq} is not open.")

    def _check(self, rows: Rows) -> None:
        num = sum(rows.lengths)
        if rows.tokens.shape != (num,) or min(rows.lengths, default=0) < 1 or len(set(rows.seqs)) != len(rows.seqs):
            raise HyflashError(f"malformed rows: {tuple(rows.tokens.shape)} tokens, lengths {rows.lengths}.")
        ids = rows.tokens.tolist()  # plain numbers, since there are few
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.info.vocab_size:
            raise HyflashError(f"token {low if low < 0 else high} is outside the vocabulary of {self.info.name}.")
        for tap in rows.taps:
            if not 0 <= tap <= self.info.num_layers:
                raise UserError(f"tap {tap} is not a layer of {self.info.name}; expected 0 to {self.info.num_layers}.")
        for seq, n in zip(rows.seqs, rows.lengths, strict=True):
            if self.length(seq) + n > self.info.max_context:
                raise UserError(
                    f"{self.length(seq) + n} tokens do not fit the context of {self.info.name}, "
                    f"{self.info.max_context} tokens; shorten the prompt."
                )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _config(spec: DecoderSpec, kv: str) -> hk.Config:
    return hk.Config(
        num_layers=spec.num_layers,
        hidden=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        act=hk.ACTS[spec.act],
        rope_dim=2 * len(spec.ropes[0].frequencies),
        rope_interleaved=int(spec.rope_interleaved),
        kv_type=hk.KV_TYPES[kv],
        eps=spec.rms_norm_eps,
        attn_scale=spec.attn_scale,
        attn_cap=spec.attn_softcap,
        final_cap=spec.final_softcap,
        embed_scale=spec.embed_scale,
        logit_scale=spec.logit_scale,
        rope_scale=spec.rope_scale,
    )


def _info(spec: DecoderSpec, *, name: str, fingerprint: str, dtype: str) -> TargetInfo:
    return TargetInfo(
        name=name,
        fingerprint=fingerprint,
        family=spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        max_context=spec.max_context,
        eos_token_ids=spec.eos_token_ids,
        dtype=dtype,
    )
