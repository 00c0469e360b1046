"""GGUF files: what each family's keys and tensors mean, and that no damaged file does more than raise a UserError."""

from __future__ import annotations

import math
import random
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_bytes import FLOAT, GgufBytes, as_floats, model_keys, model_tensors, write_model
from hyflash.errors import UserError
from hyflash.ops.gguf_rows import BLOCKS
from hyflash.targets import gguf_read
from hyflash.targets.decoder import DecoderSpec, Weights, to_float
from hyflash.targets.fingerprint import fingerprint
from hyflash.targets.gguf_file import ARCHITECTURES, GgufFile


def read(path: Path) -> tuple[DecoderSpec, Weights]:
    """Everything of a file that the target uses, with what must hold for any file that is not refused."""
    file = GgufFile(path)
    spec = file.spec()
    weights = file.weights(spec)
    spec.check("test")
    assert 1 <= spec.max_context <= 1 << 30
    assert spec.num_layers == len(weights.layers) == len(weights.vectors) == len(spec.windows)
    assert all(0 <= token < spec.vocab_size for token in spec.eos_token_ids)
    for name, rows in weights.matrices():
        sizes = spec.matrix_sizes() | {"head": (spec.vocab_size, spec.hidden_size)}
        assert (rows.num_outputs, rows.num_inputs) == sizes[name.rpartition(".")[2]]
        assert rows.data.shape == (rows.num_outputs, rows.row_bytes)
        assert np.array_equal(rows.read(0, rows.num_outputs), rows.data)
    for vectors in weights.vectors:
        assert {name: len(vector) for name, vector in vectors.items()} == spec.vector_sizes()
    return spec, weights


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    return str(error.value)


# ------------------------------------------------------------------------------------------ container


def test_a_file_of_the_gguf_package_gives_its_sizes_and_rows(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for key, value in model_keys("llama").items():
        name = key.partition(".")[2]
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        elif name == "ggml.tokens":
            writer.add_token_list(value)
    tensors = model_tensors("llama")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            quantised = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec, weights = read(tmp_path / "a.gguf")
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 32, 2, 1, 16)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_context, spec.act) == (64, 40, 128, "silu")
    expected = gguf.quants.quantize(tensors["blk.1.ffn_down.weight"], gguf.GGMLQuantizationType.Q4_1)
    assert weights.layers[1]["down"].type == "Q4_1"
    assert np.array_equal(weights.layers[1]["down"].data, expected)
    assert np.array_equal(weights.layers[1]["down"].read(5, 9), expected[5:9])
    assert np.array_equal(weights.vectors[0]["attn_norm"], tensors["blk.0.attn_norm.weight"])
    assert weights.head is weights.embedding


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_every_type_of_the_kernels_is_found_by_its_number_and_size(tmp_path: Path, kind: str) -> None:
    number = int(gguf.GGMLQuantizationType[kind])
    assert BLOCKS[kind] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    weights, size = BLOCKS[kind]
    content = np.random.default_rng(0).integers(0, 255, 3 * size, np.uint8)
    tensor = ((number, weights, size), (3, weights), content.tobytes())
    (tmp_path / "a.gguf").write_bytes(GgufBytes().write({}, {"x": tensor}))
    stored = gguf_read.GgufReader(tmp_path / "a.gguf").tensors["x"]
    assert (stored.type, stored.shape) == (kind, (3, weights))
    assert np.array_equal(stored.read(), content.reshape(3, size))
    assert np.array_equal(stored.view(), content.reshape(3, size))


def test_values_of_all_kinds_are_read_when_asked_for(tmp_path: Path) -> None:
    keys = {"t": "zwölf", "b": True, "u": 7, "f": 0.5, "list": [1, 2, 3], "texts": ["a", "", "b"], "none": []}
    (tmp_path / "a.gguf").write_bytes(GgufBytes(version=2).write(keys, {}))
    reader = gguf_read.GgufReader(tmp_path / "a.gguf")
    assert [reader.value(key) for key in ("t", "b", "u", "f", "absent")] == ["zwölf", True, 7, 0.5, None]
    assert reader.numbers("list") == [1, 2, 3]
    assert reader.numbers("u") == [7]
    assert list(reader.strings("texts")) == [b"a", b"", b"b"]
    assert list(reader.strings("none")) == list(reader.strings("absent")) == list(reader.strings("t")) == []
    with pytest.raises(UserError, match="is a list"):
        reader.value("list")
    with pytest.raises(UserError, match="holds texts"):
        reader.numbers("texts")


def test_files_that_are_no_little_endian_gguf_of_today_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf")
    good = path.read_bytes()
    for content, message in (
        (b"", "is not a GGUF file"),
        (b"GGML" + good[4:], "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + good[8:], "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + good[8:], "GGUF version 1"),
        (b"GGUF" + struct.pack("<I", 4) + good[8:], "GGUF version 4"),
    ):
        path.write_bytes(content)
        assert message in refused(path)
    assert "Is a directory" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "absent.gguf")


def test_a_part_of_a_split_model_says_how_to_join_it(tmp_path: Path) -> None:
    keys = model_keys("llama") | {"split.count": 3}
    (tmp_path / "a.gguf").write_bytes(GgufBytes().write(keys, as_floats(model_tensors("llama"))))
    assert "one of 3 parts of a model; join them" in refused(tmp_path / "a.gguf")


def test_a_file_that_became_shorter_after_opening_is_a_sentence(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf")
    file = GgufFile(path)
    rows = file.weights(file.spec()).layers[1]["down"]
    size = path.stat().st_size
    path.rename(tmp_path / "old.gguf")  # the map keeps the old one
    path.write_bytes((tmp_path / "old.gguf").read_bytes()[: size // 2])
    with pytest.raises(UserError, match="became shorter"):
        rows.read(0, 32)
    with pytest.raises(UserError, match="became shorter"):
        rows.data.sum()


def test_too_many_texts_are_refused_before_they_take_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_read, "MAX_STRINGS", 3)
    assert "claims 4 texts" in refused(write_model(tmp_path / "a.gguf"))


# ------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_read(tmp_path: Path, architecture: str) -> None:
    spec, weights = read(write_model(tmp_path / "a.gguf", architecture))
    assert spec.family == architecture
    assert spec.rope_interleaved == (architecture == "llama")
    assert spec.act == ("gelu" if architecture.startswith("gemma") else "silu")
    assert spec.embed_scale == pytest.approx(32**0.5 if architecture.startswith("gemma") else 1.0)
    assert spec.attn_scale == 0.25
    tensors = model_tensors(architecture)
    down = weights.layers[1]["down"]
    assert np.array_equal(to_float(down.type, down.data), tensors["blk.1.ffn_down.weight"])


def test_phi3_matrices_that_share_one_tensor_are_its_parts(tmp_path: Path) -> None:
    _, weights = read(write_model(tmp_path / "a.gguf", "phi3"))
    tensors = model_tensors("phi3")
    layer = {name: to_float(rows.type, rows.data) for name, rows in weights.layers[1].items()}
    assert np.array_equal(
        np.concatenate([layer[k] for k in ("query", "key", "value")]), tensors["blk.1.attn_qkv.weight"]
    )
    assert np.array_equal(np.concatenate([layer[k] for k in ("gate", "up")]), tensors["blk.1.ffn_up.weight"])
    assert np.array_equal(weights.layers[1]["key"].read(2, 5), weights.layers[1]["key"].data[2:5])


def test_biases_are_taken_where_the_file_has_them(tmp_path: Path) -> None:
    bias = np.arange(32, dtype=np.float32)
    _, weights = read(write_model(tmp_path / "a.gguf", "qwen2", extra={"blk.0.attn_q.bias": bias}))
    assert np.array_equal(weights.layers[0]["query"].bias, bias)  # type: ignore[arg-type]
    assert weights.layers[1]["query"].bias is weights.layers[0]["key"].bias is None
    whole = np.arange(64, dtype=np.float32)
    _, weights = read(write_model(tmp_path / "b.gguf", "phi3", extra={"blk.0.attn_qkv.bias": whole}))
    assert np.array_equal(weights.layers[0]["value"].bias, whole[48:])  # type: ignore[arg-type]


def test_an_output_matrix_of_its_own_is_the_head(tmp_path: Path) -> None:
    output = np.ones((40, 32), np.float32)
    _, weights = read(write_model(tmp_path / "a.gguf", extra={"output.weight": output}))
    assert np.array_equal(to_float("F32", weights.head.data), output)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("llama", {}, [0, 0]),
        ("llama", {"attention__sliding_window": 8}, [8, 8]),
        ("llama", {"attention__sliding_window": 128}, [0, 0]),
        ("phi3", {"attention__sliding_window": 47}, [47, 47]),
        ("phi3", {"attention__sliding_window": 0}, [0, 0]),
        ("qwen2", {"attention__sliding_window": 4096}, [0, 0]),
        ("gemma2", {"attention__sliding_window": 8, "block_count": 5}, [8, 0, 8, 0, 8]),
        ("gemma2", {"context_length": 8192}, [4096, 0]),
        ("gemma3", {"attention__sliding_window": 8, "block_count": 8}, [8, 8, 8, 8, 8, 0, 8, 8]),
        ("gemma3", {"block_count": 8}, [0] * 8),
        ("gemma3", {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2}, [8, 0]),
        ("gemma3", {"attention__sliding_window": 8, "attention__sliding_window_pattern": [False, True]}, [0, 8]),
    ],
)
def test_windows_lie_where_each_family_has_them(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: list[int]
) -> None:
    spec, _ = read(write_model(tmp_path / "a.gguf", architecture, **changes))
    assert list(spec.windows) == windows


def test_gemma_facts_come_from_keys_and_sizes(tmp_path: Path) -> None:
    spec, _ = read(write_model(tmp_path / "a.gguf", "gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=3.0))
    assert (spec.attn_softcap, spec.final_softcap) == (5.0, 3.0)
    spec, _ = read(write_model(tmp_path / "b.gguf", "gemma2"))
    assert (spec.attn_softcap, spec.final_softcap) == (50.0, 30.0)
    spec, _ = read(write_model(tmp_path / "c.gguf", "gemma3"))
    assert (spec.attn_softcap, spec.final_softcap) == (0.0, 0.0)
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):  # the 27B models
        changes = {
            "block_count": layers,
            "attention__key_length": 16,
            "attention__head_count": 2,
            "embedding_length": 32,
        }
        assert (
            GgufFile(write_model(tmp_path / "d.gguf", architecture, **changes)).spec().attn_scale == (32 // 2) ** -0.5
        )


def test_end_tokens_are_the_named_ones_and_the_turn_end_where_none_is_named(tmp_path: Path) -> None:
    spec, _ = read(write_model(tmp_path / "a.gguf"))
    assert spec.eos_token_ids == (2, 3)
    keys = model_keys("llama") | {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 9999}
    (tmp_path / "b.gguf").write_bytes(GgufBytes().write(keys, as_floats(model_tensors("llama"))))
    assert read(tmp_path / "b.gguf")[0].eos_token_ids == (1, 3)


# ------------------------------------------------------------------------------------------ rotations


def plain(dim: int = 16, base: float = 1e4) -> list[float]:
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def test_linear_scaling_divides_and_none_does_not(tmp_path: Path) -> None:
    for changes, factor in (
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scale_linear": 2.0}, 2.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
    ):
        spec, _ = read(write_model(tmp_path / "a.gguf", **changes))
        assert spec.ropes[0].frequencies == pytest.approx([f / factor for f in plain()])


def test_llama3_factors_divide_and_are_checked(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    spec, _ = read(write_model(tmp_path / "a.gguf", extra={"rope_freqs.weight": factors}))
    assert spec.ropes[0].frequencies == pytest.approx([f / x for f, x in zip(plain(), factors, strict=True)])
    for bad in (np.zeros(8, np.float32), np.full(8, np.nan, np.float32), np.ones(7, np.float32)):
        assert "rope_freqs.weight" in refused(write_model(tmp_path / "b.gguf", extra={"rope_freqs.weight": bad}))


def test_gemma3_scales_global_layers_only_and_local_ones_have_their_own_base(tmp_path: Path) -> None:
    changes = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "block_count": 6}
    spec, _ = read(write_model(tmp_path / "a.gguf", "gemma3", attention__sliding_window=8, **changes))
    assert spec.rope_of_layer == (1, 1, 1, 1, 1, 0)
    assert spec.ropes[0].frequencies == pytest.approx([f / 8 for f in plain(base=1e6)])
    assert spec.ropes[1].frequencies == pytest.approx(plain())


def test_yarn_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = Qwen2Config(hidden_size=32, num_attention_heads=2, max_position_embeddings=128, rope_parameters=parameters)
    numbers, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    changes = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    }
    spec, _ = read(write_model(tmp_path / "a.gguf", "qwen2", **changes))
    assert spec.ropes[0].frequencies == pytest.approx(numbers.tolist(), rel=1e-6)
    assert spec.rope_scale == pytest.approx(scale)
    assert "yarn_attn_factor" in refused(
        write_model(tmp_path / "b.gguf", "qwen2", rope__scaling__yarn_attn_factor=2.0, **changes)
    )


def test_longrope_ends_where_its_short_factors_do(tmp_path: Path) -> None:
    short = np.linspace(1, 2, 8, dtype=np.float32)
    extra = {"rope_factors_short.weight": short, "rope_factors_long.weight": 3 * short}
    changes = {"rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.19}
    spec, _ = read(write_model(tmp_path / "a.gguf", "phi3", extra=extra, **changes))
    assert spec.max_context == 64
    assert spec.rope_scale == pytest.approx(1.19)
    assert spec.ropes[0].frequencies == pytest.approx([f / x for f, x in zip(plain(), short, strict=True)])


def test_partial_rotation_is_for_phi3_and_whole_heads_for_llama(tmp_path: Path) -> None:
    spec, _ = read(write_model(tmp_path / "a.gguf", "phi3", rope__dimension_count=12))
    assert spec.ropes[0].frequencies == pytest.approx(plain(12))
    assert "rotates 12" in refused(write_model(tmp_path / "b.gguf", rope__dimension_count=12))
    assert "rotates 11" in refused(write_model(tmp_path / "b.gguf", "phi3", rope__dimension_count=11))


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mamba", {}, "holds a mamba model"),
        ("llama", {"expert_count": 8}, "expert_count is 8"),
        ("llama", {"attention__causal": False}, "attention.causal"),
        ("llama", {"logit_scale": 0.5}, "logit_scale"),
        ("llama", {"rope__scaling__type": "dynamic"}, "'dynamic'"),
        ("gemma3", {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}, "'yarn'"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope_factors_short.weight"),
        ("qwen3", {"attention__sliding_window": 16}, "which layers"),
        ("llama", {"attention__head_count": 3, "attention__key_length": 16}, "lacks|shape"),
        ("llama", {"attention__key_length": 24}, "multiple of 16"),
        ("llama", {"attention__value_length": 32}, "value_length"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "the same for all layers"),
        ("llama", {"attention__head_count_kv": 0}, "from 1"),
        ("llama", {"block_count": None}, "block_count"),
        ("llama", {"context_length": 0}, "context_length"),
        ("llama", {"rope__freq_base": float("nan")}, "freq_base"),
        ("llama", {"rope__freq_base": 1e-30}, "freq_base"),
        ("llama", {"attention__layer_norm_rms_epsilon": float("inf")}, "epsilon"),
        ("llama", {"feed_forward_length": 96}, "shape"),
        ("llama", {"block_count": "two"}, "block_count"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a.gguf"
    keys = model_keys(architecture, **changes)
    path.write_bytes(GgufBytes().write(keys, as_floats(model_tensors(architecture))))
    assert any(part in refused(path) for part in message.split("|"))


def test_tensors_that_are_missing_foreign_or_unknown_are_named(tmp_path: Path) -> None:
    path, keys = tmp_path / "a.gguf", model_keys("llama")
    tensors = as_floats(model_tensors("llama"))
    for change, message in (
        ({"blk.1.ffn_up.weight": None}, "lacks the tensor blk.1.ffn_up.weight"),
        ({"blk.0.ffn_gate_inp.weight": (FLOAT, (1, 32), bytes(128))}, "blk.0.ffn_gate_inp.weight"),
        ({"blk.2.attn_norm.weight": (FLOAT, (32,), bytes(128))}, "blk.2.attn_norm.weight"),
        ({"blk.1.ffn_up.weight": ((20, 32, 18), (64, 32), bytes(64 * 18))}, "type IQ4_NL"),
        ({"blk.1.ffn_up.weight": ((99, 32, 18), (64, 32), bytes(64 * 18))}, "type number 99"),
        ({"blk.1.ffn_up.weight": (FLOAT, (32, 64), bytes(8192))}, "expected [64, 32]"),
        ({"blk.1.ffn_norm.weight": ((8, 32, 34), (32,), bytes(34))}, "expected F32 [32]"),
        ({"blk.1.ffn_up.weight": ((12, 256, 144), (64, 32), bytes(8192))}, "blocks of 256"),
    ):
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        path.write_bytes(GgufBytes().write(keys, changed))
        assert message in refused(path)


# -------------------------------------------------------------------------------------------- damage

_EXTREMES = (0, 1, 2, 3, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


def damaged_copies() -> list[bytes]:
    """Files with one fault each: cut off, a number replaced by an extreme one, a type by another, bytes flipped."""
    writer = GgufBytes()
    keys = model_keys("llama", attention__sliding_window_pattern=[True, False]) | {"general.alignment": 32}
    good = writer.write(keys, as_floats(model_tensors("llama")))
    out = []
    for offset, size, what in writer.fields:
        out += [good[:offset], good[: offset + size // 2], good[: offset + size]]
        if what in ("text", "name", "magic"):
            out += [good[:offset] + bytes([255] * size) + good[offset + size :]]
            continue
        numbers = [n for n in _EXTREMES if n < 1 << 8 * size]
        numbers += [int.from_bytes(good[offset : offset + size], "little") + step for step in (1, -1, 8)]
        numbers += list(range(15)) if what == "type" else []
        pieces = [(n % (1 << 8 * size)).to_bytes(size, "little") for n in numbers]
        out += [good[:offset] + piece + good[offset + size :] for piece in pieces]
    end = max(offset + size for offset, size, _ in writer.fields)
    generator = random.Random(0)
    for _ in range(1200):
        copy = bytearray(good)
        for _ in range(generator.choice((1, 1, 2, 8))):
            copy[generator.randrange(end)] = generator.randrange(256)
        out.append(bytes(copy))
    return [*out, good[:-1], good[: end + 8], good + bytes(100)]


def test_no_damaged_file_does_more_than_raise_a_user_error(tmp_path: Path) -> None:
    copies = damaged_copies()
    assert len(copies) > 3000
    messages, slowest = [], 0.0
    for index, content in enumerate(copies):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(content)
        started = time.process_time()
        try:
            read(path)
            fingerprint(path)
        except UserError as err:
            messages.append(str(err).replace(str(path), "PATH"))
        slowest = max(slowest, time.process_time() - started)
        path.unlink()
    assert slowest < 1.0
    assert len(messages) > len(copies) // 2
    assert all("PATH" in message for message in messages)


# ---------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_covers_tensors_and_not_the_tokenizer(tmp_path: Path) -> None:
    tensors = model_tensors("llama")
    first = fingerprint(write_model(tmp_path / "a.gguf"))
    assert fingerprint(write_model(tmp_path / "b.gguf")) == first
    assert fingerprint(write_model(tmp_path / "c.gguf", rope__scaling__factor=2.0)) == first  # a longer header too
    changed = {"blk.1.ffn_down.weight": tensors["blk.1.ffn_down.weight"] * np.float32(1.01)}
    assert fingerprint(write_model(tmp_path / "d.gguf", extra=changed)) != first
    assert fingerprint(write_model(tmp_path / "e.gguf", extra={"x": np.zeros(32, np.float32)})) != first
    assert len(first) == 16
    assert int(first, 16) > 0
    assert math.isfinite(float(int(first, 16)))
