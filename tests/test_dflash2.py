"""dflash2: convolutions that stay inside their block, and published checkpoints that compute what their layout says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from block_fakes import DIM, VOCAB, ask, commit_prefix, fake_batch, fake_hooks, fake_info
from hyflash import checkpoint, drafters
from hyflash.core import TargetHooks
from hyflash.drafters.convolution import BlockConvolution, convolve
from hyflash.drafters.dflash2 import DFlash2Config, DrafterImpl
from hyflash.errors import UserError

NUM_LAYERS, BLOCK, GROUP, RANK, HEADS, KV_HEADS, HEAD_DIM, INNER, TOP_K = 2, 4, 8, 6, 4, 2, 8, 48, 5
CONFIG: dict[str, Any] = {  # keys and nesting of z-lab's fixture
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "is_causal": False,
    "dflash_config": {
        "block_size": BLOCK,
        "conv_group_size": GROUP,
        "conv_kernel_size": 2,
        "mask_token_id": 9,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
        "target_layer_ids": [1, 5],
    },
    "dtype": "float32",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "layer_types": ["sliding_attention"] * NUM_LAYERS,
    "max_position_embeddings": 512,
    "max_window_layers": NUM_LAYERS,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": VOCAB,
}


def hooks(**changes: object) -> TargetHooks:
    return fake_hooks(**{"num_layers": 8, **changes})


def shapes(
    layers: int,
    dim: int,
    taps: int,
    *,
    heads: int,
    kv: int,
    head: int,
    inner: int,
    group: int,
    rank: int,
    vocab: int,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a published DFlash 2."""
    out: dict[str, tuple[int, ...]] = {
        "candidate_selector.hidden_projection.weight": (rank, dim),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "fc.weight": (dim, taps * dim),
        "hidden_norm.weight": (dim,),
        "norm.weight": (dim,),
    }
    for i in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            out[f"layers.{i}.{name}.base_kernel"] = (2, 2, dim)
            out[f"layers.{i}.{name}.kernel_projection.weight"] = (4 * dim // group, dim)
        out[f"layers.{i}.input_layernorm.weight"] = out[f"layers.{i}.post_attention_layernorm.weight"] = (dim,)
        out[f"layers.{i}.mlp.down_proj.weight"] = (dim, inner)
        out[f"layers.{i}.mlp.gate_proj.weight"] = out[f"layers.{i}.mlp.up_proj.weight"] = (inner, dim)
        out[f"layers.{i}.self_attn.q_norm.weight"] = out[f"layers.{i}.self_attn.k_norm.weight"] = (head,)
        out[f"layers.{i}.self_attn.q_proj.weight"] = (heads * head, dim)
        out[f"layers.{i}.self_attn.k_proj.weight"] = out[f"layers.{i}.self_attn.v_proj.weight"] = (kv * head, dim)
        out[f"layers.{i}.self_attn.o_proj.weight"] = (dim, heads * head)
    return out


SMALL = {"heads": HEADS, "kv": KV_HEADS, "head": HEAD_DIM, "inner": INNER, "group": GROUP, "rank": RANK, "vocab": VOCAB}


def published(path: Path, *, drop: str = "", **nested: Any) -> dict[str, Tensor]:
    """Write a tiny checkpoint in the published layout with random weights, and return them."""
    random = torch.Generator().manual_seed(1)
    weights = {
        name: 0.3 * torch.randn(shape, generator=random) + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes(NUM_LAYERS, DIM, 2, **SMALL).items()
    }
    config = {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], **nested}}
    config["dflash_config"].pop(drop, None)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return weights


# ----------------------------------------------------------------------------------------- convolutions


def slow_convolution(x: Tensor, dynamic: Tensor, base: Tensor, group: int) -> Tensor:
    """One block x (S, D), one number at a time."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for channel in range(x.shape[1]):
            for tap in range(min(len(base), t + 1)):
                out[t, channel] += (base[tap, channel] + dynamic[t, tap, channel // group]) * x[t - tap, channel]
    return out


@pytest.mark.parametrize(("slots", "taps", "group"), [(1, 1, 4), (2, 2, 4), (5, 2, 2), (4, 3, 8), (3, 3, 1)])
def test_a_convolution_mixes_each_slot_with_those_before_it_in_its_block(slots: int, taps: int, group: int) -> None:
    dim, blocks = 8, 3
    x, base = torch.randn(2, blocks, slots, dim), torch.randn(taps, dim)
    dynamic = torch.randn(2, blocks, slots, taps, dim // group)
    got = convolve(x, dynamic, base)
    for b in range(2):
        for a in range(blocks):
            torch.testing.assert_close(got[b, a], slow_convolution(x[b, a], dynamic[b, a], base, group))


def test_a_fresh_convolution_is_the_identity() -> None:
    conv, x = BlockConvolution(8, kernel_size=2, group_size=4), torch.randn(1, 2, 5, 8)
    inside, dynamic = conv.before(x)
    assert torch.equal(inside, x)
    assert torch.equal(conv.after(x, dynamic), x)


@pytest.mark.parametrize("memory_core", ["none", "delta"])
def test_slots_reach_later_ones_through_convolutions_and_never_earlier_ones(memory_core: str) -> None:
    """With values of zero the attention is silent, so all that passes between slots passes through the taps."""
    torch.manual_seed(0)
    config = DFlash2Config(num_layers=1, num_draft_tokens=4, num_taps=2, memory_core=memory_core, window=6)
    drafter = DrafterImpl(config, fake_hooks()).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        drafter._layers()[0].self_attn.v_proj.weight.zero_()
    batch = fake_batch(drafter, lengths=(12,))
    inputs = drafter._slot_inputs

    def moved(slot: int) -> Tensor:
        def changed(*args: Any) -> Tensor:
            x = inputs(*args)
            x[:, :, slot] += 1.0
            return x

        drafter._slot_inputs = changed  # type: ignore[method-assign]
        with torch.no_grad():
            return drafter(batch).hidden

    with torch.no_grad():
        plain = drafter(batch).hidden
    for slot in range(5):
        changed = (moved(slot) - plain).abs().sum((0, 1, 3)) > 1e-6
        # Each convolution reaches one slot ahead: two around the MLP, and two around what a memory adds.
        reach = 2 if memory_core == "none" else 4
        assert changed.tolist() == [slot <= k <= slot + reach for k in range(1, 5)]


# ------------------------------------------------------------------------------------- published layout


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate (T, H, K) by halves."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def reference(weights: dict[str, Tensor], features: Tensor, anchor: int) -> tuple[Tensor, list[int]]:
    """Hidden states of slots 1.. and the greedy path in plain steps, from features (T, C, D) before the anchor."""
    at = len(features)
    x = hooks().embed(torch.tensor([anchor] + [9] * (BLOCK - 1)))
    c = rms_norm(features.flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    for i in range(NUM_LAYERS):
        w = {name.removeprefix(f"layers.{i}."): t for name, t in weights.items() if name.startswith(f"layers.{i}.")}

        def kernels(h: Tensor, name: str, w: dict[str, Tensor] = w) -> tuple[Tensor, Tensor]:
            both = (h @ w[f"{name}.kernel_projection.weight"].T).view(BLOCK, 2, 2, DIM // GROUP)
            return both[:, 0], both[:, 1]

        h = rms_norm(x, w["input_layernorm.weight"])
        first, second = kernels(h, "attention_conv")
        h = slow_convolution(h, first, w["attention_conv.base_kernel"][0], GROUP)
        both, where = torch.cat((c, h)), torch.arange(at + BLOCK)
        q = rms_norm((h @ w["self_attn.q_proj.weight"].T).view(BLOCK, HEADS, HEAD_DIM), w["self_attn.q_norm.weight"])
        k = rms_norm((both @ w["self_attn.k_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM), w["self_attn.k_norm.weight"])
        v = (both @ w["self_attn.v_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        q, k = turned(q, where[at:]), turned(k, where)
        share = HEADS // KV_HEADS
        weight = torch.einsum("qhk,thk->hqt", q, k.repeat_interleave(share, 1)).div(HEAD_DIM**0.5).softmax(-1)
        mixed = torch.einsum("hqt,thk->qhk", weight, v.repeat_interleave(share, 1)).flatten(1)
        mixed = mixed @ w["self_attn.o_proj.weight"].T
        x = x + slow_convolution(mixed, second, w["attention_conv.base_kernel"][1], GROUP)
        h = rms_norm(x, w["post_attention_layernorm.weight"])
        first, second = kernels(h, "mlp_conv")
        h = slow_convolution(h, first, w["mlp_conv.base_kernel"][0], GROUP)
        gated = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        added = gated @ w["mlp.down_proj.weight"].T
        x = x + slow_convolution(added, second, w["mlp_conv.base_kernel"][1], GROUP)
    hidden = rms_norm(x, weights["norm.weight"])[1:]
    selector = {name.removeprefix("candidate_selector."): t for name, t in weights.items()}
    path, before = [], anchor
    for h, logits in zip(hidden, hooks().head(hidden), strict=True):
        values, ids = logits.topk(TOP_K)
        gate = selector["predecessor_codebook"][before] * (h @ selector["hidden_projection.weight"].T)
        before = int(ids[(values + selector["successor_codebook"][ids] @ gate).argmax()])
        path.append(before)
    return hidden, path


def test_a_published_checkpoint_computes_and_drafts_what_its_layout_says(tmp_path: Path) -> None:
    weights = published(tmp_path)
    drafter = checkpoint.load(str(tmp_path), hooks())
    assert isinstance(drafter, DrafterImpl)
    assert drafter.config.window == 64
    assert drafter.config.window_counts_slots
    assert not drafter.config.causal_block
    batch = fake_batch(drafter, lengths=(21,))
    paths = set()
    for anchor in (0, 1, 7, 20):
        state = drafter.new_state(1)
        commit_prefix(drafter, state, batch, [anchor])
        request = ask(batch.tokens[:, anchor])
        hidden, path = reference(weights, batch.features[0, :anchor], int(batch.tokens[0, anchor]))
        torch.testing.assert_close(drafter.block_hidden(state, request)[0], hidden, atol=2e-4, rtol=2e-4)
        assert drafter.propose(state, request).drafts[0].tokens == path
        first = hooks().head(hidden).argmax(-1).tolist()
        paths.add(path == first)
    assert False in paths, "the selector must have chosen something"


def test_names_and_shapes_are_those_of_the_published_27b_drafter() -> None:
    """z-lab's fixture dflash2-safetensors-header.json: 5 layers, 5 taps, 81 tensors."""
    target = replace(fake_hooks(), info=fake_info(vocab_size=202048, hidden_size=6656, num_layers=52))
    with torch.device("meta"):
        drafter = DrafterImpl(
            DFlash2Config(
                num_layers=5, num_draft_tokens=15, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=19968,
                target_layer_ids=(1, 13, 25, 37, 49), tap_norm=False, mask_token_id=201818, window=2048,
            ),
            target,
        )  # fmt: skip
    want = shapes(5, 6656, 5, heads=32, kv=8, head=128, inner=19968, group=16, rank=256, vocab=202048)
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == want
    assert len(want) == 81
    assert want["layers.0.attention_conv.kernel_projection.weight"] == (1664, 6656)


def test_an_imported_drafter_is_saved_and_loaded_as_ours(tmp_path: Path) -> None:
    published(tmp_path / "theirs")
    drafter = checkpoint.load(str(tmp_path / "theirs"), hooks())
    checkpoint.save(drafter, tmp_path / "ours", dtype="fp32")
    loaded = checkpoint.load(str(tmp_path / "ours"), hooks())
    assert loaded.config == drafter.config
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in drafter.state_dict().items())
    assert checkpoint.target_warnings(tmp_path / "theirs", hooks().info)


@pytest.mark.parametrize("key", ["conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    published(tmp_path, drop=key)
    with pytest.raises(UserError, match=f"{key} is None; expected a whole number"):
        checkpoint.load(str(tmp_path), hooks())


def test_other_sizes_than_the_config_says_are_refused(tmp_path: Path) -> None:
    published(tmp_path, selector_rank=RANK + 1)
    with pytest.raises(UserError, match=r"wrong shapes: candidate_selector\.predecessor_codebook"):
        checkpoint.load(str(tmp_path), hooks())


@pytest.mark.parametrize(
    ("multiplier", "cap", "fits"),
    [(0.25, 20.0, True), (0.25, None, False), (None, 20.0, False), (0.3, 20.0, False), (0.25, 30.0, False)],
)
def test_what_a_config_says_of_the_head_must_be_what_the_target_does(
    multiplier: float | None, cap: float | None, fits: bool, tmp_path: Path
) -> None:
    published(tmp_path, output_multiplier=multiplier, final_logit_softcapping=cap)
    plain = hooks()
    target = replace(plain, head=lambda h: 20.0 * torch.tanh(0.25 * plain.head(h) / 20.0))
    if fits:
        assert checkpoint.load(str(tmp_path), target).config.model_dump()["output_multiplier"] == multiplier
    else:
        with pytest.raises(UserError, match="computes something else"):
            checkpoint.load(str(tmp_path), target)
    with pytest.raises(UserError, match="computes something else"):
        checkpoint.load(str(tmp_path), plain)


def test_convolutions_and_codebooks_cost_flops_and_no_state() -> None:
    plain = drafters.load_class("dflash")(drafters.load_class("dflash").Config(num_layers=1, num_taps=2), fake_hooks())
    drafter = DrafterImpl(DFlash2Config(num_layers=1, num_taps=2), fake_hooks())
    got, want = drafter.cost(100), plain.cost(100)
    assert (got.state_bytes, got.kv_bytes_per_token) == (want.state_bytes, want.kv_bytes_per_token)
    assert got.commit_flops_per_token == want.commit_flops_per_token
    kernels = 2 * (2 * 2 * DIM + 2 * 2 * DIM // 16 * DIM)
    selector = 256 * (5 * DIM + 16 + 4 * 16 * 16)
    assert got.propose_flops - want.propose_flops == 2 * 6 * kernels + 2 * selector
    assert got.weight_bytes - want.weight_bytes == 4 * (kernels + 256 * (DIM + 2 * VOCAB))
