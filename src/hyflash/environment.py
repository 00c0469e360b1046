"""What this machine and installation are: for `hyflash env`, and as provenance in every result file and card.

Out: plain dicts that go into JSON as they are. `facts()` costs milliseconds and imports torch only when it is
loaded already or asked for; `row_invariance()` multiplies a few matrices.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import hyflash

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "numpy", "pydantic")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve")


def versions() -> dict[str, str]:
    """Versions of hyflash, Python and the packages that decide results."""
    out = {"hyflash": hyflash.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "missing"
    return out


def hardware() -> dict[str, Any]:
    """CPU model, instruction sets, cores this process may use, memory in bytes."""
    info = _read("/proc/cpuinfo")
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines()) if value
    }
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS or Windows
        cores = os.cpu_count() or 1
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "num_cores": cores,
        "memory_bytes": _memory_bytes("MemTotal"),
        "os": platform.platform(),
    }


def num_threads() -> int:
    """Threads worth computing with: OMP_NUM_THREADS, else the physical cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    try:
        mine = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS or Windows
        return os.cpu_count() or 1
    cores = {_read(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list").strip() or str(n) for n in mine}
    return len(cores)


def kernels_missing() -> str:
    """Why the CPU kernels cannot run here, in one clause; empty where they can."""
    try:
        import hyflash_kernels

        return "" if hyflash_kernels.library().hk_isa() else "HYFLASH_KERNELS_ISA names none that runs here"
    except ImportError:
        return "hyflash-kernels is not installed"
    except (OSError, AttributeError) as err:  # no library for this machine, or one of another version
        return f"hyflash-kernels cannot be loaded ({err})"


def kernels() -> dict[str, Any]:
    """Version and instruction set of the CPU kernels, or why there are none."""
    missing = kernels_missing()
    if missing:
        return {"missing": missing}
    import hyflash_kernels

    isa = hyflash_kernels.library().hk_isa().decode()
    return {"version": hyflash_kernels.__version__, "isa": isa, "num_threads": num_threads()}


def threads() -> dict[str, Any]:
    """Threads torch uses, its CPU capability, and the variables that govern both."""
    import torch

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
    return {
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": bool(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "variables": {name: os.environ[name] for name in names if name in os.environ},
    }


def git_commit() -> str | None:
    """Commit of the source tree hyflash runs from ("+dirty" with changes), or None for an installed copy."""
    root = Path(hyflash.__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def provenance() -> dict[str, Any]:
    """What a result file needs to be repeated: argv, versions, commit, hardware, threads, time (UTC)."""
    return {
        "argv": ["hyflash", *sys.argv[1:]],
        "versions": versions(),
        "git_commit": git_commit(),
        "hardware": hardware(),
        "threads": threads(),
        "kernels": kernels(),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def row_invariance() -> dict[str, Any]:
    """Does a row of a matrix product keep its bits whatever rows stand beside it, on this machine?

    Checks the shapes a verify step uses (1 to 17 rows). False means targets run with `exact="recheck"`.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1536, 576, generator=generator)
    rows = torch.randn(17, 576, generator=generator)
    single = torch.cat([torch.nn.functional.linear(row[None], weight) for row in rows])
    worst = 0.0
    for width in (2, 3, 5, 8, 9, 16, 17):
        together = torch.nn.functional.linear(rows[:width], weight)
        worst = max(worst, float((together - single[:width]).abs().max()))
    return {"holds": worst == 0.0, "largest_difference": worst}


def free_memory_bytes() -> int | None:
    """Memory that programs could have now without swapping; None where the system does not say."""
    return _memory_bytes("MemAvailable")


def return_freed_memory() -> None:
    """Have the C library give freed memory back to the system, which glibc only does when asked."""
    with suppress(OSError, AttributeError, TypeError):  # other systems know no such call
        ctypes.CDLL(None).malloc_trim(0)


def _memory_bytes(field: str) -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
