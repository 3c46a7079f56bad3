"""Python blocks of the documentation, and the programs in tests/docs/programs that run them.

A program is a Python file: set-up, `run_blocks("docs/page.md", 1)`, checks. It says on how many ranks it runs by a line
`# ranks: 2`, and by a line `# needs: torchft` which package it needs that not every environment has. A block that
begins with the name of a file (`# train.py`) is a complete script and needs no program.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sybil import Document
from sybil.evaluators.python import pad
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = REPOSITORY / "tests" / "docs" / "programs"


@dataclass(frozen=True)
class Block:
    """A Python block of a page; `line` is that of its first line of code."""

    line: int
    source: str

    @property
    def script(self) -> str | None:
        """The file name in its first line, if it is a complete script."""
        found = re.match(r"# ([\w-]+\.py)\b", self.source)
        return found[1] if found else None


def blocks_of(page: str) -> list[Block]:
    """
    Args:
        page: path relative to the repository.
    """
    text = (REPOSITORY / page).read_text()
    regions = sorted(FencedCodeBlockLexer("python|py")(Document(text, page)), key=lambda region: region.start)
    return [Block(text.count("\n", 0, one.start) + 2, str(one.lexemes["source"])) for one in regions]


def run_blocks(page: str, *numbers: int) -> None:
    """Executes blocks of a page, counted from 1, in the caller's global names. Tracebacks have page and line."""
    names = sys._getframe(1).f_globals
    blocks = blocks_of(page)
    for number in numbers:
        block = blocks[number - 1]
        exec(compile(pad(block.source, block.line - 1), str(REPOSITORY / page), "exec"), names)


def equal_on_all_ranks(*tensors: Any) -> bool:
    """Whether each has the same values everywhere. In a rank."""
    import torch
    import torch.distributed as dist

    mine = torch.cat([one.detach().reshape(-1) for one in tensors])
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return all(torch.equal(mine, one) for one in everywhere)


def run_program(path: str, folder: str) -> None:
    """In a rank, which has to read no page but those that the program runs."""
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")


def ranks_of(program: Path) -> int:
    found = re.search(r"^# ranks: (\d+)$", program.read_text(), re.MULTILINE)
    if not found:
        raise ValueError(f"{program} does not say how many ranks it needs.\nAdd a line such as `# ranks: 2`.")
    return int(found[1])


def need_of(program: Path) -> str | None:
    """The package that not every environment has."""
    found = re.search(r"^# needs: (\w+)$", program.read_text(), re.MULTILINE)
    return found[1] if found else None


def blocks_run_by(program: Path) -> set[tuple[str, int]]:
    """(page, number) of every block that the program runs."""
    calls = [node for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.Call)]
    arguments = [
        [ast.literal_eval(one) for one in call.args]
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "run_blocks"
    ]
    return {(page, number) for page, *numbers in arguments for number in numbers}
