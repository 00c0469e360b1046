"""Captured examples on disk: `manifest.json` and `shard-00000.safetensors`, ... with a checksum each.

In: a target and its answers. Out: a directory that `ShardReader` maps into memory. The plan of shards follows from
the answers alone, and a shard counts as finished only when the manifest names it with its checksum; so a run that
was killed goes on with the next shard, rewrites nothing and ends with the same bytes as one that was not.
Layout of a shard: tokens (N,) int32, features (N, C, D) float16, loss_mask and loop_mask (N,) uint8, and with
`kv_layers` kv (N, R, 2, G, K) float16, the target's rotated keys and its values there; its examples end to end; ids,
domains and lengths stand in its header.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hyflash.data.answers import Answer
from hyflash.data.capture import (
    Example,
    SourceInfo,
    capture,
    check_fit,
    check_own_answers,
    no_features,
    source_info,
)
from hyflash.data.disk import clear_disk_errors, read_json, recover, write_atomic, write_json
from hyflash.errors import UserError
from hyflash.targets.base import Target

FORMAT = "hyflash-shards"
VERSION = 1
MANIFEST = "manifest.json"
_FACTS: Mapping[str, type] = {
    **dict.fromkeys(("target_name", "target_fingerprint", "data_hash"), str),
    **dict.fromkeys(("hidden_size", "num_examples", "num_tokens", "num_label_tokens"), int),
    "taps": list,
    "shards": list,
    "meta": dict,
}
_ENTRY: Mapping[str, type] = {"file": str, "sha256": str, "bytes": int, "num_examples": int, "num_tokens": int}

_ROW: Mapping[str, type] = {"id": str, "domain": str, "length": int, "prompt_len": int}


def plan_shards(answers: Sequence[Answer], shard_tokens: int) -> list[list[Answer]]:
    """Cut the answers, in order, into shards of at most `shard_tokens` tokens (a longer answer stands alone)."""
    plan: list[list[Answer]] = []
    size = 0
    for answer in answers:
        if not plan or size + answer.num_tokens > shard_tokens:
            plan.append([])
            size = 0
        plan[-1].append(answer)
        size += answer.num_tokens
    return plan


def write_shards(
    target: Target,
    answers: Sequence[Answer],
    directory: str | Path,
    *,
    taps: Sequence[int],
    kv_layers: Sequence[int] = (),
    meta: Mapping[str, Any] | None = None,
    shard_tokens: int = 32768,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> SourceInfo:
    """Capture `answers` into `directory`, going on where an earlier run stopped.

    `meta` (the answers' side file) is kept in the manifest; `progress(tokens_done, tokens_total)` is called after
    each shard. Raises UserError when the answers are another target's, when the directory holds another capture,
    and on a full disk (finished shards stay).
    """
    check_own_answers(target, meta or {})
    directory = Path(directory)
    if not answers:
        raise UserError("there is no answer to capture; expected at least one.")
    if len({a.id for a in answers}) != len(answers):
        raise UserError("answers have duplicate ids; expected each id once.")
    check_fit(target, answers)
    info = source_info(target, answers, taps=tuple(taps), kv_layers=tuple(kv_layers))
    header = _header(info, shard_tokens, dict(meta or {}))
    path = directory / MANIFEST
    manifest = _resume(path, header) if path.exists() else {**header, "complete": False, "shards": []}
    plan = plan_shards(answers, shard_tokens)
    with clear_disk_errors(directory, "nothing was written"):
        directory.mkdir(parents=True, exist_ok=True)
        recover(directory)
    done = sum(s["num_tokens"] for s in manifest["shards"])
    for index in range(len(manifest["shards"]), len(plan)):
        examples = list(capture(target, plan[index], taps=taps, kv_layers=kv_layers, batch_tokens=batch_tokens))
        name = f"shard-{index:05d}.safetensors"
        content = _pack(examples)
        entry = {
            "file": name,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "num_examples": len(examples),
            "num_tokens": sum(len(e.tokens) for e in examples),
        }
        with clear_disk_errors(directory / name, f"the {index} shards before it are intact"):
            write_atomic(directory / name, content)
            manifest["shards"].append(entry)
            write_json(path, manifest)
        done += entry["num_tokens"]
        if progress is not None:
            progress(done, info.num_tokens)
    with clear_disk_errors(path, "all shards are intact"):
        write_json(path, {**manifest, "complete": True})
    return info


def _header(info: SourceInfo, shard_tokens: int, meta: dict[str, Any]) -> dict[str, Any]:
    facts = {**asdict(info), "taps": list(info.taps), "kv_layers": list(info.kv_layers)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": "float16",
        "shard_tokens": shard_tokens,
        **facts,
        "meta": meta,
    }


def _resume(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an earlier run; UserError when it captured something else."""
    manifest = _checked_manifest(path)
    manifest.setdefault("kv_layers", [])  # older captures know none
    for key in ("target_fingerprint", "taps", "kv_layers", "hidden_size", "data_hash", "shard_tokens"):
        if manifest.get(key) != header[key]:
            raise UserError(
                f"{path}: holds another capture: {key} is {manifest.get(key)!r}, now {header[key]!r}; "
                "give the same settings to go on with it, or another directory."
            )
    return manifest


def _checked_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise UserError(
            f"{path}: expected format {FORMAT} version {VERSION}, "
            f"found {manifest.get('format')!r} version {manifest.get('version')!r}; capture again."
        )
    if not _has(manifest, _FACTS) or not all(_has(entry, _ENTRY) for entry in manifest["shards"]):
        raise UserError(f"{path}: is damaged, facts are missing; delete the directory and capture again.")
    return manifest


def _has(value: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())


def _are_rows(rows: Any, num_tokens: int) -> bool:
    """Whether a shard's list of examples has whole facts, and all its tokens."""
    if not isinstance(rows, list) or not all(_has(row, _ROW) for row in rows):
        return False
    return sum(row["length"] for row in rows) == num_tokens and all(0 < r["prompt_len"] < r["length"] for r in rows)


def _pack(examples: list[Example]) -> bytes:
    """The bytes of one shard."""
    rows = [{"id": e.id, "domain": e.domain, "length": len(e.tokens), "prompt_len": e.prompt_len} for e in examples]
    tensors = {
        "tokens": torch.cat([e.tokens for e in examples]).to(torch.int32),
        "features": torch.cat([e.features for e in examples]),
        "loss_mask": torch.cat([e.loss_mask for e in examples]).to(torch.uint8),
        "loop_mask": torch.cat([e.loop_mask for e in examples]).to(torch.uint8),
    }
    kv = [e.kv for e in examples if e.kv is not None]
    if kv:
        tensors["kv"] = torch.cat(kv)
    content: bytes = save(tensors, metadata={"examples": json.dumps(rows, ensure_ascii=True)})
    return content


# ----------------------------------------------------------------------------------------------- read


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an example lies: rows first..first+length of shard number `shard`."""

    shard: int
    first: int
    length: int
    prompt_len: int
    domain: str


class ShardReader:
    """Examples of a finished capture, mapped from disk; an `ExampleSource`.

    `verify=True` reads every shard once and compares checksums; False compares sizes and headers only. Raises
    UserError for a capture that is not finished and for a shard that is missing, cut short or altered.
    """

    def __init__(self, directory: str | Path, *, verify: bool = True) -> None:
        self._directory = Path(directory)
        self._manifest = _checked_manifest(self._directory / MANIFEST)
        m = self._manifest
        if not m.get("complete"):
            raise UserError(
                f"{directory}: the capture is not finished ({len(m['shards'])} shards so far); "
                "run the same `hyflash data capture` again to go on."
            )
        self.info = SourceInfo(
            target_name=m["target_name"],
            target_fingerprint=m["target_fingerprint"],
            taps=tuple(m["taps"]),
            hidden_size=m["hidden_size"],
            data_hash=m["data_hash"],
            num_examples=m["num_examples"],
            num_tokens=m["num_tokens"],
            num_label_tokens=m["num_label_tokens"],
            kv_layers=tuple(m.get("kv_layers", ())),  # older captures know none
        )
        self.meta: Mapping[str, Any] = m["meta"]
        """The answers' side file as it was at capture."""
        self._files: list[Any] = []
        self._places: dict[str, _Place] = {}
        for index, entry in enumerate(m["shards"]):
            self._open(index, entry, verify=verify)
        if len(self._places) != self.info.num_examples:
            raise UserError(
                f"{directory}: the manifest promises {self.info.num_examples} examples, "
                f"the shards hold {len(self._places)}; capture again."
            )
        self.ids: Sequence[str] = sorted(self._places)

    def _open(self, index: int, entry: dict[str, Any], *, verify: bool) -> None:
        path = self._directory / entry["file"]
        expected = f"expected {entry['bytes']} bytes with sha256 {entry['sha256'][:16]}"
        again = "delete the directory and capture again"
        try:
            found = path.stat().st_size
            if found != entry["bytes"]:
                raise UserError(f"{path}: cut short or altered: {expected}, found {found} bytes; {again}.")
            if verify:
                with path.open("rb") as file:
                    sha = hashlib.file_digest(file, "sha256").hexdigest()
                if sha != entry["sha256"]:
                    raise UserError(f"{path}: damaged: {expected}, found sha256 {sha[:16]}; {again}.")
            file_map: Any = safe_open(str(path), framework="pt")
            rows = json.loads(file_map.metadata()["examples"])
            shape = file_map.get_slice("features").get_shape()
            kv_shape = file_map.get_slice("kv").get_shape() if self.info.kv_layers else [entry["num_tokens"], 0]
        except OSError as err:
            raise UserError(f"{path}: cannot be read ({err.strerror or err}): {expected}; {again}.") from err
        except (SafetensorError, ValueError, KeyError, TypeError) as err:
            raise UserError(f"{path}: is no shard ({err}): {expected}; {again}.") from err
        want = [entry["num_tokens"], len(self.info.taps), self.info.hidden_size]
        if list(shape) != want:
            raise UserError(f"{path}: features have shape {list(shape)}, expected {want}; {again}.")
        if list(kv_shape[:2]) != [entry["num_tokens"], len(self.info.kv_layers)]:
            raise UserError(f"{path}: keys and values have shape {list(kv_shape)}, which does not fit; {again}.")
        if not _are_rows(rows, entry["num_tokens"]):
            raise UserError(f"{path}: its list of examples does not fit its tokens; {again}.")
        first = 0
        for row in rows:
            self._places[row["id"]] = _Place(index, first, row["length"], row["prompt_len"], row["domain"])
            first += row["length"]
        self._files.append(file_map)

    def length(self, example_id: str) -> int:
        """Tokens of the example."""
        return self._places[example_id].length

    def fetch(self, ids: Sequence[str], *, features: bool = True) -> list[Example]:
        """Read these examples from disk."""
        return [self._read(i, features=features) for i in ids]

    def _read(self, example_id: str, *, features: bool) -> Example:
        place = self._places[example_id]
        rows = slice(place.first, place.first + place.length)
        file = self._files[place.shard]
        return Example(
            id=example_id,
            domain=place.domain,
            tokens=file.get_slice("tokens")[rows].long(),
            prompt_len=place.prompt_len,
            features=file.get_slice("features")[rows] if features else no_features(place.length, self.info),
            loss_mask=file.get_slice("loss_mask")[rows].bool(),
            loop_mask=file.get_slice("loop_mask")[rows].bool(),
            kv=file.get_slice("kv")[rows] if features and self.info.kv_layers else None,
        )

    def label_counts(self, ids: Sequence[str], vocab_size: int) -> Tensor:
        """Counts of the answer tokens of these examples: (vocab_size,) int64. Reads no features."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for example_id in ids:
            place = self._places[example_id]
            rows = slice(place.first, place.first + place.length)
            file = self._files[place.shard]
            labels = file.get_slice("tokens")[rows][file.get_slice("loss_mask")[rows].bool()]
            counts += torch.bincount(labels.long(), minlength=vocab_size)
        return counts

    def summary(self) -> dict[str, Any]:
        """Figures for `hyflash data inspect`: counts, share of label tokens in loops, lengths, domains, bytes."""
        lengths = sorted(self.length(i) for i in self.ids)
        loops = sum(int(f.get_tensor("loop_mask").sum()) for f in self._files)
        return {
            **asdict(self.info),
            "taps": list(self.info.taps),
            "kv_layers": list(self.info.kv_layers),
            "loop_share": loops / max(1, self.info.num_label_tokens),
            "median_length": lengths[len(lengths) // 2],
            "max_length": lengths[-1],
            "domains": dict(Counter(p.domain for p in self._places.values())),
            "num_shards": len(self._files),
            "bytes": sum(s["bytes"] for s in self._manifest["shards"]),
        }
