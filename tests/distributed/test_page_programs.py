"""Runs the Python blocks of the documentation on gloo ranks: the programs of tests/docs/programs, and complete scripts,
which `make deep` starts by torchrun as well, as their readers do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.page_programs import PROGRAMS, REPOSITORY, blocks_of, need_of, ranks_of, run_program
from support.ranks import run_ranks

PAGES = {
    str(page.relative_to(REPOSITORY)): blocks_of(str(page.relative_to(REPOSITORY)))
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
}
SCRIPTS = {page: (block.script, block.source) for page, blocks in PAGES.items() for block in blocks if block.script}


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda program: program.stem)
def test_program(program: Path, tmp_path: Path) -> None:
    need = need_of(program)
    if need is not None and importlib.util.find_spec(need) is None:
        pytest.skip(f"needs {need}")
    lightning = "lightning" in program.stem
    run_ranks(ranks_of(program), run_program, str(program), str(tmp_path), lightning=lightning)


@pytest.mark.parametrize("page", SCRIPTS)
def test_script(page: str, tmp_path: Path) -> None:
    name, source = SCRIPTS[page]
    (tmp_path / name).write_text(source)
    run_ranks(2, run_program, str(tmp_path / name), str(tmp_path))


@pytest.mark.deep
@pytest.mark.parametrize("page", SCRIPTS)
def test_script_under_torchrun(page: str, tmp_path: Path) -> None:
    name, source = SCRIPTS[page]
    (tmp_path / name).write_text(source)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*torchrun, name], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
