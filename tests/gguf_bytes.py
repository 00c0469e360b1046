"""GGUF files byte by byte, with a note of where every field lies, so that tests can break each one of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_LETTERS = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}
FLOAT = (0, 1, 4)  # number, weights and bytes of a block of F32


class GgufBytes:
    """A file being written. `fields` holds (offset, size, what it is) of everything in the header."""

    def __init__(self, *, version: int = 3) -> None:
        self.data = bytearray()
        self.fields: list[tuple[int, int, str]] = []
        self._version = version

    def _put(self, letter: str, value: Any, what: str) -> None:
        piece = struct.pack("<" + letter, value)
        self.fields.append((len(self.data), len(piece), what))
        self.data += piece

    def _put_text(self, text: bytes, what: str) -> None:
        self._put("Q", len(text), "length")
        self.fields.append((len(self.data), len(text), what))
        self.data += text

    def _put_value(self, value: Any) -> None:
        kind = kind_of(value)
        self._put("I", kind, "type")
        if kind == STRING:
            self._put_text(value.encode(), "text")
        elif kind == ARRAY:
            item = kind_of(value[0]) if value else U32
            self._put("I", item, "type")
            self._put("Q", len(value), "count")
            for one in value:
                if item == STRING:
                    self._put_text(one.encode(), "text")
                else:
                    self._put(_LETTERS[item], one, "value")
        else:
            self._put(_LETTERS[kind], value, "value")

    def write(
        self, keys: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, int, int], Sequence[int], bytes]]
    ) -> bytes:
        """The whole file; a tensor is (type, shape with outputs first, bytes)."""
        self.data += b"GGUF"
        self.fields.append((0, 4, "magic"))
        self._put("I", self._version, "version")
        self._put("Q", len(tensors), "count")
        self._put("Q", len(keys), "count")
        for key, value in keys.items():
            self._put_text(key.encode(), "name")
            self._put_value(value)
        offset = 0
        for name, (kind, shape, content) in tensors.items():
            self._put_text(name.encode(), "name")
            self._put("I", len(shape), "dims")
            for size in reversed(shape):
                self._put("Q", size, "size")
            self._put("I", kind[0], "type")
            self._put("Q", offset, "offset")
            offset += -(-len(content) // 32) * 32
        for _, _, content in tensors.values():
            self.data += bytes(-len(self.data) % 32) + content
        return bytes(self.data)


def kind_of(value: Any) -> int:
    """GGUF's number for the type of a Python value."""
    if isinstance(value, (list, tuple)):
        return ARRAY
    return {bool: BOOL, int: U32, float: F32, str: STRING}[type(value)]


def model_keys(architecture: str, **changes: Any) -> dict[str, Any]:
    """Keys of a tiny model: 2 layers, width 32, 2 heads of 16 over 1 KV head. `a__b` in `changes` is the key `a.b`."""
    own: dict[str, Any] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    own |= {key.replace("__", "."): value for key, value in changes.items()}
    keys = {f"{architecture}.{key}": value for key, value in own.items() if value is not None}
    tokenizer = {"tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "c"], "tokenizer.ggml.eos_token_id": 3}
    return {"general.architecture": architecture, **keys, **tokenizer}


def model_tensors(architecture: str, *, vocab: int = 40, layers: int = 2) -> dict[str, NDArray[np.float32]]:
    """Float tensors of the same model, by GGUF's names."""
    random = np.random.default_rng(0)
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, 32), "output_norm.weight": (32,)}
    for index in range(layers):
        parts: dict[str, tuple[int, ...]] = {"attn_norm": (32,), "ffn_norm": (32,), "attn_output": (32, 32)}
        parts |= {"ffn_down": (32, 64)}
        if architecture == "phi3":
            parts |= {"attn_qkv": (64, 32), "ffn_up": (128, 32)}
        else:
            parts |= {
                "attn_q": (32, 32),
                "attn_k": (16, 32),
                "attn_v": (16, 32),
                "ffn_gate": (64, 32),
                "ffn_up": (64, 32),
            }
        if architecture.startswith("gemma"):
            parts |= {"post_attention_norm": (32,), "post_ffw_norm": (32,)}
        if architecture in ("qwen3", "gemma3"):
            parts |= {"attn_q_norm": (16,), "attn_k_norm": (16,)}
        sizes |= {f"blk.{index}.{name}.weight": shape for name, shape in parts.items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}


def as_floats(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, tuple[tuple[int, int, int], Any, bytes]]:
    """Tensors in the form `GgufBytes.write` takes, as F32."""
    return {name: (FLOAT, value.shape, value.tobytes()) for name, value in tensors.items()}


def write_model(
    to: Path, architecture: str = "llama", *, extra: Mapping[str, NDArray[np.float32]] | None = None, **changes: Any
) -> Path:
    """A tiny model as a file; `extra` tensors are added, `changes` are keys of the architecture."""
    keys = model_keys(architecture, **changes)
    tensors = model_tensors(architecture, layers=keys[f"{architecture}.block_count"]) | dict(extra or {})
    to.write_bytes(GgufBytes().write(keys, as_floats(tensors)))
    return to
