"""Tiny random checkpoints of the real transformers classes, one per model family, and the text they are fed.

Widths are multiples of 32, so that no elementwise kernel ends in a scalar tail and rows are bitwise invariant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models
from torch import Tensor

from hyflash.core import Rows, TargetOutput
from hyflash.targets import hf
from hyflash.text import Tokenizer

VOCAB, LAYERS, WINDOW, CONTEXT = 96, 3, 8, 256
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"head_dim": 8, "sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "layer_types": _MIXED,
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": _MIXED},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW}),
}


def family_dir(parent: Path, family: str, *, name: str = "model", seed: int = 0, **changes: Any) -> Path:
    """Save a random model of the family (96 tokens, 3 layers, width 32) under `parent`; weights by seed."""
    model_class, config_class, facts = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SIZES, **facts, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        for name_, parameter in model.named_parameters():
            if "bias" in name_ or "norm" in name_:  # fresh ones are 0 or 1 and would hide a forgotten term
                parameter.data += 0.2 * torch.randn_like(parameter)
    path = parent / f"{family}-{name}"
    model.save_pretrained(path)
    return path


def text(length: int, seed: int = 0) -> Tensor:
    """Random token ids (length,)."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def feed(target: hf.HFTarget, seq: int, ids: Tensor, widths: list[int], taps: tuple[int, ...] = ()) -> TargetOutput:
    """Feed ids in pieces; logits (T, V) and features (T, C, D) of all of them."""
    assert sum(widths) == len(ids)
    pieces = [
        target.forward(Rows(tokens=piece, seqs=(seq,), lengths=(len(piece),), taps=taps)) for piece in ids.split(widths)
    ]
    return TargetOutput(
        logits=torch.cat([p.logits for p in pieces]),  # type: ignore[misc]
        features=torch.cat([p.features for p in pieces]) if taps else None,  # type: ignore[misc]
    )


def char_tokenizer() -> Tokenizer:
    """One printable character a token, for models of 96 tokens."""
    core = Core(models.BPE(vocab={chr(33 + i): i for i in range(VOCAB - 1)} | {"~~": VOCAB - 1}, merges=[]))
    core.decoder = decoders.Fuse()
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=core), "characters")
