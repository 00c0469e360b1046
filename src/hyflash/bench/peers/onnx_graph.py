"""A Llama decoder as an ONNX graph with 8-bit weights, made the way ONNX Runtime's own model builder makes it.

In: a model directory with dense weights. Out: the bytes of an ONNX model: ids and cache in, logits and cache out.
Linear layers are MatMulNBits with blocks of 32 and int8 activations (accuracy level 4), query, key and value in one;
attention is GroupQueryAttention with its own rotation over a float32 cache that is written in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK = 32
BYTES_PER_WEIGHT = 1 + 4 / BLOCK
_MICROSOFT = "com.microsoft"


@dataclass
class _Graph:
    """Nodes and constants as they come."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def linear(self, name: str, x: str, weight: Floats) -> str:
        """x times weight (N, K) transposed, in 8 bits; each block of a row has its own scale, the middle is 128."""
        rows, inputs = weight.shape
        blocks = weight.reshape(rows, inputs // BLOCK, BLOCK)
        scales = np.abs(blocks).max(-1) / 127
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        numbers = (np.rint(blocks * inverse[..., None]) + 128).astype(np.uint8)
        parts = [x, self.constant(f"{name}.q", numbers), self.constant(f"{name}.scale", scales.reshape(-1))]
        return self.node(
            "MatMulNBits", parts, [f"{name}.y"], _MICROSOFT,
            N=rows, K=inputs, bits=8, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip


def decoder(path: str, *, max_tokens: int) -> bytes:
    """The graph of a Llama model in `path`.

    Inputs: ids (1, N); lengths (1,) and total (1,), tokens in all less one and in all; wanted (n,), the rows whose
    logits are made; past.L.key and past.L.value (1, G, max_tokens, K). Outputs: logits (1, n, V), present.L.key and
    present.L.value.
    """
    from onnx import TensorProto, helper
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    weights = _Weights(path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    graph = _Graph()
    cos, sin = _rotations(config, max_tokens)
    graph.constant("cos", cos), graph.constant("sin", sin)
    embedding = weights("model.embed_tokens")
    stream = graph.node("Gather", [graph.constant("embedding", embedding), "ids"], ["stream"])
    x = _norm(graph, "first", stream, None, weights("model.layers.0.input_layernorm"), config)[0]
    for index in range(config.num_hidden_layers):
        at, of = f"layer{index}", f"model.layers.{index}."
        qkv = np.concatenate([weights(f"{of}self_attn.{n}_proj") for n in "qkv"])
        cache = [f"past.{index}.key", f"past.{index}.value"]
        mixed = graph.node(
            "GroupQueryAttention",
            [graph.linear(f"{at}.qkv", x, qkv), "", "", *cache, "lengths", "total", "cos", "sin"],
            [f"{at}.mixed", f"present.{index}.key", f"present.{index}.value"],
            _MICROSOFT,
            num_heads=heads, kv_num_heads=kv_heads, do_rotary=1, scale=float(dim**-0.5),
        )  # fmt: skip
        out = graph.linear(f"{at}.out", mixed, weights(f"{of}self_attn.o_proj"))
        x, stream = _norm(graph, f"{at}.mlp", stream, out, weights(f"{of}post_attention_layernorm"), config)
        gate = graph.linear(f"{at}.gate", x, weights(f"{of}mlp.gate_proj"))
        up = graph.linear(f"{at}.up", x, weights(f"{of}mlp.up_proj"))
        soft = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], [f"{at}.sigmoid"])], [f"{at}.silu"])
        inner = graph.node("Mul", [soft, up], [f"{at}.inner"])
        down = graph.linear(f"{at}.down", inner, weights(f"{of}mlp.down_proj"))
        last = index == config.num_hidden_layers - 1
        scale = weights("model.norm" if last else f"model.layers.{index + 1}.input_layernorm")
        x, stream = _norm(graph, f"{at}.next", stream, down, scale, config)
    x = graph.node("Gather", [x, "wanted"], ["rows"], axis=1)
    head = graph.linear("head", x, embedding if weights.is_tied else weights("lm_head"))
    graph.node("Identity", [head], ["logits"])

    def value(name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    cache_shape: list[int | str] = [1, kv_heads, "tokens", dim]
    caches = [f"{index}.{part}" for index in range(config.num_hidden_layers) for part in ("key", "value")]
    inputs = [
        value("ids", [1, "rows"], TensorProto.INT64),
        value("lengths", [1], TensorProto.INT32),
        value("total", [1], TensorProto.INT32),
        value("wanted", ["heads"], TensorProto.INT64),
        *(value(f"past.{name}", cache_shape) for name in caches),
    ]
    outputs = [
        value("logits", [1, "heads", config.vocab_size]),
        *(value(f"present.{name}", cache_shape) for name in caches),
    ]
    made = helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)]
    content: bytes = helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString()
    return content


def _norm(graph: _Graph, name: str, stream: str, more: str | None, scale: Floats, config: Any) -> tuple[str, str]:
    """RMS norm of stream + more, and that sum."""
    epsilon, gamma = float(config.rms_norm_eps), graph.constant(f"{name}.gamma", scale)
    if more is None:
        graph.node("SimplifiedLayerNormalization", [stream, gamma], [f"{name}.x"], epsilon=epsilon, axis=-1)
        return f"{name}.x", stream
    outputs = [f"{name}.x", "", "", f"{name}.sum"]
    graph.node("SkipSimplifiedLayerNormalization", [stream, more, gamma], outputs, _MICROSOFT, epsilon=epsilon)
    return f"{name}.x", f"{name}.sum"


def _rotations(config: Any, max_tokens: int) -> tuple[Floats, Floats]:
    """Cosines and sines (max_tokens, head_dim / 2) as transformers makes them for this model."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(config)
    angles = torch.arange(max_tokens)[:, None].double() * rope.inv_freq.double()
    scale = float(rope.attention_scaling)
    return (angles.cos() * scale).float().numpy(), (angles.sin() * scale).float().numpy()


class _Weights:
    """Tensors of a directory by name, as float32."""

    def __init__(self, path: str) -> None:
        from safetensors import safe_open

        files: list[Any] = [safe_open(file, framework="pt") for file in sorted(Path(path).glob("*.safetensors"))]
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self.is_tied = "lm_head.weight" not in self._where

    def __call__(self, name: str) -> Floats:
        tensor: torch.Tensor = self._where[f"{name}.weight"].get_tensor(f"{name}.weight")
        return tensor.float().numpy()
