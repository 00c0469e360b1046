"""What a decoder of the Llama kind is made of, whatever file it came from.

In: nothing; `gguf_file.py` and `hf_files.py` fill it. Out: `DecoderSpec`, numbers and switches, and `Weights`, the
tensors by their place in the model. Matrices stay in their files until they are read. The native target and nothing
else uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyflash.errors import UserError
from hyflash.ops.gguf_rows import row_bytes

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""Matrices of a layer in the order of the kernels' slots."""
VECTORS = ("attn_norm", "ffn_norm", "attn_post_norm", "ffn_post_norm", "query_norm", "key_norm")
"""Vectors of a layer in the order of the kernels' slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotation of one kind of layer: radians per position of each pair."""

    frequencies: tuple[float, ...]  # rope_dim / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes and switches of a decoder."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    act: str
    """silu or gelu (tanh form)."""
    ropes: tuple[Rope, ...]
    rope_theta: float
    rope_interleaved: bool
    """Pairs (2i, 2i+1), as in GGUF files of the Llama family, else (i, i + rope_dim / 2)."""
    rope_scale: float = 1.0
    """Factor on both halves of a rotation (yarn, longrope)."""
    attn_scale: float
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    windows: tuple[int, ...]
    """Sliding window of each layer: tokens a token sees, itself included; 0 for all of them."""
    rope_of_layer: tuple[int, ...]
    """Index into `ropes` for each layer."""
    eos_token_ids: tuple[int, ...]

    def matrix_sizes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the matrices of a layer, by MATRICES."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "query": (queries, hidden),
            "key": (keys, hidden),
            "value": (keys, hidden),
            "output": (hidden, queries),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }

    def vector_sizes(self) -> dict[str, int]:
        """Lengths of the vectors that a layer of this family has, by VECTORS."""
        names = ["attn_norm", "ffn_norm"]
        if self.family.startswith("gemma"):
            names += ["attn_post_norm", "ffn_post_norm"]
        if self.family.startswith(("qwen3", "gemma3")):
            names += ["query_norm", "key_norm"]
        return {name: self.head_dim if name in ("query_norm", "key_norm") else self.hidden_size for name in names}

    def check(self, where: str) -> None:
        """Raise UserError for sizes that fit neither each other nor the kernels."""
        pairs = {len(rope.frequencies) for rope in self.ropes}
        numbers = [f for rope in self.ropes for f in rope.frequencies]
        numbers += [self.rms_norm_eps, self.rope_scale, self.attn_scale, self.attn_softcap, self.final_softcap]
        faults = {
            f"{self.num_heads} heads and {self.num_kv_heads} KV heads; expected whole groups": self.num_heads
            % self.num_kv_heads,
            f"heads of {self.head_dim} dimensions; expected a multiple of 16": self.head_dim % 16,
            f"rotations of {pairs} pairs in heads of {self.head_dim}": len(pairs) != 1
            or not 1 <= max(pairs) <= self.head_dim // 2,
            "numbers beyond any use among its scales and rotations": not all(
                math.isfinite(x) and 0 <= x <= 1e6 for x in numbers
            ),
            f"a window of {min(self.windows)} tokens": min(self.windows) < 0,
        }
        for fault, found in faults.items():
            if found:
                raise UserError(f"{where} has {fault}; the native target cannot run it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor where it lies in a file: `rows` rows of `row_bytes` bytes, one after the other."""

    path: Path
    offset: int
    type: str  # by `gguf_rows.BLOCKS`, or the file's own name for one that is not known there
    shape: tuple[int, ...]  # outputs first
    row_bytes: int

    def read(self, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """Rows first..last-1 in fresh memory, (rows, row_bytes). Raises UserError when the file has become shorter."""
        last = self.rows if last is None else last
        count = (last - first) * self.row_bytes
        try:
            out = np.fromfile(self.path, np.uint8, count, offset=self.offset + first * self.row_bytes)
        except OSError as err:
            raise UserError(f"cannot read {self.path}: {err.strerror or err}.") from err
        if len(out) != count:
            raise UserError(f"{self.path} became shorter while it was read; load it again.")
        return out.reshape(last - first, self.row_bytes)

    def view(self) -> NDArray[np.uint8]:
        """All rows as a map of the file, which costs memory only where it is looked at. Raises UserError likewise."""
        shape = (self.rows, self.row_bytes)
        try:
            return np.asarray(np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=shape))
        except (OSError, ValueError) as err:
            raise UserError(f"{self.path} is gone or became shorter ({err}); load it again.") from err

    @property
    def rows(self) -> int:
        """Outputs; a vector is one row."""
        return self.shape[0] if len(self.shape) > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A matrix as rows of GGUF blocks, in its file until it is read: one uint8 row for each output."""

    type: str  # of the rows given, by `gguf_rows.BLOCKS`
    num_outputs: int
    num_inputs: int
    stored: Stored
    first: int = 0
    """Row of the stored tensor where this matrix begins (several may share one)."""
    convert: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None = None
    """From stored rows to rows of `type`; None when they are the same."""
    bias: NDArray[np.float32] | None = None  # (num_outputs,)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.type, self.num_inputs)

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Rows first..last-1 in fresh memory, (rows, row_bytes)."""
        rows = self.stored.read(self.first + first, self.first + last)
        return rows if self.convert is None else self.convert(rows)

    @property
    def data(self) -> NDArray[np.uint8]:
        """All rows: a map of the file where they lie in it as they are, else fresh memory."""
        if self.convert is None:
            return self.stored.view()[self.first : self.first + self.num_outputs]
        return self.read(0, self.num_outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All tensors of a decoder. `head` may be the embedding itself."""

    embedding: Rows
    head: Rows
    final_norm: NDArray[np.float32]
    layers: tuple[Mapping[str, Rows], ...]  # by MATRICES
    vectors: tuple[Mapping[str, NDArray[np.float32]], ...]  # by VECTORS, absent ones left out

    def matrices(self) -> Iterator[tuple[str, Rows]]:
        """All matrices the kernels multiply with, by names such as `3.query` and `head`."""
        for index, layer in enumerate(self.layers):
            for name in MATRICES:
                yield f"{index}.{name}", layer[name]
        yield "head", self.head


def to_float(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows of F32, F16 or BF16 as float32."""
    if kind == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)


def frequencies(dim: int, base: float) -> list[float]:
    """Radians per position of each of the dim / 2 pairs of a rotation."""
    return [base ** (-2.0 * i / dim) for i in range(dim // 2)]
