"""Weights in the kernels' own order, kept in a file of the cache so that the next load only maps them.

In: `Weights`, whose matrices are read and packed a few rows at a time, and a key that changes with their bytes. Out:
`Packed`, arrays that are maps of that file, or lie in memory where it cannot be written (a warning says why).
The file is the same for every instruction set: blobs at multiples of 64 bytes, then a JSON footer that says which
weights they are, its length and a mark. A file that does not end as expected is made again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hyflash_kernels as hk
from hyflash import hub
from hyflash.errors import UserError
from hyflash.targets.decoder import Rows, Weights
from hyflash.targets.fingerprint import fingerprint, weight_files

FILE = "weights.bin"
_MARK = b"HKPACKED"
_ALIGN = 64
_LANES = 16  # rows of a group of the packed layout; groups know nothing of each other
_CHUNK_BYTES = 1 << 22
_SAMPLE_BYTES = 4096

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """All matrices of a decoder, ready to be multiplied with. The arrays must not be written to."""

    matrices: Mapping[str, Bytes]  # by the names of `Weights.matrices`, packed, on 64-byte borders
    embedding: Bytes  # (V, row bytes) GGUF rows
    head: Bytes  # (V, row bytes) GGUF rows; the embedding itself where the two are tied
    mapped: bool
    """Whether the matrices are a map of a file, which other processes share."""


@dataclass(frozen=True, slots=True)
class _Blob:
    """One array of the file: a matrix packed, or its plain rows where its own file holds other ones."""

    name: str
    rows: Rows
    packed: bool
    offset: int
    size: int

    def chunks(self) -> Iterator[Bytes]:
        """The array in pieces of some megabytes, read and packed one after the other."""
        rows = self.rows
        step = max(1, _CHUNK_BYTES // (rows.row_bytes * _LANES)) * _LANES
        for first in range(0, rows.num_outputs, step):
            last = min(first + step, rows.num_outputs)
            data = np.ascontiguousarray(rows.read(first, last))
            if not self.packed:
                yield data.reshape(-1)
                continue
            out = np.empty(packed_size(rows.type, last - first, rows.num_inputs), np.uint8)
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (data, out)]
            hk.library().hk_pack(hk.TYPES[rows.type], last - first, rows.num_inputs, *pointers)
            yield out


def packed_key(path: str | Path, quant: str) -> str:
    """Key of the weights of a model file or directory: fingerprint, and names, sizes and times of its files.

    The fingerprint looks at samples; the times tell apart files that differ only where it did not look.
    """
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(path)]
    return hashlib.sha256(json.dumps([fingerprint(path), stats, quant]).encode()).hexdigest()[:24]


def packed_size(kind: str, num_outputs: int, num_inputs: int) -> int:
    """Bytes of a packed matrix. Raises UserError for inputs that do not fill whole blocks."""
    size = int(hk.library().hk_packed_size(hk.TYPES[kind], num_outputs, num_inputs))
    if size < 0:
        raise UserError(
            f"{num_inputs} inputs are no whole number of {kind} blocks; the native target cannot pack them."
        )
    return size


def load_packed(weights: Weights, key: str, *, report: hub.Progress | None = None) -> Packed:
    """The weights packed: from the cache, else made now and kept there for the next time.

    `report` hears of bytes packed when there is something to pack. Raises UserError for weights that the kernels
    cannot pack, or files that change meanwhile.
    """
    blobs = _plan(weights)
    facts = [(b.name, b.rows.type, b.offset, b.size) for b in blobs]
    label = json.dumps({"key": key, "blobs": facts}).encode()
    folder = hub.cache_dir() / "packed" / f"{key}-v{hk.library().hk_packed_version()}"
    whole = _open(folder / FILE, blobs, label)
    if whole is None:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            need_bytes = blobs[-1].offset + blobs[-1].size + len(label) + (1 << 20)
            hub.make_once(folder, lambda into: _write(into, blobs, label, report), need_bytes=need_bytes)
            whole = _open(folder / FILE, blobs, label)
            if whole is None:
                raise OSError(f"{folder} is damaged and cannot be replaced; remove it.")
        except (UserError, OSError) as err:
            warnings.warn(f"packed weights are not kept, so each start packs them anew: {err}", stacklevel=2)
    if whole is not None:
        arrays = {b.name: whole[b.offset : b.offset + b.size] for b in blobs}
    else:
        arrays = {b.name: _in_memory(b) for b in blobs}
    rows = {b.name: arrays.pop(b.name).reshape(b.rows.num_outputs, b.rows.row_bytes) for b in blobs if not b.packed}
    embedding, head = rows.get("embedding rows"), rows.get("head rows")
    if embedding is None:
        embedding = weights.embedding.data
    if head is None:
        head = embedding if weights.head is weights.embedding else weights.head.data
    return Packed(matrices=arrays, embedding=embedding, head=head, mapped=whole is not None)


def _plan(weights: Weights) -> list[_Blob]:
    """What the file holds, and where."""
    parts = [(name, rows, True) for name, rows in weights.matrices()]
    if weights.embedding.convert is not None:
        parts.append(("embedding rows", weights.embedding, False))
    if weights.head.convert is not None and weights.head is not weights.embedding:
        parts.append(("head rows", weights.head, False))
    blobs, offset = [], 0
    for name, rows, packed in parts:
        plain = rows.num_outputs * rows.row_bytes
        size = packed_size(rows.type, rows.num_outputs, rows.num_inputs) if packed else plain
        blobs.append(_Blob(name, rows, packed, offset, size))
        offset = -(-(offset + size) // _ALIGN) * _ALIGN
    return blobs


def _write(into: Path, blobs: list[_Blob], label: bytes, report: hub.Progress | None) -> None:
    into.mkdir()
    with (into / FILE).open("wb") as file:
        for blob in blobs:
            file.write(bytes(blob.offset - file.tell()))
            for chunk in blob.chunks():
                file.write(chunk.data)
            if report:
                report("pack", file.tell(), blobs[-1].offset + blobs[-1].size)
    whole = np.memmap(into / FILE, np.uint8, "r")
    footer = label + _samples(whole, blobs)
    del whole
    with (into / FILE).open("ab") as file:
        file.write(footer + len(footer).to_bytes(8, "little") + _MARK)


def _samples(whole: Bytes, blobs: list[_Blob]) -> bytes:
    """Checksum of both ends of all blobs: what a crash of the machine may have left out is seldom smaller."""
    total = 0
    for blob in blobs:
        array = whole[blob.offset : blob.offset + blob.size]
        total = zlib.crc32(array[-_SAMPLE_BYTES:].data, zlib.crc32(array[:_SAMPLE_BYTES].data, total))
    return b"%08x" % total


def _open(path: Path, blobs: list[_Blob], label: bytes) -> Bytes | None:
    """The file as an array if it holds just these blobs, else None."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # not there, or empty
        return None
    end = blobs[-1].offset + blobs[-1].size
    footer = label + b"%08x" % 0
    tail = len(footer).to_bytes(8, "little") + _MARK
    if len(data) != end + len(footer) + len(tail) or data[end : end + len(label)] != label or data[-16:] != tail:
        return None
    whole = np.frombuffer(data, np.uint8)
    return whole if data[end + len(label) : -16] == _samples(whole, blobs) else None


def _in_memory(blob: _Blob) -> Bytes:
    raw = np.empty(blob.size + _ALIGN, np.uint8)
    out, at = raw[-raw.ctypes.data % _ALIGN :][: blob.size], 0
    for chunk in blob.chunks():
        out[at : at + len(chunk)] = chunk
        at += len(chunk)
    return out
