"""Tiny checkpoints for the native target, and the same weights as GGUF files, laid out as llama.cpp's converter does.

Heads have 16 dimensions, the least the kernels take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig

from families import WINDOW, family_dir

needs_kernels = pytest.mark.skipif(
    bool(__import__("hyflash.environment").environment.kernels_missing()),
    reason="hyflash-kernels is not built here",
)
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_HEAD = {"head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _HEAD),
    "llama-untied": ("llama", {**_HEAD, "tie_word_embeddings": False}),
    "llama-bias": ("llama", {**_HEAD, "attention_bias": True}),
    "llama-linear": ("llama", {**_HEAD, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-llama3": (
        "llama",
        {**_HEAD, "rope_parameters": {**_LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 32}},
    ),
    "llama-yarn": (
        "llama",
        {
            **_HEAD,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("mistral", _HEAD),
    "mistral-full": ("mistral", {**_HEAD, "sliding_window": None}),
    "qwen2": ("qwen2", _HEAD),
    "qwen3": ("qwen3", _HEAD),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "phi3": ("phi3", {"hidden_size": 64}),
    "phi3-partial": (
        "phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}
"""Name -> family and changes of its config. Every family and every kind of rotation that the native target serves."""
GGUF_MODELS = (
    "llama",
    "llama-llama3",
    "llama-untied",
    "mistral-full",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
)


def native_dir(parent: Path, model: str, **changes: Any) -> Path:
    """A random checkpoint of one of MODELS."""
    family, own = MODELS[model]
    return family_dir(parent, family, name=model, **{**own, **changes})


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def write_gguf(directory: Path, to: Path, *, kind: str = "F32", tokenizer: bool = False) -> Path:
    """The checkpoint in `directory` as a GGUF file whose matrices are of type `kind`."""
    config = AutoConfig.from_pretrained(directory)
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(to, arch)
    _write_keys(writer, config, arch)
    if tokenizer:
        _write_tokenizer(writer, config.vocab_size)
    quant = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _interleaved(values, heads)
        if arch.startswith("gemma") and "norm" in name:
            values = values + np.float32(1.0)
        if values.ndim > 1 and kind != "F32":
            data = gguf.quants.quantize(values, quant)
            writer.add_tensor(_name(name, arch), data, raw_dtype=quant)
        else:
            writer.add_tensor(_name(name, arch), np.ascontiguousarray(values))
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def _name(name: str, arch: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, *rest = name.split(".")
    part, ending = ".".join(rest[:-1]), rest[-1]
    names = {**_LAYER_NAMES, **(_GEMMA_NORMS if arch.startswith("gemma") else _NORMS)}
    return f"blk.{index}.{names[part]}.{ending}"


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of the rows of queries and keys: pairs (2i, 2i+1) instead of (i, i + half)."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def _llama3_factors(config: Any) -> NDArray[np.float32]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = config.head_dim
    plain = 1e4 ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return (plain / scaled.double().numpy()).astype(np.float32)


def _write_keys(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    if arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(WINDOW)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level tokenizer without merges whose first tokens are special."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>", *alphabet]
    tokens[vocab_size - 1 :] = ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(tokens) - 4))
    writer.add_token_merges(["a b"])
