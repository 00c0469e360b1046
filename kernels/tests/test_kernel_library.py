"""The library as a whole: its prototypes, the choice of instruction set, and the C++ tests where they were built."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kernel_cases

ROOT = Path(__file__).parents[1]
CTYPES = {"c_int": "int32_t", "c_long": "int64_t", "c_longlong": "int64_t", "c_double": "double", "c_float": "float"}


def prototypes() -> dict[str, tuple[str, list[str]]]:
    """Name -> (result, arguments) of each function of the header, pointers as "*"."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include/hyflash_kernels.h").read_text(), flags=re.S)

    def kind(declaration: str) -> str:
        return "*" if "*" in declaration else declaration.replace("const", "").split()[0]

    found = re.findall(r"HK_API ([^();]*?)\b(hk_\w+)\(([^)]*)\);", text)
    return {
        name: (kind(result), [kind(a) for a in arguments.split(",") if a.strip() != "void"])
        for result, name, arguments in found
    }


def test_ctypes_declares_exactly_what_the_header_declares(lib):
    def kind(declared: object) -> str:
        return "void" if declared is None else CTYPES.get(getattr(declared, "__name__", ""), "*")

    calls = __import__("hyflash_kernels")._CALLS
    assert {n: (kind(r), [kind(a) for a in arguments]) for n, (r, arguments) in calls.items()} == prototypes()


def test_every_instruction_set_can_be_chosen_by_name(lib, isas, monkeypatch):
    for isa in isas:
        monkeypatch.setenv("HYFLASH_KERNELS_ISA", isa)
        assert lib.hk_isa().decode() == isa
    monkeypatch.delenv("HYFLASH_KERNELS_ISA")
    assert lib.hk_isa().decode() == isas[-1]
    assert lib.hk_isa_runs(b"portable") == 1


def test_an_unknown_instruction_set_is_not_replaced_in_silence(lib, monkeypatch):
    monkeypatch.setenv("HYFLASH_KERNELS_ISA", "mmx")
    assert lib.hk_isa() == b""
    assert lib.hk_isa_runs(b"mmx") == 0


def test_a_package_without_its_library_says_what_to_do(tmp_path, monkeypatch):
    kernels = pytest.importorskip("hyflash_kernels", reason="hyflash-kernels is not installed")
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path)])
    with pytest.raises(OSError, match=r"pip install \./kernels"):
        kernels.library.__wrapped__()


def test_no_function_of_one_instruction_set_can_be_linked_into_another():
    """What the linker may merge between object files (weak symbols) lies in the instruction set's own namespace."""
    objects = [
        path for path in ROOT.glob("build/*/CMakeFiles/hk_objects.dir/src/isa_*.o") if "portable" not in path.name
    ]
    if not objects or not shutil.which("nm"):
        pytest.skip("needs nm and object files: make setup leaves them in kernels/build")
    for path in objects:
        isa = path.name.removeprefix("isa_").removesuffix(".cpp.o")
        listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
        shared = [line for line in listed.splitlines() if re.search(r" [WVu] ", line) and f"hk::{isa}::" not in line]
        assert not shared, path.name


@pytest.mark.parametrize("name", ["isa", "math", "attention", "pool"])
def test_the_tests_in_cpp_pass(name):
    kernel_cases.library_or_skip()
    built = sorted(ROOT.glob(f"build/*/test_{name}"), key=lambda path: path.stat().st_mtime)
    if not built:
        pytest.skip("the C++ tests are not built: make setup builds them (cmake option HK_TESTS)")
    done = subprocess.run([built[-1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
