"""Which target serves the model that the user named: our CPU kernels where they can, else torch.

In: what `-t` names, and `TargetOptions`. Out: a loaded target, where its tokenizer lies, and one line on the backend
where the user would have expected another. A GGUF file is made dense for the torch target only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyflash import environment, hub
from hyflash.core import TargetOptions
from hyflash.errors import UserError
from hyflash.targets.base import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A loaded target. `tokenizer` is a directory or hub name; `note` is empty or says why torch took over."""

    model: Target
    tokenizer: str
    note: str = ""


def load(spec: str, options: TargetOptions, *, report: hub.Progress | None = None) -> Chosen:
    """Load the target `spec` names; `report` hears of work done once.

    Raises UserError when it, or the backend asked for, cannot serve.
    """
    source = hub.find_target(spec)
    if options.backend == "torch":
        return _torch(source, options, report, note="")
    given = (options.quant, options.kv, options.draft_weights)
    asked = options.backend == "native" or any(value is not None for value in given)
    why = _obstacle(source, options)
    if not why:
        try:
            return _native(source, options, report)
        except UserError as err:
            if asked:
                raise
            why = str(err).rstrip(".")
    if asked:
        raise UserError(f"the native target cannot serve {spec}: {why}. Use --backend torch.")
    return _torch(source, options, report, note="" if options.dtype else f"the torch target serves {spec}: {why}.")


def _obstacle(source: hub.Source, options: TargetOptions) -> str:
    """What keeps the native target from even trying; empty when nothing does."""
    if options.dtype is not None:
        return "dtype is an option of the torch target"
    if missing := environment.kernels_missing():
        return f"{missing}; the native target, several times faster on CPUs, needs it"
    return ""


def _native(source: hub.Source, options: TargetOptions, report: hub.Progress | None) -> Chosen:
    import torch

    from hyflash.targets import native

    source = hub.fetched(source)
    assert source.path is not None
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)  # of what runs beside the target
    model = native.load(
        source.path,
        quant=options.quant or "none",
        kv=options.kv or "float16",
        num_threads=options.num_threads,
        name=source.name,
        report=report,
    )
    return Chosen(model=model, tokenizer=hub.tokenizer_dir(source))


def _torch(source: hub.Source, options: TargetOptions, report: hub.Progress | None, *, note: str) -> Chosen:
    from hyflash.targets import hf

    path = hub.dense_dir(source, report=report)
    model = hf.load(path, dtype=options.dtype or "float32", num_threads=options.num_threads)
    return Chosen(model=model, tokenizer=path, note=note)
