"""Training and the launchers need nothing of bagua.legacy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.fresh_process import TIMEOUT_S

PROGRAM = Path(__file__).parents[1] / "support" / "core_alone.py"


def test_two_ranks_train_where_bagua_legacy_cannot_be_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(PROGRAM)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
