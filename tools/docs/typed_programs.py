"""Type checkers accept what the documentation shows: README's script passes mypy --strict and basedpyright."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.page_programs import REPOSITORY, blocks_of

CHECKERS = {
    # torch alone takes ten seconds, unless a former run has left a cache. `make clean` removes it.
    "mypy": ["mypy", "--strict", "--cache-dir", str(REPOSITORY / ".mypy_cache" / "programs")],
    # What it calls a warning is about torch, whose types are partly unknown.
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}
# Of what with_bagua returns, the own type is known: any name would be an attribute of a mere nn.Module.
RIGHT = "features: int = model.in_features\n"
WRONG = ["text: str = model.in_features", "model.no_such_method()", "bagua.with_bagua(3, [optimizer])"]


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_script_of_the_readme_is_typed(checker: str, tmp_path: Path) -> None:
    (script,) = [block.source for block in blocks_of("README.md") if block.script == "train.py"]
    (tmp_path / "train.py").write_text(script + RIGHT)
    (tmp_path / "wrong.py").write_text("".join(f"{line}\n" for line in [*script.splitlines(), *WRONG]))
    command = [sys.executable, "-m", *CHECKERS[checker], "train.py", "wrong.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    found = set(re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -)?:? error", result.stdout))
    first = len(script.splitlines()) + 1
    assert found == {("wrong.py", str(first + number)) for number in range(len(WRONG))}, result.stdout + result.stderr
