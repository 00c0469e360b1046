"""llama.cpp as a peer, through the low-level interface of llama-cpp-python (see `make peers`).

In: a GGUF file. Out: an `Engine`. One `verify` is one `llama_decode` of a batch with logits for every row; keys and
values are float16 as in ours. Names are those of llama-cpp-python 0.3.36; another version may have changed them.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyflash.bench.floors import Shape, Work
from hyflash.bench.peers.base import PIECE, Engine, MissingPeer
from hyflash.errors import HyflashError

_F16 = 1  # ggml's number of float16


class LlamaCpp(Engine):
    """A GGUF model in llama.cpp. Raises MissingPeer."""

    name = "llama.cpp"

    def __init__(self, path: Path, shape: Shape, *, num_threads: int, max_tokens: int) -> None:
        _try_apart(path)
        self._session = Session(path, num_threads=num_threads, max_tokens=max_tokens)
        self.weights, self.max_tokens, self.about = shape.stored_type, max_tokens, self._session.about
        self.work = Work(shape=shape, weight_bytes=shape.stored_bytes, kv_bytes=2)
        self._num_prompt = self._num_rows = 0

    def start(self, ids: Sequence[int]) -> None:
        """Feed the prompt in batches; only the last row's logits are made."""
        self._session.truncate(0)
        for first in range(0, len(ids), PIECE):
            piece = ids[first : first + PIECE]
            self._session.decode(piece, first, [first + i == len(ids) - 1 for i in range(len(piece))])
        self._num_prompt = len(ids)

    def verify(self, ids: Sequence[int]) -> None:
        """One llama_decode with all logits."""
        self._session.decode(ids, self._num_prompt, [True] * len(ids))
        self._num_rows = len(ids)

    def logits(self) -> NDArray[np.float32]:
        """Of the last `verify`, copied out."""
        return self._session.logits(self._num_rows)

    def rewind(self) -> None:
        """Remove the cache's entries behind the prompt."""
        self._session.truncate(self._num_prompt)

    def close(self) -> None:
        """Free everything."""
        self._session.close()


class Session:
    """A model and a context of one sequence, and nothing of ours around them. Raises MissingPeer."""

    def __init__(self, path: Path, *, num_threads: int, max_tokens: int) -> None:
        self._lib = lib = _library()
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.about = {
            "version": f"llama-cpp-python {lib.__version__}",
            "build": " ".join(lib.llama_print_system_info().decode().split()),
        }
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise MissingPeer(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = max_tokens, PIECE, PIECE
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = _F16
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            lib.llama_model_free(self._model)
            raise MissingPeer(f"llama.cpp cannot hold {max_tokens} tokens of {path}")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(PIECE, 0, 1)

    def decode(self, ids: Sequence[int], first: int, wanted: Sequence[bool]) -> None:
        """One llama_decode of tokens at positions first.., with logits of the wanted rows."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = wanted[i]
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise HyflashError(f"llama.cpp failed to decode {len(ids)} tokens (code {code}).")
        self._lib.llama_synchronize(self._context)

    def logits(self, num_rows: int) -> NDArray[np.float32]:
        """A copy (num_rows, vocabulary)."""
        flat = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (num_rows * self._vocab,))
        return flat.reshape(num_rows, self._vocab).copy()

    def truncate(self, length: int) -> None:
        """Remove the cache's entries at positions >= length."""
        self._lib.llama_memory_seq_rm(self._memory, 0, length, -1)

    def close(self) -> None:
        """Free everything."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def _library() -> Any:
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as err:
        raise MissingPeer(
            "llama.cpp is not installed; build it for this machine with `make peers` (llama-cpp-python from source)"
        ) from err
    return llama_cpp


def _try_apart(path: Path) -> None:
    """Decode some rows in a process of its own: a build for another machine ends the process that runs it."""
    _library()
    code = (
        "import sys; from pathlib import Path; from hyflash.bench.peers.llama_cpp import Session; "
        "Session(Path(sys.argv[1]), num_threads=1, max_tokens=256).decode([0] * 33, 0, [True] * 33)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"it ended with {done.returncode}"
        raise MissingPeer(f"llama.cpp fails here ({why}); build it again with `make peers`")
