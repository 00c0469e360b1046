"""What published drafters compute, written down from their own code on Hugging Face's Qwen3 parts and by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as hf_rotate

from hyflash.core import TargetHooks


def zlab_reference(
    hooks: TargetHooks, config: dict[str, Any], weights: dict[str, torch.Tensor], batch: Any, anchor: int
) -> torch.Tensor:
    """Hidden states of all slots as z-lab's model computes them, on Hugging Face's Qwen3 parts, one sequence."""
    hf = Qwen3Config(
        hidden_size=config["hidden_size"],
        head_dim=config["head_dim"],
        num_attention_heads=config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
    )

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=config["rms_norm_eps"])
        module.weight.data = weights[f"{name}.weight"]
        return module(x).detach()

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(1, x.shape[0], -1, config["head_dim"]).transpose(1, 2)

    block, nested = config["block_size"], config["dflash_config"]
    mask = torch.full((block - 1,), nested["mask_token_id"])
    x = hooks.embed(torch.cat((batch.tokens[0, anchor : anchor + 1], mask)))
    c = norm("hidden_norm", batch.features[0, :anchor].flatten(1) @ weights["fc.weight"].T)
    cos, sin = Qwen3RotaryEmbedding(hf)(x, torch.arange(anchor + block)[None])
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}"
        h = norm(f"{at}.input_layernorm", x)
        both = torch.cat((c, h))
        q = norm(f"{at}.self_attn.q_norm", split(h @ weights[f"{at}.self_attn.q_proj.weight"].T))
        k = norm(f"{at}.self_attn.k_norm", split(both @ weights[f"{at}.self_attn.k_proj.weight"].T))
        v = split(both @ weights[f"{at}.self_attn.v_proj.weight"].T)
        q = hf_rotate(q, q, cos[:, anchor:], sin[:, anchor:])[0]
        k = hf_rotate(k, k, cos, sin)[0]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + mixed.transpose(1, 2).reshape(block, -1) @ weights[f"{at}.self_attn.o_proj.weight"].T
        h = norm(f"{at}.post_attention_layernorm", x)
        gate = torch.nn.functional.silu(h @ weights[f"{at}.mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ weights[f"{at}.mlp.up_proj.weight"].T)) @ weights[f"{at}.mlp.down_proj.weight"].T
    return norm("norm", x)


def domino_drafts(
    hooks: TargetHooks, weights: dict[str, Tensor], hidden: Tensor, anchor: int, *, shift_label: bool, pure: int
) -> list[int]:
    """Tokens of SpecForge's Domino head on hidden states of all slots (S, D), greedily, one after the other."""
    w_in, w_own = weights["prefix_gru.weight_ih_l0"], weights["prefix_gru.weight_hh_l0"]
    state, tokens = torch.zeros(w_own.shape[1]), [anchor]
    for slot in range(0 if shift_label else 1, len(hidden)):
        r, z, n = (hooks.embed(torch.tensor(tokens[-1])) @ w_in.T).chunk(3)
        own_r, own_z, own_n = (state @ w_own.T).chunk(3)
        r, z = (r + own_r).sigmoid(), (z + own_z).sigmoid()
        state = (1 - z) * (n + r * own_n).tanh() + z * state
        logits = hooks.head(hidden[slot])
        if slot >= pure + (0 if shift_label else 1):
            inner = torch.cat((hidden[slot], state)) @ weights["embed_proj.0.weight"].T
            logits = logits + torch.nn.functional.silu(inner) @ weights["embed_proj.2.weight"].T
        tokens.append(int(logits.argmax()))
    return tokens[1:]


def dspark_drafts(
    hooks: TargetHooks, weights: dict[str, Tensor], hidden: Tensor, anchor: int, *, kind: str
) -> tuple[list[int], list[float]]:
    """Tokens and confidences of DeepSpec's heads on hidden states (L, D), greedily, one after the other."""
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    state, tokens, stated = torch.zeros(w1.shape[1]), [anchor], []
    for h in hidden:
        before = w1[tokens[-1]]
        latent = before
        if kind == "gated":
            gate = torch.cat((h, before)) @ weights["markov_head.gate_proj.weight"].T
            latent = (gate + weights["markov_head.gate_proj.bias"]).sigmoid() * before
        elif kind == "rnn":
            joint = torch.cat((state, before, h)) @ weights["markov_head.joint_proj.weight"].T
            gate, candidate, out = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            latent = out.tanh()
        seen = torch.cat((h, before)) @ weights["confidence_head.proj.weight"][0]
        stated.append(float((seen + weights["confidence_head.proj.bias"][0]).sigmoid()))
        tokens.append(int((hooks.head(h) + latent @ w2.T).argmax()))
    return tokens[1:], stated


def eagle_drafts(
    hooks: TargetHooks, config: dict[str, Any], weights: dict[str, Tensor], batch: Any, anchor: int, *, num: int
) -> tuple[list[int], list[float]]:
    """Tokens of EAGLE-3's own code, greedily, and their probabilities, from tokens 0..anchor and features before it.

    Every step runs the whole sequence of pairs again: (feature t, token t + 1), the first token is dropped. `weights`
    have speculators' names, `config` is flat.
    """
    flag, dim, width = config.get, config["hidden_size"], config["head_dim"]

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=config["rms_norm_eps"])
        module.weight.data = weights[f"{name}.weight"]
        return module(x).detach()

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    def attend(x: Tensor) -> Tensor:
        count = len(x)
        angles = torch.arange(count)[:, None] * config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        cos, sin = (torch.cat((f(angles),) * 2, dim=-1)[None] for f in (torch.cos, torch.sin))
        q, k, v = (
            linear(f"layers.0.self_attn.{p}_proj", x).view(count, -1, width).transpose(0, 1) for p in ("q", "k", "v")
        )
        if flag("model_type") == "qwen3":
            q, k = norm("layers.0.self_attn.q_norm", q), norm("layers.0.self_attn.k_norm", k)
        q, k = hf_rotate(q[None], k[None], cos, sin)
        ago = torch.arange(count)[:, None] - torch.arange(count)
        mask = (ago >= 0) & (ago < (flag("sliding_window") or count))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v[None], attn_mask=mask, enable_gqa=True)
        return linear("layers.0.self_attn.o_proj", mixed[0].transpose(0, 1).reshape(count, -1))

    taps = batch.features[0, :anchor].flatten(1)
    if flag("norm_before_fc"):
        taps = norm("input_norm", taps)
    if flag("fc_norm"):
        taps = torch.cat([norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps.split(dim, dim=1))], dim=1)
    hidden, tokens = linear("fc", taps), batch.tokens[0, 1 : anchor + 1].tolist()
    listed = torch.arange(len(weights["lm_head.weight"])) + weights.get("d2t", torch.zeros((), dtype=torch.int64))
    drafts: list[int] = []
    stated: list[float] = []
    for _ in range(num):
        normed = norm("layers.0.hidden_norm", hidden)
        embeds = norm("layers.0.input_layernorm", hooks.embed(torch.tensor(tokens)))
        x = (normed if flag("norm_before_residual") else hidden) + attend(torch.cat((embeds, normed), dim=1))
        h = norm("layers.0.post_attention_layernorm", x)
        gate = torch.nn.functional.silu(linear("layers.0.mlp.gate_proj", h))
        x = (x + linear("layers.0.mlp.down_proj", gate * linear("layers.0.mlp.up_proj", h)))[-1:]
        out = norm("norm", x)
        probs = linear("lm_head", out)[0].softmax(-1)
        drafts.append(int(listed[probs.argmax()]))
        stated.append(float(probs.max()))
        hidden, tokens = torch.cat((hidden, out if flag("norm_output") else x)), [*tokens, drafts[-1]]
    return drafts, stated
