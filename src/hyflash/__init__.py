"""hyflash: language models answer faster on your own machine, token for token the same.

`hyflash.load(target, drafter)` gives an `Engine`; `Request` and `SamplingParams` say what to decode. Names are
imported on first use, so that `import hyflash` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyflash.api import load
    from hyflash.core import Request, Result, SamplingParams
    from hyflash.engine.decode import Engine
    from hyflash.errors import HyflashError, UserError

__version__ = "0.1.0"

__all__ = ["Engine", "HyflashError", "Request", "Result", "SamplingParams", "UserError", "__version__", "load"]

_HOMES = {
    "Engine": "hyflash.engine.decode",
    "HyflashError": "hyflash.errors",
    "Request": "hyflash.core",
    "Result": "hyflash.core",
    "SamplingParams": "hyflash.core",
    "UserError": "hyflash.errors",
    "load": "hyflash.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hyflash' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
