"""Runs the Python blocks of the documentation: programs of tests/docs/programs on gloo ranks, complete scripts by
torchrun, as their readers do."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.page_programs import PROGRAMS, REPOSITORY, blocks_of, ranks_of
from support.ranks import run_ranks

SCRIPTS = {
    block.source: (str(page.relative_to(REPOSITORY)), block.script)
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    for block in blocks_of(str(page.relative_to(REPOSITORY)))
    if block.script is not None
}


def run_program(path: str, folder: str) -> None:
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda program: program.stem)
def test_program(program: Path, tmp_path: Path) -> None:
    run_ranks(ranks_of(program), run_program, str(program), str(tmp_path))


def test_scripts_by_torchrun(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    for number, (source, (page, name)) in enumerate(SCRIPTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(source)
        command = [torchrun, "--standalone", "--nproc-per-node", "2", name]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, f"{page}: {result.stdout}{result.stderr}"
