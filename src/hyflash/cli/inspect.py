"""`hyflash pull`, `drafters`, `doctor` and `env`: get a model, and look at what is here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyflash import environment, hub
from hyflash.cli import flags, loading, report
from hyflash.core import TargetOptions
from hyflash.errors import UserError

if TYPE_CHECKING:
    from hyflash.core import TargetHooks


def pull(
    name: Annotated[str, typer.Argument(help="Known model name.")] = hub.DEFAULT_TARGET,
    *,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Fetch a model into the user's cache; offline once it is there.

    \b
    Examples:
      hyflash pull smollm2-135m
      HYFLASH_CACHE=/data/cache hyflash pull smollm2-135m
    """
    with loading.progress(quiet) as step:
        path = hub.pull(name, report=step, quiet=quiet, dense=bool(environment.kernels_missing()))
    if json:
        report.print_json({"name": name, "path": str(path)})
    else:
        typer.echo(str(path))


def drafters(*, json: flags.Json = False) -> None:
    """List the drafters, their memory and options.

    Memory is that of default options at the shape of smollm2-135m.

    \b
    Examples:
      hyflash drafters
      hyflash drafters --json
    """
    entries = describe_drafters()
    if json:
        report.print_json(entries)
    else:
        from hyflash.cli.tables import print_drafters

        print_drafters(entries)


def doctor(
    *,
    target: flags.Target = hub.DEFAULT_TARGET,
    drafter: flags.Drafter = None,
    backend: flags.Backend = "auto",
    dtype: flags.Dtype = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    draft_weights: flags.DraftWeights = None,
    threads: flags.Threads = None,
    json: flags.Json = False,
) -> None:
    """Prove that a drafter fits a target, or say why not.

    Exits with 1 when it does not fit.

    \b
    Examples:
      hyflash doctor
      hyflash doctor -t smollm2-135m -d ./my-drafter --json
    """
    how = TargetOptions(
        backend=backend, dtype=dtype, quant=quant, kv=kv, draft_weights=draft_weights, num_threads=threads
    )
    spec = hub.default_drafter(target) if drafter is None else drafter
    if spec == "none":
        raise UserError("doctor examines a drafter with its target, and the drafter is none; name one with -d.")

    from hyflash.doctor import examine

    loaded = loading.load_target(target, how, quiet=json)
    found = examine(loaded.model, loaded.tokenizer, spec, name=loaded.name)
    healthy = all(one.healthy for one in found)
    if json:
        report.print_json(
            {
                "target": loaded.name,
                "backend": loaded.model.describe(),
                "memory": loaded.model.memory(),
                "drafter": spec,
                "healthy": healthy,
                "parts": [one.as_dict() for one in found],
            }
        )
    else:
        typer.echo(f"{loaded.name}: {report.backend(loaded.model.describe(), loaded.model.memory())}")
        for one in found:
            typer.echo(f"{one.drafter} on {one.target}: {'healthy' if one.healthy else 'NOT healthy'}")
            for check in one.checks:
                typer.echo(f"  {check.status:4}  {check.name}: {check.message}")
            for line in report.memory([asdict(each) for each in one.memory]):
                typer.echo(f"  {line}")
            if one.likely_cause:
                typer.echo(f"  likely cause: {one.likely_cause}")
    if not healthy:
        raise typer.Exit(1)


def env(*, json: flags.Json = False) -> None:
    """Versions, hardware, threads, numerics: for bug reports.

    \b
    Examples:
      hyflash env
      hyflash env --json
    """
    facts: dict[str, Any] = {
        "versions": environment.versions(),
        "git_commit": environment.git_commit(),
        "hardware": environment.hardware(),
        "cache_dir": str(hub.cache_dir()),
        "row_invariance": environment.row_invariance(),  # before threads(): it sets the numerics variables
        "threads": environment.threads(),
        "kernels": environment.kernels(),
    }
    if json:
        report.print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for key, one in value.items():
                typer.echo(f"  {key}: {one}")
        else:
            typer.echo(f"{name}: {value}")


def describe_drafters() -> list[dict[str, Any]]:
    """Name, summary, source, trainable, memory and options of every drafter file.

    Memory is that of the default options at the embedded target's shape; nothing is loaded or downloaded.
    """
    import torch

    from hyflash import drafters as files

    out = []
    for name in files.names():
        method = files.load_class(name)
        config = method.Config()
        with torch.device("meta"):
            cost = method(config, _smollm2_hooks()).cost(8192)
        out.append(
            {
                "name": name,
                "summary": files.summary(name),
                "source": method.source,
                "trainable": method.trainable,
                "kv_bytes_per_token": cost.kv_bytes_per_token,
                "state_bytes": cost.state_bytes,
                "options": method.Config.describe(),
            }
        )
    return out


def _smollm2_hooks() -> TargetHooks:
    """SmolLM2-135M's shape without its weights."""
    import torch

    from hyflash.core import TargetHooks, TargetInfo

    info = TargetInfo(
        name=hub.DEFAULT_TARGET,
        fingerprint="",
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        max_context=8192,
        eos_token_ids=(2,),
        dtype="float32",
    )

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(*ids.shape, info.hidden_size, device=ids.device)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.ones(*hidden.shape[:-1], info.vocab_size, device=hidden.device)

    return TargetHooks(info=info, embed=rows, head=head, head_rows=rows)
