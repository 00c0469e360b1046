"""The container of a GGUF file: its keys and where its tensors lie, with every number checked before it is used.

In: a path. Out: values by key, read when asked for, and a `Stored` for each tensor. Files are untrusted: counts,
lengths, types and offsets are compared with what the file can hold, so a damaged one ends in a UserError at once.
Why not the gguf package's reader: it trusts counts, and makes an object of every token, which takes seconds.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyflash.errors import UserError
from hyflash.ops.gguf_rows import BLOCKS, row_bytes
from hyflash.targets.decoder import Stored, to_float

MAX_ENTRIES = 1 << 16
"""Keys, and tensors: far above any model's."""
MAX_STRINGS = 1 << 22
"""Strings in all arrays together (vocabulary, merges); going past them takes time."""
MAX_TEXT_BYTES = 1 << 24
_NAME_BYTES = 1 << 16
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Struct letters of GGUF's value types."""
_TYPES = dict(zip((0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30), BLOCKS, strict=True))
"""BLOCKS by GGUF's numbers."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Value:
    kind: int
    """Value type; of its items for an array."""
    start: int
    count: int | None  # None for a single value


class GgufReader:
    """Keys and tensors of a file. Raises UserError for one that is no GGUF or contradicts itself."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise UserError(f"{path} is not a GGUF file; expected it to start with the letters GGUF.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as err:
            raise UserError(f"cannot read {path}: {err.strerror or err}.") from err
        self._at, self._num_strings = 4, 0
        self._check_version(self._number("I"))
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if max(num_tensors, num_keys) > MAX_ENTRIES:
            raise self._damaged(f"it claims {num_tensors} tensors and {num_keys} keys")
        self._keys: dict[str, _Value] = {}
        for _ in range(num_keys):
            name = self._name(self._keys)
            self._keys[name] = self._skip(self._number("I"), name)
        self.tensors = self._read_tensors(num_tensors)

    # ------------------------------------------------------------------------------------- values

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def value(self, key: str) -> bool | int | float | str | None:
        """A single value, None for an absent key. Raises UserError for an array or a text that is no UTF-8."""
        found = self._keys.get(key)
        if found is None:
            return None
        if found.count is not None:
            raise self._damaged(f"its key {key} is a list; expected one value")
        if found.kind == _STRING:
            try:
                return self._text(found.start, MAX_TEXT_BYTES).decode()
            except UnicodeDecodeError as err:
                raise self._damaged(f"its key {key} is no UTF-8 text") from err
        out: bool | int | float = struct.unpack_from("<" + _SCALARS[found.kind], self._map, found.start)[0]
        return out

    def numbers(self, key: str) -> list[float] | None:
        """A list of numbers (or a single one as a list of one), None for an absent key. Raises UserError for texts."""
        found = self._keys.get(key)
        if found is None:
            return None
        count = 1 if found.count is None else found.count
        if found.kind == _STRING or count > MAX_ENTRIES:
            raise self._damaged(f"its key {key} holds texts or {count} values; expected a few numbers")
        return [float(x) for x in struct.unpack_from(f"<{count}{_SCALARS[found.kind]}", self._map, found.start)]

    def strings(self, key: str) -> Iterator[bytes]:
        """Items of a list of texts, such as the vocabulary; none for an absent key."""
        found = self._keys.get(key)
        if found is None or found.count is None or found.kind != _STRING:
            return
        at = found.start
        for _ in range(found.count):
            length = _LENGTH.unpack_from(self._map, at)[0]
            yield self._map[at + 8 : at + 8 + length]
            at += 8 + length

    # ------------------------------------------------------------------------------------ tensors

    def tensor(self, name: str) -> Stored:
        """A tensor by name. Raises UserError where there is none."""
        if name not in self.tensors:
            raise UserError(f"{self.path} lacks the tensor {name} (cut-off file, or a variant not known here?).")
        return self.tensors[name]

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A float tensor (size,). Raises UserError for another type or shape."""
        found = self.tensor(name)
        if found.type not in ("F32", "F16", "BF16") or found.shape != (size,):
            raise UserError(f"{self.path}: {name} is {found.type} {list(found.shape)}; expected F32 [{size}].")
        out: NDArray[np.float32] = to_float(found.type, found.read())[0]
        return out

    # -------------------------------------------------------------------------------------- parse

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is cut off or damaged: {what}. Copy or download it again.")

    def _check_version(self, version: int) -> None:
        if version and version & 0xFFFF == 0:
            raise UserError(
                f"{self.path} is a big-endian GGUF file; convert it to little endian (gguf-convert-endian)."
            )
        if version not in (2, 3):
            raise UserError(f"{self.path} has GGUF version {version}; expected 2 or 3. Convert the model again.")

    def _number(self, letter: str) -> int:
        size = struct.calcsize("<" + letter)
        if self._at + size > len(self._map):
            raise self._damaged(f"it ends after {len(self._map)} bytes, in the middle of its header")
        out: int = struct.unpack_from("<" + letter, self._map, self._at)[0]
        self._at += size
        return out

    def _text(self, at: int, most: int) -> bytes:
        """The bytes of the text at `at`, which the file holds in full."""
        length: int = _LENGTH.unpack_from(self._map, at)[0]
        if length > most:
            raise self._damaged(f"it has a text of {length} bytes")
        return self._map[at + 8 : at + 8 + length]

    def _name(self, known: Collection[str]) -> str:
        start = self._at
        self._skip_texts(1)
        try:
            name = self._text(start, _NAME_BYTES).decode()
        except UnicodeDecodeError as err:
            raise self._damaged("a name is no UTF-8 text") from err
        if not name or name in known:
            raise self._damaged(f"the name {name!r} comes twice or is empty")
        return name

    def _skip_texts(self, count: int) -> None:
        """Go past texts, quickly: vocabularies are long."""
        at, last, data = self._at, len(self._map) - 8, self._map
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            if at > last:
                raise self._damaged(f"it claims a text at byte {at} of {len(data)}")
            at += 8 + unpack(data, at)[0]
        if at > len(data):
            raise self._damaged(f"it claims a text that ends at byte {at} of {len(data)}")
        self._at = at

    def _skip(self, kind: int, name: str) -> _Value:
        """Go past a value; where it lies. Raises UserError for one that the file cannot hold."""
        count = None
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
        start, num = self._at, 1 if count is None else count
        if kind == _STRING:
            self._num_strings += num
            if self._num_strings > MAX_STRINGS or num * 8 > len(self._map) - self._at:
                raise self._damaged(f"its key {name} claims {num} texts")
            self._skip_texts(num)
        elif kind in _SCALARS:
            self._at += num * struct.calcsize("<" + _SCALARS[kind])
            if self._at > len(self._map):
                raise self._damaged(f"its key {name} claims {num} values")
        else:
            raise self._damaged(f"its key {name} has the unknown type {kind}")
        return _Value(kind, start, count)

    def _read_tensors(self, num_tensors: int) -> dict[str, Stored]:
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._name(found)
            num_dims = self._number("I")
            if not 1 <= num_dims <= 4:
                raise self._damaged(f"its tensor {name} has {num_dims} dimensions")
            shape = tuple(self._number("Q") for _ in range(num_dims))
            found[name] = shape[::-1], self._number("I"), self._number("Q")
        align = self.value("general.alignment") if "general.alignment" in self else 32
        if isinstance(align, bool) or not isinstance(align, int) or not 0 < align <= 1 << 20 or align & (align - 1):
            raise self._damaged(f"its alignment is {align!r}; expected a power of two")
        base = -(-self._at // align) * align
        return {name: self._place(name, *facts, base=base, align=align) for name, facts in found.items()}

    def _place(self, name: str, shape: tuple[int, ...], number: int, offset: int, *, base: int, align: int) -> Stored:
        """Where a tensor lies, once it is known to lie inside the file."""
        kind = _TYPES.get(number)
        if kind is None:  # of no use here; whoever needs the tensor says so by its name
            return Stored(path=self.path, offset=0, type=_foreign(number), shape=shape, row_bytes=0)
        block = BLOCKS[kind][0]
        if min(shape) < 1 or shape[-1] % block:
            raise self._damaged(f"its tensor {name} has {list(shape)} weights in {kind} blocks of {block}")
        size = math.prod(shape[:-1]) * row_bytes(kind, shape[-1])
        if offset % align or base + offset + size > len(self._map):
            raise self._damaged(
                f"its tensor {name} would end at byte {base + offset + size} of {len(self._map)}, or is not aligned"
            )
        return Stored(
            path=self.path, offset=base + offset, type=kind, shape=shape, row_bytes=row_bytes(kind, shape[-1])
        )


def _foreign(number: int) -> str:
    """Name of a type that we do not read."""
    from gguf import GGMLQuantizationType

    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    return str(known.get(number, f"number {number}"))
