"""Training and the launchers need nothing of bagua.legacy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.fresh_process import TIMEOUT_S

PROGRAM = Path(__file__).parents[1] / "support" / "core_alone.py"


@pytest.mark.deep  # lint-imports finds the same in the sources
def test_two_ranks_train_where_bagua_legacy_cannot_be_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
