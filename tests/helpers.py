"""Tiny real things for tests: a Llama checkpoint with a byte-level tokenizer and a ChatML template, on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TINY_CONTEXT = 256


def tiny_tokenizer(*, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte (ids 4..259) behind four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|reserved|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_target_dir(
    parent: Path,
    *,
    name: str = "tiny",
    seed: int = 0,
    template: str | None = CHATML,
    num_layers: int = 2,
) -> Path:
    """A random Llama (width 32, vocabulary 260, context 256) with its tokenizer, saved to `parent/name`.

    Both backends can serve it.
    """
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TINY_CONTEXT,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    path = parent / name
    model.save_pretrained(path)
    tiny_tokenizer(template=template).save_pretrained(path)
    return path
