"""tools/train/measure_memory.py as a program of its own: two ranks on CPUs, a model of 32 MiB. What needs no ranks is
in tests/unit/test_memory_measurement.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

DEADLINE_S = 100.0
CASES = ["gradient_allreduce", "decentralized-shift_one", "low_precision_decentralized", "async"]


@pytest.mark.timeout(120)
def test_algorithms_need_what_is_stated(repository: Path, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--layers", "8", "--steps", "3", "--json", str(tmp_path / "memory.json")]
    words += ["--algorithms", *CASES]
    done = subprocess.run(
        [sys.executable, str(repository / "tools" / "train" / "measure_memory.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {row["case"]: row for row in json.loads((tmp_path / "memory.json").read_text())["rows"]}
    assert (
        list(rows)
        == CASES
        == [line.split()[0] for line in done.stdout.splitlines() if line.endswith("as stated, within 10 MiB")]
    )
    for name, row in rows.items():
        # Not less either: then it would be the statement that is wrong, or nothing was measured.
        assert row["kept"] / row["parameters"] == pytest.approx(row["kept_stated"] / row["parameters"], abs=0.5), name
    shift_one = rows["decentralized-shift_one"]
    # The partner's weights, which the communication thread has memory for.
    assert shift_one["kept"] - 4 * shift_one["parameters"] > 3 * shift_one["parameters"]
