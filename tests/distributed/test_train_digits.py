"""examples/train_digits.py as its first lines say to run it: it learns, and Bagua and torch's DDP print the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs scikit-learn, which brings the digits: pip install 'bagua[examples]'")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"


def run_example(*options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(EXAMPLE), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_it_learns_and_agrees_with_ddp() -> None:
    ours, torchs = run_example("--epochs", "8"), run_example("--epochs", "8", "--ddp")
    assert [line for line in ours if line.startswith("epoch")] == [line for line in torchs if line.startswith("epoch")]
    found = re.search(r"Bagua, 2 processes on cpu: test accuracy ([0-9.]+)%", ours[-1])
    assert found is not None, ours[-1]
    assert float(found[1]) > 95
