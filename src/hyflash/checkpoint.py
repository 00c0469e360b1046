"""Drafters on disk: a directory with config.json, model.safetensors and, for trained ones, card.json.

In: a drafter and its card, or what a user names (`NAME`, `CHECKPOINT`, `NAME:CHECKPOINT`, joined by `+`).
Out: files that are each replaced at once, or a drafter whose every tensor came from the file. A plain DFlash is
written so that z-lab's loader reads it; ours is the extra "hyflash" block of config.json.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyflash import drafters, hub
from hyflash.core import TargetHooks, TargetInfo
from hyflash.drafters import eagle_layouts, zlab, zlab_heads
from hyflash.drafters.base import Drafter
from hyflash.drafters.block_config import DFlashConfig
from hyflash.drafters.compose import Composite
from hyflash.errors import NonFiniteError, UserError, nearest

CONFIG, WEIGHTS, CARD, INDEX = "config.json", "model.safetensors", "card.json", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
"""SafeAILab's own drafters come so; it is read as tensors alone, never as code."""
ARCHITECTURE = "HyFlashDraftModel"
FORMAT = 1
_HALF_LIMIT = 65504.0
_DTYPES = {"fp16": "float16", "fp32": "float32"}


def save(
    drafter: Drafter,
    directory: str | Path,
    *,
    card: Mapping[str, Any] | None = None,
    dtype: Literal["fp16", "fp32"] = "fp16",
) -> None:
    """Write a drafter. fp16 halves matrices whose values fit; vectors (norms, gates) stay float32.

    Raises UserError for a composition, NonFiniteError for weights that are not finite, OSError from the disk.
    """
    if isinstance(drafter, Composite):
        raise UserError("a composition of drafters is not one checkpoint; save its parts.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _on_disk(name, tensor, half=dtype == "fp16") for name, tensor in drafter.state_dict().items()}
    _replace(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    if card is None:
        (directory / CARD).unlink(missing_ok=True)  # a card of other weights would lie
    else:
        _write_json(directory / CARD, card)
    _write_json(directory / CONFIG, _config(drafter, _DTYPES[dtype]))


def load(spec: str, hooks: TargetHooks, *, options: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter that `spec` names, ready to serve. Raises UserError.

    `NAME` is a method with its default options; `CHECKPOINT` a directory or the name of a shipped drafter;
    `NAME:CHECKPOINT` reads it into another method (`hyflash:./dflash` adds a fresh memory), with `options` of the parts
    that the checkpoint does not have; `A+B` composes. A path with a "+" stands alone.
    """
    specs = hub.drafter_parts(spec)
    parts = [_load_one(part, hooks, options or {}) for part in specs]
    if len(parts) == 1:
        return parts[0].eval()
    names = [_method(part) for part in parts]
    if len(set(names)) < len(names):
        names = specs
    return Composite(list(zip(names, parts, strict=True))).eval()


def refill(drafter: Drafter) -> None:
    """Read a loaded drafter's weights from its checkpoint again. Raises UserError where that is not what it was."""
    path = drafter.loaded_from
    if path is None:
        raise UserError("the drafter was not loaded from a checkpoint, so there is nothing to read it from again.")
    _fill(drafter, _weights_for(drafter, path), where=str(path), optional=())


def read_card(directory: str | Path) -> dict[str, Any]:
    """The card of a checkpoint. Raises UserError if there is none."""
    return _read_json(hub.user_path(directory) / CARD, "a trained drafter has one")


def target_warnings(directory: str | Path, info: TargetInfo, *, method: str = "") -> list[str]:
    """What a user should know about this checkpoint with this target; empty when it was made for exactly it.

    `method` is the one that it is named with. Raises UserError when the two cannot work together at all.
    """
    path = hub.user_path(directory)
    config = _read_json(path / CONFIG, "expected a drafter's directory")
    if "hyflash" not in config:
        _foreign(method, config, info, path)
        return [f"{path} does not say which target it was trained for; sizes agree with {info.name!r}."]
    facts = _target_facts(config["hyflash"], info, path)
    if made_for(facts, info):
        return []
    return [
        f"{path} was trained for target {facts.get('name')!r} with fingerprint {facts.get('fingerprint')}; "
        f"{info.name!r} has {info.fingerprint}. Text stays the same, but fewer drafts may be accepted."
    ]


def made_for(facts: Mapping[str, Any], info: TargetInfo) -> bool:
    """Whether the target that a checkpoint or card names is this one.

    `fingerprint` is of the files it was trained with; `also` lists other files that hold the same weights, such as
    the GGUF file that a dense directory was made from.
    """
    also = facts.get("also")
    return info.fingerprint in (facts.get("fingerprint"), *(also if isinstance(also, list) else ()))


# --------------------------------------------------------------------------------------------- writing


def _method(drafter: Drafter) -> str:
    """File name of a drafter's method."""
    return type(drafter).__module__.rpartition(".")[2]


def _config(drafter: Drafter, dtype: str) -> dict[str, Any]:
    info, config = drafter.hooks.info, drafter.config
    out: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "hyflash", "dtype": dtype}
    if _method(drafter) == "dflash" and isinstance(config, DFlashConfig) and zlab.can_write(config, info):
        out = zlab.write_config(config, info, dtype=dtype)
    out["hyflash"] = {
        "format": FORMAT,
        "drafter_type": _method(drafter),
        "config": config.model_dump(mode="json"),
        "target": {
            "name": info.name,
            "fingerprint": info.fingerprint,
            "vocab_size": info.vocab_size,
            "hidden_size": info.hidden_size,
            "num_layers": info.num_layers,
        },
    }
    return out


def _on_disk(name: str, tensor: Tensor, *, half: bool) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.is_floating_point():
        return tensor
    if not bool(tensor.isfinite().all()):
        raise NonFiniteError(f"tensor {name} holds NaN or infinity; the drafter was not saved.")
    fits = half and tensor.dim() > 1 and float(tensor.abs().max() if tensor.numel() else 0.0) <= _HALF_LIMIT
    return tensor.half() if fits else tensor.float()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Any) -> None:
    """Write beside `path`, then rename: the old file or the new one is there, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------- reading


def _load_one(spec: str, hooks: TargetHooks, given: Mapping[str, Any]) -> Drafter:
    name, path = _parse(spec)
    if path is None:
        method = drafters.load_class(name)
        return method(method.Config.parse(given, where=spec), hooks)
    config = _read_json(path / CONFIG, "expected a drafter's directory")
    where = str(path / CONFIG)
    if "hyflash" in config:
        own, values = _own_block(config["hyflash"], hooks.info, path)
    else:
        own, values = _foreign(name, config, hooks.info, path)
        _refuse_side_files(path)
    method = drafters.load_class(name or own)
    upgrade = bool(name) and name != own
    own_say = {key for key, value in values.items() if value or key not in method.addable}
    if fixed := sorted(given.keys() & own_say):
        raise UserError(f"{path} says what {', '.join(fixed)} must be; leave out what its own config has.")
    options = method.Config.parse({**(method.import_config(values) if upgrade else values), **given}, where=where)
    drafter = method(options, hooks)
    optional = method.optional_tensors if upgrade else ()
    _fill(drafter, _weights_for(drafter, path), where=str(path), optional=optional)
    drafter.loaded_from = None if upgrade else path
    return drafter


def _parse(spec: str) -> tuple[str, Path | None]:
    """Method name ("" for the checkpoint's own) and directory (None for a bare method)."""
    known = drafters.names()
    if spec in known:
        return spec, None
    head, colon, tail = spec.partition(":")
    if colon and head in known:
        return head, _directory(tail)
    if (shipped := hub.shipped(spec)) is not None:
        return "", shipped
    if spec and (hub.user_path(spec).is_dir() or "/" in spec or os.sep in spec or spec.startswith(".")):
        return "", _directory(spec)
    raise UserError(
        f"unknown drafter {spec!r}.{nearest(spec, known)} Expected a method ({', '.join(known)}), the directory of a "
        "checkpoint, METHOD:DIRECTORY, or several of these joined by +."
    )


def _directory(text: str) -> Path:
    path = hub.shipped(text) or hub.user_path(text)
    if not text or not path.is_dir():
        raise UserError(f"{text or '(nothing)'}: no such directory; expected a drafter's checkpoint.")
    return path


def _read_json(path: Path, expected: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"{path}: cannot be read ({err.strerror or err}); {expected}.") from err
    except (ValueError, RecursionError) as err:
        raise UserError(f"{path}: is not valid JSON ({err}); the file is damaged.") from err
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}; expected a JSON object.")
    return value


def _own_block(block: Any, info: TargetInfo, path: Path) -> tuple[str, dict[str, Any]]:
    """Method and options of one of our checkpoints, once it fits the target."""
    _target_facts(block, info, path)
    name, values = block.get("drafter_type"), block.get("config")
    if not isinstance(name, str) or not isinstance(values, dict):
        raise UserError(f"{path / CONFIG}: the hyflash block has no drafter_type or config; the file is damaged.")
    return name, values


def _target_facts(block: Any, info: TargetInfo, path: Path) -> Mapping[str, Any]:
    """What the checkpoint says of its target. Raises UserError when sizes differ from this target's."""
    where = path / CONFIG
    if not isinstance(block, dict) or not isinstance(block.get("target"), dict):
        raise UserError(f"{where}: the hyflash block names no target; the file is damaged.")
    if block.get("format") != FORMAT:
        raise UserError(f"{where}: format is {block.get('format')!r}; this version of hyflash reads {FORMAT}.")
    facts: dict[str, Any] = block["target"]
    for key, found in (
        ("hidden_size", info.hidden_size),
        ("vocab_size", info.vocab_size),
        ("num_layers", info.num_layers),
    ):
        if facts.get(key) != found:
            raise UserError(
                f"{path}: was trained for target {facts.get('name')!r} with {key} {facts.get(key)}; target "
                f"{info.name!r} has {found}. Load it with its own target, or train one for this."
            )
    return facts


def _foreign(name: str, config: Mapping[str, Any], info: TargetInfo, path: Path) -> tuple[str, dict[str, Any]]:
    """Method and options of a checkpoint in a format not ours: by the method it is named with, else by its look."""
    zlab.check_types(config, str(path / CONFIG))
    values = drafters.load_class(name).read_config(config, info, directory=path) if name else None
    if values is not None:
        return name, values
    if eagle_layouts.knows(config):
        return eagle_layouts.read_config(config, info, where=str(path / CONFIG))
    return zlab_heads.read_config(config, info, where=str(path / CONFIG))


def _refuse_side_files(path: Path) -> None:
    if (path / "mask_embedding.pt").exists():
        raise UserError(f"{path / 'mask_embedding.pt'}: a mask vector of its own, which we cannot honour.")


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, of the shards its index names, or of a pickled file where neither is there."""
    if not (path / WEIGHTS).exists() and not (path / INDEX).exists() and (path / PICKLED).exists():
        return _read_pickled(path / PICKLED)
    files = [WEIGHTS]
    if not (path / WEIGHTS).exists() and (path / INDEX).exists():
        shards = _read_json(path / INDEX, "expected the index of the shards").get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise UserError(f"{path / INDEX}: has no weight_map; the file is damaged.")
        files = sorted(set(shards.values()))
    out: dict[str, Tensor] = {}
    for file in files:
        try:
            out.update(load_file(path / file))
        except OSError as err:
            raise UserError(f"{path / file}: cannot be read ({err}); copy the whole checkpoint again.") from err
        except SafetensorError as err:
            raise UserError(f"{path / file}: is cut short or damaged ({err}); copy it again.") from err
    return out


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as err:  # torch answers files that are none of its own with errors of every kind
        raise UserError(f"{file}: is damaged, or holds more than tensors ({err}); copy it again.") from err
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{file}: holds something else than named tensors; expected a drafter's weights.")
    return found


def _weights_for(drafter: Drafter, path: Path) -> Mapping[str, Tensor]:
    """A checkpoint's tensors under the drafter's own names."""
    weights = _read_weights(path)
    if not drafter.owns_words:
        own = drafter.state_dict().keys()
        weights = zlab_heads.without_copies(weights, drafter.hooks, where=str(path), own=own)
    return drafter.import_weights(weights, drafter.config)


def _fill(drafter: Drafter, weights: Mapping[str, Tensor], *, where: str, optional: tuple[str, ...]) -> None:
    """Copy tensors into the drafter; nothing may be missing (but for `optional` patterns), extra, misshapen or NaN."""
    want = drafter.state_dict()
    lacking = [name for name in want if name not in weights]
    lacking = [name for name in lacking if not any(fnmatch.fnmatch(name, pattern) for pattern in optional)]
    extra = [name for name in weights if name not in want]
    misfit = [
        f"{name} {_look(weights[name])}, expected {_look(want[name])}"
        for name in want
        if name in weights and _look(weights[name]) != _look(want[name])
    ]
    problems = [
        f"{title} {'; '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for title, names in (("missing tensors:", lacking), ("unknown tensors:", extra), ("wrong shapes:", misfit))
        if names
    ]
    if problems:
        raise UserError(f"{where}: the weights do not fit the config; {'. '.join(problems)}.")
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{where}: tensor {name} holds NaN or infinity; the checkpoint is broken.")
    drafter.load_state_dict(dict(weights), strict=False)
    if "draft_ids" in weights:
        drafter.set_draft_vocab(weights["draft_ids"])


def _look(tensor: Tensor) -> str:
    """Shape, and whether it holds whole or 8-bit numbers: what must agree between file and drafter."""
    kind = "" if tensor.is_floating_point() else " of whole numbers"
    if tensor.is_floating_point() and tensor.element_size() == 1:
        kind = f" of {tensor.dtype}"
    return f"{tuple(tensor.shape)}{kind}"
