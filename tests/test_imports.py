"""The shape of the source: imports go one way, files and functions stay small, the command line starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hyflash

ROOT = Path(hyflash.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 90
ORDER = (
    ("errors", "_version"),
    ("core", "options"),
    ("ops",),
    ("sampling", "metrics", "cache"),
    ("layers",),
    ("drafters", "targets", "text"),
    ("checkpoint", "engine"),
    ("data",),
    ("train", "serve", "bench", "export"),
    ("hub", "environment", "api", "doctor"),
    ("cli",),
)
"""Parts from low to high; a part may import what is below it, itself, and (but for APART) its level."""
APART = ("train", "serve", "bench", "export")
FREE = ("hub", "environment")
"""Leaves that know nothing of the rest; anybody may use them."""
LEVELS = {part: level for level, parts in enumerate(ORDER) for part in parts}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def part_of(path: Path) -> str:
    """First name below the package: `engine` for engine/decode.py, `core` for core.py, "" for the package itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of every import of ours in a file, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "hyflash" else [module]
        for name in names:
            if name.startswith("hyflash."):
                yield node.lineno, name.split(".")[1]


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part_of(path) for path in FILES} - {""} <= set(LEVELS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_from_high_to_low(path: Path) -> None:
    mine = part_of(path)
    for line, part in imports_of(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {part}"
        if mine in ("", "cli") or part == mine or part in FREE:
            continue
        assert LEVELS[part] <= LEVELS[mine], f"{where}, which is above {mine}"
        assert not (part in APART and mine in APART), f"{where}, and the two must not know each other"


@pytest.mark.parametrize("free", FREE)
def test_the_free_leaves_import_errors_only(free: str) -> None:
    for path in FILES:
        if part_of(path) == free:
            assert {part for _, part in imports_of(path)} <= {"errors", free}


def test_the_package_itself_imports_nothing_heavy() -> None:
    top = [node for node in tree(ROOT / "__init__.py").body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in top}
    assert not {m for m in modules if m.split(".")[0] in ("torch", "transformers", "numpy")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            # A signature may be a long table: the options of a command.
            num_lines = node.end_lineno - node.body[0].lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {num_lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree(path)) or not tree(path).body


@pytest.mark.parametrize(
    "command", [["--help"], ["generate", "--help"], ["train", "--help"], ["report", "--help"]], ids=" ".join
)
def test_help_imports_no_torch(command: list[str]) -> None:
    code = (
        "import sys; from hyflash.cli import main\n"
        f"code = main({command!r})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
