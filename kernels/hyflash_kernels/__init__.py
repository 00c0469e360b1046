"""CPU kernels of hyflash through ctypes: addresses in, status out. `include/hyflash_kernels.h` says what calls do.

In: addresses of memory that the caller owns and has checked. Out: numbers. `library()` loads the shared library
once; it raises OSError where it was not built for this machine.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
ABI = 4

TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
"""Weight types by GGUF's names and numbers."""
KV_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "int8": 3}
ACTS = {"silu": 0, "gelu": 1}


class Config(Structure):
    """hk_config."""

    _fields_ = [
        *[(n, c_int32) for n in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")],
        *[(n, c_int32) for n in ("vocab", "act", "rope_dim", "rope_interleaved", "kv_type")],
        *[(n, c_float) for n in ("eps", "attn_scale", "attn_cap", "final_cap", "embed_scale", "logit_scale")],
        ("rope_scale", c_float),
    ]


class Batch(Structure):
    """hk_batch."""

    _fields_ = [
        ("tokens", c_void_p),
        ("seqs", c_void_p),
        ("lengths", c_void_p),
        ("num_seqs", c_int32),
        ("taps", c_void_p),
        ("num_taps", c_int32),
        ("features", c_void_p),
        ("logits_mode", c_int32),
        ("logits", c_void_p),
        ("num_top", c_int32),
        ("top_ids", c_void_p),
        ("top_values", c_void_p),
        ("log_totals", c_void_p),
    ]


class Matrix(Structure):
    """hk_matrix."""

    _fields_ = [("type", c_int32), ("n", c_int64), ("k", c_int64), ("packed", c_void_p), ("bias", c_void_p)]


class BlockAttention(Structure):
    """hk_block_attention."""

    _fields_ = [
        *[(n, c_int32) for n in ("num_heads", "num_kv_heads", "head_dim", "num_slots", "num_queries", "causal")],
        *[(n, c_void_p) for n in ("q", "k", "v", "q_norm", "k_norm", "ring")],
        *[(n, c_int64) for n in ("window", "first", "held")],
        *[(n, c_void_p) for n in ("key_turns", "slot_turns")],
        *[(n, c_float) for n in ("eps", "scale")],
        ("out", c_void_p),
    ]


class KVAttention(Structure):
    """hk_kv_attention."""

    _fields_ = [
        *[(n, c_int32) for n in ("seq", "layer", "num_queries", "num_heads")],
        *[(n, c_int64) for n in ("first", "last")],
        *[(n, c_void_p) for n in ("q", "out", "lse")],
    ]


class DraftChain(Structure):
    """hk_draft_chain."""

    _fields_ = [
        ("hidden", c_void_p),
        ("num", c_int64),
        ("anchor", c_int64),
        *[(n, c_void_p) for n in ("gru_in", "gru_own", "down", "up")],
        ("eps", c_float),
        *[(n, c_void_p) for n in ("head", "head_ids", "rows", "more", "more_bias", "more_ids")],
        ("num_more", c_int64),
        ("embedding_type", c_int32),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("tokens", c_void_p),
        ("shares", c_void_p),
    ]


class DraftLayer(Structure):
    """hk_draft_layer."""

    _fields_ = [
        *[(n, c_int32) for n in ("num_heads", "num_kv_heads", "head_dim", "causal", "memory_heads", "memory_width")],
        *[(n, c_void_p) for n in ("norm", "q_norm", "k_norm", "memory_norm", "mlp_norm")],
        *[(n, c_float) for n in ("eps", "head_eps", "memory_eps", "mlp_eps")],
        *[(n, c_void_p) for n in ("q", "k", "v", "o", "gate", "up", "down", "memory_q", "memory_gate", "memory_out")],
    ]


class DraftRow(Structure):
    """hk_draft_row."""

    _fields_ = [
        ("ring", c_void_p),
        ("window", c_int64),
        ("first", c_int64),
        ("held", c_int64),
        ("key_turns", c_void_p),
        ("slot_turns", c_void_p),
        ("memory", c_void_p),
    ]


class DraftBlock(Structure):
    """hk_draft_block."""

    _fields_ = [
        ("dim", c_int64),
        ("num_slots", c_int64),
        ("start", c_void_p * 2),
        ("start_parts", c_int32),
        ("start_eps", c_float),
        ("start_norm", c_void_p),
        ("mask", c_void_p),
        ("layers", c_void_p),
        ("num_layers", c_int32),
        ("norm", c_void_p),
        ("norm_eps", c_float),
        ("chain", c_void_p),
    ]


class BlockRow(Structure):
    """hk_block_row."""

    _fields_ = [
        ("before", c_void_p),
        ("anchor", c_int64),
        ("num", c_int64),
        *[(n, c_void_p) for n in ("rows", "more", "more_bias", "more_ids")],
        ("num_more", c_int64),
        ("tokens", c_void_p),
        ("shares", c_void_p),
        ("found", c_int64),
    ]


class TakeLayer(Structure):
    """hk_take_layer."""

    _fields_ = [
        *[(n, c_void_p) for n in ("k", "v", "memory_k", "memory_v", "decay", "strength", "k_norm", "a_log", "dt_bias")],
        ("eps", c_float),
        *[(n, c_int32) for n in ("num_kv_heads", "head_dim", "core", "memory_heads", "memory_width")],
    ]


class DraftTake(Structure):
    """hk_draft_take."""

    _fields_ = [
        *[(n, c_void_p) for n in ("fuse", "tap_norm", "norm")],
        ("parts", c_int32),
        ("eps", c_float),
        ("layers", c_void_p),
        ("num_layers", c_int32),
    ]


class TakePlace(Structure):
    """hk_take_place."""

    _fields_ = [("ring", c_void_p), ("window", c_int64), ("place", c_int64), ("turns", c_void_p), ("memory", c_void_p)]


_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float
_CALLS = {
    "hk_abi": (_I, []),
    "hk_isa": (c_char_p, []),
    "hk_isa_runs": (_I, [c_char_p]),
    "hk_packed_size": (_L, [_I, _L, _L]),
    "hk_packed_version": (_I, []),
    "hk_pack": (None, [_I, _L, _L, _P, _P]),
    "hk_unpack_rows": (None, [_I, _L, _P, _P, _L, _P]),
    "hk_quantize_row": (_I, [_I, _L, _P, _P]),
    "hk_pool_new": (_P, [_I]),
    "hk_pool_free": (None, [_P]),
    "hk_pool_ping_pong": (c_double, [_P]),
    "hk_bench": (c_double, [c_char_p, _I, _I, _P, _L]),
    "hk_linear": (_I, [c_char_p, _P, _I, _P, _L, _L, _P, _L, _P]),
    "hk_dense": (_I, [_P, _P, _L, _P, _I, _F, _P, _I, _P]),
    "hk_mlp": (_I, [_P, _P, _L, _P, _F, _P, _P, _P, _I, _P]),
    "hk_attend_block": (_I, [_P, POINTER(BlockAttention)]),
    "hk_ring_append": (None, [_P, _P, _P, _F, _L, _I, _I, _P, _L, _L]),
    "hk_memory_write": (_I, [_P, _I, _P, _P, _P, _P, _P, _P, _P, _L, _I, _I]),
    "hk_memory_read": (_I, [_P, _P, _P, _P, _P, _F, _L, _I, _I, _P]),
    "hk_draft_layer_run": (_I, [_P, POINTER(DraftLayer), _P, _L, _L, _L, POINTER(DraftRow), _P]),
    "hk_draft": (_L, [_P, POINTER(DraftChain)]),
    "hk_draft_block_run": (_I, [_P, POINTER(DraftBlock), POINTER(BlockRow), _L, POINTER(DraftRow)]),
    "hk_draft_take_run": (_I, [_P, POINTER(DraftTake), _P, _P, _L, POINTER(TakePlace)]),
    "hk_model_new": (_P, [POINTER(Config), c_char_p, _I]),
    "hk_model_free": (None, [_P]),
    "hk_model_set_threads": (_I, [_P, _I]),
    "hk_model_pool": (_P, [_P]),
    "hk_model_set_matrix": (None, [_P, _I, _I, _I, _L, _L, _P, _P]),
    "hk_model_set_vector": (None, [_P, _I, _I, _P]),
    "hk_model_set_layer": (None, [_P, _I, _I, _I]),
    "hk_model_add_rope": (None, [_P, _P, _I]),
    "hk_model_set_embedding": (None, [_P, _I, _P]),
    "hk_seq_open": (_I, [_P]),
    "hk_seq_close": (None, [_P, _I]),
    "hk_seq_truncate": (None, [_P, _I, _L]),
    "hk_kv_bytes": (_L, [_P]),
    "hk_kv_reserved_bytes": (_L, [_P]),
    "hk_scratch_bytes": (_L, [_P]),
    "hk_forward": (_I, [_P, POINTER(Batch)]),
    "hk_head": (_I, [_P, _P, _L, _P]),
    "hk_kv_read": (None, [_P, _I, _I, _I, _L, _L, _P]),
    "hk_kv_attend": (_I, [_P, POINTER(KVAttention)]),
}


@cache
def library() -> ctypes.CDLL:
    """The shared library with its prototypes. Raises OSError when it is missing, foreign or of another version."""
    name = {"win32": "hyflash_kernels.dll", "darwin": "libhyflash_kernels.dylib"}.get(
        sys.platform, "libhyflash_kernels.so"
    )
    # An editable install keeps the library apart from this file; then the package has two folders.
    found = [path for path in (Path(folder) / name for folder in __path__) if path.exists()]
    if not found:
        raise OSError(f"hyflash-kernels is here without its library {name}; build it: pip install ./kernels")
    out = ctypes.CDLL(str(found[0]))
    if out.hk_abi() != ABI:
        raise OSError(f"{found[0]} has interface {out.hk_abi()}, expected {ABI}; build hyflash-kernels again")
    for call_name, (result, arguments) in _CALLS.items():
        call = getattr(out, call_name)
        call.restype, call.argtypes = result, arguments
    return out
