"""Find drafters by file name: every module here but `base` is one; its docstring's first line is its summary."""

from __future__ import annotations

import importlib
import pkgutil

from hyflash.drafters.base import Drafter
from hyflash.errors import UserError, nearest

_NOT_METHODS = {
    "base",
    "compaction",
    "compose",
    "block_config",
    "block_model",
    "confidence",
    "context",
    "convolution",
    "eagle_layer",
    "eagle_layouts",
    "eagle_memory",
    "evidence",
    "feature_config",
    "feature_drafter",
    "logit_drafter",
    "objective",
    "packed_drafter",
    "late",
    "local_expert",
    "mamba",
    "mirrors",
    "packing",
    "picking",
    "selecting",
    "selector",
    "shared_kv",
    "small_lm",
    "vocab",
    "zlab",
    "zlab_heads",
}


def names() -> list[str]:
    """Names of all drafter files."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_METHODS)


def load_class(name: str) -> type[Drafter]:
    """The drafter class of file `name`. Raises UserError for an unknown name."""
    if name not in names():
        raise UserError(f"unknown drafter {name!r}.{nearest(name, names())} Known: {', '.join(names())}.")
    cls: type[Drafter] = importlib.import_module(f"hyflash.drafters.{name}").DrafterImpl
    return cls


def summary(name: str) -> str:
    """First line of the drafter file's docstring."""
    return (importlib.import_module(f"hyflash.drafters.{name}").__doc__ or "").strip().splitlines()[0]
