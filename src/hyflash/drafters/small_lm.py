"""A small language model that reads a compact memory: a Llama or Qwen2 decoder whose slots have keys of their own.

In: token embeddings, first of tokens and then of slots (`compaction.py`), and keys and values of earlier ones. Out:
hidden states of the tokens. A slot runs through the same weights as a token but for the projections to its keys and
values, which mirror those of tokens (MASW, arXiv 2608.30252). Parameter names are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyflash.core import TargetInfo
from hyflash.drafters.mirrors import mirror, with_mirrors
from hyflash.drafters.zlab import rope_theta, whole
from hyflash.errors import UserError
from hyflash.layers import MLP, RMSNorm, init_linear
from hyflash.ops.rope import rotate

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
PADDING = 512
"""Most rows by which embeddings of one tokenizer differ: Qwen2.5 has 151,936 up to 3B and 152,064 from 7B on."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "pretraining_tp": (None, 1),
}
"""What a config may say beside its sizes without changing the forward."""
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
_OLD_BASE = {"rope_theta": 10_000.0}
"""What the first Llamas leave unsaid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one layer."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    bias: bool
    """Of queries, keys and values, as Qwen2 has it."""
    mirrored: bool
    """Whether there are slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all layers of one pass share."""

    cos: Tensor  # (B, N, K) of tokens and slots
    sin: Tensor
    mask: Tensor  # (B, 1, N, M + N) bool, True = visible
    num_tokens: int  # of N; the rest are slots
    held: Tensor | None  # (layers, B, >= M + N, 2, G, K): keys and values of M earlier entries; new ones go behind them
    num_held: int  # M


class SlotAttention(nn.Module):
    """Causal attention with grouped keys; slots have keys and values by mirrored projections."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, inner, width = sizes.hidden, sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q_proj = init_linear(nn.Linear(dim, inner, bias=sizes.bias))
        self.k_proj = init_linear(nn.Linear(dim, width, bias=sizes.bias))
        self.v_proj = init_linear(nn.Linear(dim, width, bias=sizes.bias))
        self.o_proj = init_linear(nn.Linear(inner, dim, bias=False))
        if sizes.mirrored:
            self.slot_k_proj = mirror(self.k_proj)
            self.slot_v_proj = mirror(self.v_proj)

    def keys_values(self, x: Tensor, reading: Reading) -> Tensor:
        """Rotated keys and values (B, N, 2, G, K) of normed x (B, N, D)."""
        shape = (*x.shape[:2], -1, self.head_dim)
        tokens, slots = x[:, : reading.num_tokens], x[:, reading.num_tokens :]
        keys, values = self.k_proj(tokens), self.v_proj(tokens)
        if slots.shape[1]:
            keys = torch.cat((keys, self.slot_k_proj(slots)), dim=1)
            values = torch.cat((values, self.slot_v_proj(slots)), dim=1)
        return torch.stack((rotate(keys.view(shape), reading.cos, reading.sin), values.view(shape)), dim=2)

    def forward(self, x: Tensor, memory: Tensor, reading: Reading) -> Tensor:
        """Queries x (B, N, D), all keys and values (B, M + N, 2, G, K) -> (B, N, D)."""
        queries = self.q_proj(x).view(*x.shape[:2], -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(
            rotate(queries, reading.cos, reading.sin).transpose(1, 2),
            memory[:, :, 0].transpose(1, 2),
            memory[:, :, 1].transpose(1, 2),
            attn_mask=reading.mask,
            enable_gqa=True,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class SlotLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.self_attn = SlotAttention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.mlp = MLP(sizes.hidden, sizes.inner)

    def forward(self, x: Tensor, reading: Reading, index: int, *, keys_only: bool) -> Tensor:
        """(B, N, D) -> (B, N, D); with `keys_only` nothing but keys and values are made, where `held` keeps them."""
        normed = self.input_layernorm(x)
        memory = self.self_attn.keys_values(normed, reading)
        if reading.held is not None:
            own, stop = reading.held[index], reading.num_held + x.shape[1]
            own[:, reading.num_held : stop] = memory
            memory = own[:, :stop]
        if keys_only:
            return x
        x = x + self.self_attn(normed, memory, reading)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def read_config(config: Mapping[str, Any], info: TargetInfo, *, directory: Path) -> dict[str, Any]:
    """Sizes from the config.json of a Llama or Qwen2, whose tokens are the target's. Raises UserError."""
    where = str(directory / "config.json")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"{where}: model_type is {family!r}; a compact drafter reads {' and '.join(FAMILIES)} models and its own "
            "checkpoints."
        )
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise UserError(f"{where}: {key} is {config[key]!r}, which a compact drafter cannot honour.")
    if family == "llama" and config.get("attention_bias"):
        raise UserError(f"{where}: attention_bias is true in a llama model, which a compact drafter cannot honour.")
    out: dict[str, Any] = {ours: whole(config, theirs, where) for ours, theirs in _SIZES.items()}
    heads = out["num_heads"]
    out |= {
        "num_kv_heads": whole(config, "num_key_value_heads", where, heads),
        "head_dim": whole(config, "head_dim", where, out["hidden_size"] // heads),
        "rope_theta": rope_theta(config if "rope_parameters" in config else {**_OLD_BASE, **config}, where),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "attention_bias": family == "qwen2",
        "tied_head": bool(config.get("tie_word_embeddings", False)),
    }
    _check_vocab(out["vocab_size"], info, directory)
    return out


def own_names(weights: Mapping[str, Tensor], *, mirrored: bool, tied: bool) -> dict[str, Tensor]:
    """Tensors of a transformers checkpoint under our names, with a mirror beside each key and value projection."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        short = name.removeprefix("model.")
        if short.endswith("rotary_emb.inv_freq") or (tied and short == "lm_head.weight"):
            continue
        out[short] = tensor
    return with_mirrors(out) if mirrored else out


def _check_vocab(found: int, info: TargetInfo, directory: Path) -> None:
    """Equal sizes, or sizes that only padding sets apart: every token of the model's own tokenizer is in both."""
    want = info.vocab_size
    if found == want or (abs(found - want) <= PADDING and 0 < _num_tokens(directory) <= min(found, want)):
        return
    raise UserError(
        f"{directory}: has a vocabulary of {found} tokens and target {info.name!r} one of {want}; expected the same "
        "tokenizer. Take a smaller model of the target's own family as drafter."
    )


def _num_tokens(directory: Path) -> int:
    """One more than the highest id in a directory's tokenizer.json; 0 where that cannot be told."""
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True).values()
    except Exception:  # the library raises bare ones, for a file that is not there too
        return 0
    return max(ids, default=-1) + 1
