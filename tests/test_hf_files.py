"""Model directories for the native target: every family's tensors and switches, quantised on request, or refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from families import WINDOW, family_dir
from hyflash.errors import UserError
from hyflash.targets.decoder import MATRICES, DecoderSpec, Rows, Weights, to_float
from hyflash.targets.hf_files import HfFiles
from hyflash.targets.safetensors_read import INDEX, SINGLE
from native_models import MODELS, native_dir, needs_kernels


def read(path: Path, *, quant: str = "none") -> tuple[DecoderSpec, Weights]:
    files = HfFiles(path, quant=quant)
    spec = files.spec()
    return spec, files.weights(spec)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    return str(error.value)


def floats(rows: Rows) -> np.ndarray[Any, np.dtype[np.float32]]:
    return to_float(rows.type, rows.data)


def set_config(path: Path, **changes: Any) -> Path:
    """Change keys of config.json as an editor would; None removes a key."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_dir(tmp_path_factory.mktemp("hf"), "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


# ------------------------------------------------------------------------------------------- families

_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_family_gives_its_matrices_vectors_and_biases(tmp_path: Path, model: str) -> None:
    path = native_dir(tmp_path, model)
    spec, weights = read(path)
    tensors = {name: tensor.numpy() for name, tensor in load_file(path / SINGLE).items()}
    used = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} & set(tensors)
    plus = np.float32(1.0 if spec.family.startswith("gemma") else 0.0)
    assert np.array_equal(floats(weights.embedding), tensors["model.embed_tokens.weight"])
    assert np.array_equal(floats(weights.head), tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]))
    assert np.array_equal(weights.final_norm, tensors["model.norm.weight"] + plus)
    for index, (layer, vectors) in enumerate(zip(weights.layers, weights.vectors, strict=True)):
        at = f"model.layers.{index}."
        parts = dict(zip(MATRICES, _NAMES, strict=True))
        for slot, name in parts.items():
            name = f"{at}{'mlp' if slot in ('gate', 'up', 'down') else 'self_attn'}.{name}"
            if f"{name}.weight" in tensors:
                used.add(f"{name}.weight")
                assert np.array_equal(floats(layer[slot]), tensors[f"{name}.weight"])
            bias = tensors.get(f"{name}.bias")
            used |= {f"{name}.bias"} & set(tensors)
            assert (bias is None) == (layer[slot].bias is None)
            assert bias is None or np.array_equal(bias, layer[slot].bias)  # type: ignore[arg-type]
        if spec.family == "phi3":
            whole = {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}
            for name, slots in whole.items():
                used.add(f"{at}{name}.weight")
                assert np.array_equal(np.concatenate([floats(layer[s]) for s in slots]), tensors[f"{at}{name}.weight"])
        assert {name: len(vector) for name, vector in vectors.items()} == spec.vector_sizes()
        norms = sorted(n for n in tensors if n.startswith(at) and "norm" in n)
        used |= set(norms)
        ours = sorted(v.tobytes() for v in vectors.values())
        assert ours == sorted((tensors[n] + plus).astype(np.float32).tobytes() for n in norms)
    assert used == set(tensors)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {}, [0, 0, 0]),
        ("mistral", {}, [WINDOW] * 3),
        ("mistral", {"sliding_window": None}, [0, 0, 0]),
        ("mistral", {"sliding_window": 4096}, [0, 0, 0]),
        ("phi3", {}, [WINDOW] * 3),
        ("qwen2", {}, [0, WINDOW, WINDOW]),
        ("qwen2", {"use_sliding_window": False}, [0, 0, 0]),
        ("qwen3", {}, [0, 0, 0]),
        ("gemma2", {"layer_types": None}, [WINDOW, 0, WINDOW]),
        ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7}, [WINDOW] * 5 + [0, WINDOW]),
    ],
)
def test_windows_lie_where_transformers_has_them(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: list[int]
) -> None:
    changes = {"head_dim": 16, "hidden_size": 64} | changes
    spec, _ = read(family_dir(tmp_path, family, **changes))
    assert list(spec.windows) == windows


def test_gemma_switches_come_from_the_config(tmp_path: Path) -> None:
    spec, _ = read(family_dir(tmp_path, "gemma2"))
    assert (spec.attn_softcap, spec.final_softcap, spec.act) == (5.0, 3.0, "gelu")
    assert spec.attn_scale == pytest.approx(24**-0.5)
    assert spec.embed_scale == pytest.approx(32**0.5)
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    tables = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    spec, _ = read(family_dir(tmp_path, "gemma3_text", rope_parameters=tables))
    ropes = [spec.ropes[index].frequencies[1] for index in spec.rope_of_layer]
    assert ropes == pytest.approx([1e4 ** (-1 / 8), 1e6 ** (-1 / 8) / 8, 1e4 ** (-1 / 8)])
    assert spec.rope_theta == 1e6


def test_longrope_ends_where_its_short_factors_do(tmp_path: Path) -> None:
    short = [1.0 + 0.1 * i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": [9.0] * 8}
    sizes = {"hidden_size": 64, "original_max_position_embeddings": 64}
    spec, _ = read(family_dir(tmp_path, "phi3", rope_parameters=rope, **sizes))
    assert spec.max_context == 64
    assert spec.ropes[0].frequencies[3] == pytest.approx(1e4 ** (-3 / 8) / 1.3, rel=1e-6)
    assert spec.rope_scale == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_a_gemma_with_a_vision_tower_gives_its_text_model(tmp_path: Path) -> None:
    path = native_dir(tmp_path, "gemma3_text")
    expected = floats(read(path)[1].layers[2]["down"]).copy()
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / SINGLE)
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file(renamed | {"vision_tower.x.weight": torch.zeros(3)}, path / SINGLE)
        (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
        spec, weights = read(path)
        assert spec.family == "gemma3_text"
        assert np.array_equal(floats(weights.layers[2]["down"]), expected)


def test_end_tokens_come_from_both_configs(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4, 1000]}))
    assert read(copy)[0].eos_token_ids == (2, 4, 5)
    (copy / "generation_config.json").write_text("{")
    assert "not valid JSON" in refused(copy)


# -------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_types_are_kept_and_vectors_become_float32(copy: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(copy / SINGLE).items()}
    save_file(tensors, copy / SINGLE)
    _, weights = read(copy)
    name = "model.layers.1.mlp.down_proj.weight"
    assert weights.layers[1]["down"].type == {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[str(dtype)[6:]]
    assert np.array_equal(floats(weights.layers[1]["down"]), tensors[name].float().numpy())
    norm = tensors["model.layers.1.input_layernorm.weight"].float().numpy()
    assert np.array_equal(weights.vectors[1]["attn_norm"], norm)


@needs_kernels
@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_1"])
def test_matrices_are_quantised_as_ggml_does_it_and_the_head_to_8_bits(tmp_path: Path, quant: str) -> None:
    path = native_dir(tmp_path, "llama-untied")
    _, weights = read(path, quant=quant)
    plain = read(path)[1]
    for slot in MATRICES:
        rows, kind = weights.layers[0][slot], gguf.GGMLQuantizationType[quant.upper()]
        assert rows.type == quant.upper()
        assert np.array_equal(rows.data, gguf.quants.quantize(floats(plain.layers[0][slot]), kind))
        assert np.array_equal(rows.read(3, 8), rows.data[3:8])
    assert weights.head.type == weights.embedding.type == "Q8_0"


@needs_kernels
def test_rows_that_fill_no_whole_blocks_stay_as_they_are_stored(tmp_path: Path) -> None:
    path = family_dir(tmp_path, "llama", head_dim=16, intermediate_size=72)
    _, weights = read(path, quant="q4_1")
    assert (weights.layers[0]["down"].type, weights.layers[0]["up"].type) == ("F32", "Q4_1")


def test_shards_are_one_model_and_must_be_complete(copy: Path) -> None:
    before = [floats(read(copy)[1].layers[2][slot]).copy() for slot in MATRICES]
    tensors = load_file(copy / SINGLE)
    (copy / SINGLE).unlink()
    names = sorted(tensors)
    where = {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == shard}, copy / shard)
    (copy / INDEX).write_text(json.dumps({"weight_map": where}))
    after = [floats(read(copy)[1].layers[2][slot]) for slot in MATRICES]
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
    (copy / INDEX).write_text(json.dumps({"weight_map": where | {"model.x": "model-1.safetensors"}}))
    assert "lacks 1 tensors of its index, model.x" in refused(copy)
    (copy / INDEX).write_text(json.dumps({"weight_map": where | {"model.x": "../other.safetensors"}}))
    assert "expected files beside it" in refused(copy)
    (copy / INDEX).write_text(json.dumps({"weight_map": where}))
    (copy / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refused(copy)
    (copy / INDEX).write_text("[]")
    assert "holds a list" in refused(copy)
    (copy / INDEX).unlink()
    assert "has neither" in refused(copy)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "--backend torch"),
        ({"model_type": None}, "holds a None model"),
        ({"hidden_act": "relu"}, "activation is 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "parts of"),
        ({"num_key_value_heads": 3}, "whole groups"),
        ({"head_dim": 24}, "multiple of 16"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
        ({"vocab_size": 97}, "expected F32, F16 or BF16 [97, 32]"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3."),
        ({"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
        ({"attention_bias": True}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_name(copy: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refused(set_config(copy, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ("gemma2", {"layer_types": ["full_attention", "full_attention", "linear_attention"]}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_switches_of_a_family_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    path = family_dir(tmp_path, family, **({"head_dim": 16} if family == "mistral" else {}))
    assert message in refused(set_config(path, **changes))


def test_a_field_that_a_newer_transformers_might_add_is_refused_unless_it_is_at_its_default(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyflash.targets import hf_spec

    monkeypatch.setattr(hf_spec, "_SERVED", hf_spec._SERVED - {"mlp_bias", "num_key_value_heads"})
    assert "sets num_key_value_heads, which" in refused(copy)  # mlp_bias has its default


def test_keys_that_nothing_reads_do_no_harm(copy: Path) -> None:
    read(set_config(copy, is_llama_config=True, rope_interleaved=False, unsloth_version="2025.1"))


def test_tensors_that_are_foreign_misshapen_or_unknown_are_named(copy: Path) -> None:
    tensors = load_file(copy / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        ({name: torch.zeros(64, 32, dtype=torch.int8)}, f"{name} is I8"),
        ({name: torch.zeros(32, 64)}, f"{name} is F32 [32, 64]"),
        ({name: torch.zeros(64, 32, dtype=torch.float64)}, f"{name} is F64"),
        ({"model.layers.1.self_attn.sinks": torch.zeros(4)}, "model.layers.1.self_attn.sinks"),
        ({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias"),
        ({"model.norm.weight": torch.zeros(())}, "model.norm.weight is F32 []"),
    ):
        save_file({**tensors, **change}, copy / SINGLE)
        assert message in refused(copy)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, copy / SINGLE)
    read(copy)
    save_file({"x": torch.zeros(2)}, copy / SINGLE)
    assert "model.embed_tokens.weight" in refused(copy)


def test_unknown_quant_is_refused(llama: Path) -> None:
    with pytest.raises(UserError, match="quant is 'q2_k'"):
        HfFiles(llama, quant="q2_k")


def test_no_damaged_safetensors_file_does_more_than_raise_a_user_error(copy: Path) -> None:
    good = (copy / SINGLE).read_bytes()
    header = int.from_bytes(good[:8], "little")
    end, generator = 8 + header, random.Random(0)
    copies = [good[:n] for n in (0, 4, 8, 9, end - 1, end, end + 1, len(good) - 1)]
    copies += [n.to_bytes(8, "little") + good[8:] for n in (0, 1, header - 1, header + 1, 2**40, 2**63, 2**64 - 1)]
    copies += [(2).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", b"[" * 200_000]
    for _ in range(300):
        changed = bytearray(good)
        for _ in range(generator.choice((1, 2, 8))):
            changed[generator.randrange(end)] = generator.choice(
                (generator.randrange(256), 48 + generator.randrange(10))
            )
        copies.append(bytes(changed))
    files = HfFiles(copy)
    spec, num_refused = files.spec(), 0
    for content in copies:
        (copy / SINGLE).unlink()
        (copy / SINGLE).write_bytes(content)
        try:
            files.__init__(copy)  # type: ignore[misc]
            for _, rows in files.weights(spec).matrices():
                assert rows.data.shape == (rows.num_outputs, rows.row_bytes)
        except UserError:
            num_refused += 1
    assert num_refused > 250
