"""ONNX Runtime as a peer: the graph of `onnx_graph.py` with 8-bit weights, its cache in memory of ours.

In: a model directory of the Llama family. Out: an `Engine`. Keys and values are written in place, so that forgetting
rows costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyflash.bench.floors import Shape, Work
from hyflash.bench.peers.base import PIECE, Engine, MissingPeer
from hyflash.core import TargetInfo

_MOST_BYTES = 1 << 31  # an ONNX model in one piece


class OnnxRuntime(Engine):
    """A Llama model in ONNX Runtime. Raises MissingPeer."""

    name = "onnxruntime"
    weights = "Q8_0"

    def __init__(self, path: str, shape: Shape, *, info: TargetInfo, num_threads: int, max_tokens: int) -> None:
        try:
            import onnx  # noqa: F401
            import onnxruntime
        except ImportError as err:
            raise MissingPeer("onnxruntime is not installed; install it with `make peers`") from err
        from hyflash.bench.peers import onnx_graph

        if info.family != "llama":
            raise MissingPeer(f"the onnxruntime peer runs the Llama family alone, and this is a {info.family} model")
        weight_bytes = round(shape.num_weights * onnx_graph.BYTES_PER_WEIGHT)
        self.work = Work(shape=shape, weight_bytes=weight_bytes, kv_bytes=4)
        if weight_bytes + 4 * info.vocab_size * info.hidden_size > _MOST_BYTES:
            raise MissingPeer("the model is too large for an ONNX file in one piece (2 GiB)")
        self.max_tokens = max_tokens
        self.about = {"version": f"onnxruntime {onnxruntime.__version__}", "build": "MatMulNBits 8 bits, blocks of 32"}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
        options.add_session_config_entry("session.force_spinning_stop", "1")  # threads rest between calls
        options.log_severity_level = 3
        content = onnx_graph.decoder(path, max_tokens=max_tokens)
        self._session: Any = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._make: Any = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        cache_shape = (1, info.num_kv_heads, max_tokens, info.head_dim)
        for index in range(info.num_layers):
            for part in ("key", "value"):
                memory = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(cache_shape, np.float32))
                self._binding.bind_ortvalue_input(f"past.{index}.{part}", memory)
                self._binding.bind_ortvalue_output(f"present.{index}.{part}", memory)
        self._num_prompt, self._num_vocab = 0, info.vocab_size
        self._places: dict[int, Any] = {}  # memory for logits by their number of rows
        self._last: Any = None

    def start(self, ids: Sequence[int]) -> None:
        """Feed the prompt in pieces; only the last row's logits are made."""
        for first in range(0, len(ids), PIECE):
            piece = ids[first : first + PIECE]
            self._forward(piece, first, wanted=[len(piece) - 1])
        self._num_prompt = len(ids)

    def verify(self, ids: Sequence[int]) -> None:
        """One run of the graph."""
        self._forward(ids, self._num_prompt, wanted=range(len(ids)))

    def logits(self) -> NDArray[np.float32]:
        """Of the last `verify`."""
        values: NDArray[np.float32] = self._last.numpy()[0]
        return values

    def rewind(self) -> None:
        """Nothing: the next run says how long the cache is."""

    def close(self) -> None:
        """Drop the session and its threads."""
        self._session = self._binding = None

    def _forward(self, ids: Sequence[int], first: int, *, wanted: Sequence[int]) -> None:
        end = first + len(ids)
        if len(wanted) not in self._places:
            self._places[len(wanted)] = self._make((1, len(wanted), self._num_vocab), np.float32, "cpu", 0)
        self._last = self._places[len(wanted)]
        self._binding.bind_cpu_input("ids", np.array([ids], np.int64))
        self._binding.bind_cpu_input("lengths", np.array([end - 1], np.int32))
        self._binding.bind_cpu_input("total", np.array([end], np.int32))
        self._binding.bind_cpu_input("wanted", np.array(wanted, np.int64))
        self._binding.bind_ortvalue_output("logits", self._last)
        self._session.run_with_iobinding(self._binding)
