"""Which peers there are, and one of them made ready by its name.

In: a name, the model that was found, what it holds. Out: an `Engine`, or `MissingPeer` with what to do about it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hyflash import hub
from hyflash.bench.floors import Shape
from hyflash.bench.peers.base import Engine, MissingPeer
from hyflash.core import TargetInfo
from hyflash.errors import UserError, nearest
from hyflash.ops.gguf_rows import BLOCKS

NAMES = ("llama.cpp", "onnxruntime", "transformers")
BYTES_PER_WEIGHT = {kind: size / weights for kind, (weights, size) in BLOCKS.items()}


def check_names(names: list[str]) -> None:
    """Raises UserError for a name that is none."""
    for name in names:
        if name not in NAMES:
            raise UserError(
                f"unknown peer {name!r}.{nearest(name, NAMES)} Expected all, or some of {', '.join(NAMES)}."
            )


def make(name: str, source: hub.Source, shape: Shape, *, info: TargetInfo, num_threads: int, max_tokens: int) -> Engine:
    """A peer with this model, ready to run. Raises MissingPeer where it is not installed or cannot run the model."""
    if name == "llama.cpp":
        from hyflash.bench.peers.llama_cpp import LlamaCpp

        if source.path is None or not source.is_gguf:
            raise MissingPeer(f"llama.cpp reads .gguf files alone, and {source.name} is none")
        return LlamaCpp(source.path, shape, num_threads=num_threads, max_tokens=max_tokens)
    if name == "onnxruntime":
        from hyflash.bench.peers.onnx_runtime import OnnxRuntime

        return OnnxRuntime(hub.dense_dir(source), shape, info=info, num_threads=num_threads, max_tokens=max_tokens)
    from hyflash.bench.peers.eager import Transformers

    return Transformers(hub.dense_dir(source), shape, num_threads=num_threads, max_tokens=max_tokens)


def shape_of(source: hub.Source, info: TargetInfo) -> Shape:
    """What a model file holds. Matrices of families that only torch serves are counted as those of a Llama."""
    queries, keys = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    layer = info.hidden_size * (2 * queries + 2 * keys + 3 * info.intermediate_size)
    num_weights = info.num_layers * layer + info.vocab_size * info.hidden_size
    if source.path is not None and source.is_gguf:
        windows, stored, num_bytes = _of_gguf(source.path, info.num_layers)
    else:
        windows, stored = _of_dir(hub.dense_dir(source), info.num_layers)
        num_bytes = round(BYTES_PER_WEIGHT[stored] * num_weights)
    return Shape(
        num_weights=num_weights,
        windows=windows,
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        stored_type=stored,
        stored_bytes=num_bytes,
    )


def _of_gguf(path: Path, num_layers: int) -> tuple[tuple[int, ...], str, int]:
    """Windows, type of most weights, and bytes of the matrices; of the file where its architecture is not known."""
    from hyflash.targets.gguf_file import GgufFile

    try:
        file = GgufFile(path)
        spec = file.spec()
        weights = file.weights(spec)
    except UserError:
        return (0,) * num_layers, "GGUF", path.stat().st_size
    matrices = [rows for layer in weights.layers for rows in layer.values()]
    types: Counter[str] = Counter()
    for rows in matrices:
        types[rows.type] += rows.data.nbytes
    return spec.windows, types.most_common(1)[0][0], sum(m.data.nbytes for m in (*matrices, weights.head))


def _of_dir(path: str, num_layers: int) -> tuple[tuple[int, ...], str]:
    """Windows, and the type that the config names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * num_layers)
    stored = {"bfloat16": "BF16", "float16": "F16"}.get(str(config.dtype).removeprefix("torch."), "F32")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds), stored
