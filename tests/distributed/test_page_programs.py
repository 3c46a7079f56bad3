"""Runs the programs of the documentation: exactly the code blocks that readers see, on as many gloo ranks as the page
says. How a page marks them: tests/support/page_programs.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.page_programs import REPOSITORY, Program, read_page
from support.ranks import run_ranks

PAGES = ("README.md", "docs/training.md", "docs/migration.md", "docs/algorithms.md", "docs/design/training-core.md")
# Of one algorithm each.
PAGES += tuple(
    f"docs/algorithms/{name}.md"
    for name in ("async", "bytegrad", "comm-hooks", "decentralized", "low-precision-decentralized", "qadam")
)
PROGRAMS = [program for page in PAGES for program in read_page(page).programs]


def run_program(page: str, name: str, folder: str) -> None:
    os.chdir(folder)
    (program,) = (one for one in read_page(page).programs if one.name == name)
    program.run()


@pytest.mark.parametrize("program", [one for one in PROGRAMS if not one.name.endswith(".py")], ids=str)
def test_program(program: Program, tmp_path: Path) -> None:
    run_ranks(program.ranks, run_program, program.page, program.name, str(tmp_path))


def test_quick_start_by_torchrun(tmp_path: Path) -> None:
    """The script of docs/training.md, under its name, by the command that is shown below it."""
    (program,) = (one for one in PROGRAMS if one.name.endswith(".py"))
    (tmp_path / program.name).write_text(program.source)
    text = (REPOSITORY / program.page).read_text()
    command = next(line for line in text.splitlines() if line.startswith("torchrun ") and line.endswith(program.name))
    words = shlex.split(command)
    assert words[words.index("--nproc-per-node") + 1] == str(program.ranks)
    # A port of its own: other tests may be using torchrun's default.
    words = [str(Path(sys.executable).with_name("torchrun")), "--standalone", *words[1:]]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bagua: " in result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) >= 2
    assert losses[-1] < losses[0] / 2
