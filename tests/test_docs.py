"""What the documents tell people to type exists: every command and option parses, every Python block compiles."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from hyflash import drafters
from hyflash.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, kind: str) -> list[str]:
    """Fenced blocks of one language, with continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.strip() for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    lines += [line.strip() for text in texts for line in text.splitlines() if line.startswith("    ")]
    return [line for line in lines if line.startswith("hyflash ")]


def test_the_documents_name_commands() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("line", commands())
def test_every_documented_command_parses(line: str) -> None:
    words = [w.replace("$name", "hyflash") for w in shlex.split(line, comments=True)[1:]]
    command = typer.main.get_command(app)
    while group := getattr(command, "commands", None):  # typer may bring its own click, so no isinstance
        name, words = words[0], words[1:]
        assert name in group
        command = group[name]
    command.make_context(command.name, words)  # raises for unknown options and bad values


def test_python_blocks_compile() -> None:
    found = [block for page in PAGES for block in blocks(page, "python")]
    assert found
    for block in found:
        compile(block, "README", "exec")


def test_every_drafter_has_a_page_and_a_row_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in drafters.names():
        assert (ROOT / "docs" / "drafters" / f"{name}.md").is_file(), name
        assert re.search(rf"^\|[^|]*`{name}`", readme, flags=re.MULTILINE), name
