"""tools/train/measure_memory.py as a program of its own: two ranks on CPUs, a model of 32 MiB. What needs no ranks is
in tests/unit/test_memory_measurement.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result

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
    told = [line.split()[0] for line in done.stdout.splitlines() if line.endswith("as stated, within 10 MiB")]
    assert told == CASES
    result = read_result(tmp_path / "memory.json")
    kept = {figure.case["algorithm"]: figure for figure in result.select("memory_kept")}
    assert list(kept) == ["gradient_allreduce", "shift_one", "low_precision_decentralized", "async"]
    for name, figure in kept.items():
        # Not less either: then it would be the statement that is wrong, or nothing was measured.
        stated = result.find("memory_kept_stated", algorithm=name).median
        half_a_byte = 0.5 * int(str(figure.case["parameters"])) / (1 << 20)
        assert figure.median == pytest.approx(stated, abs=half_a_byte), name
    # The model's weights and the partner's, which the communication thread has memory for: over 7 bytes a parameter.
    assert kept["shift_one"].median > 7 * 8
