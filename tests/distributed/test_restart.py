"""torchrun --max-restarts: the ranks of the next attempt find each other, and not those that have died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
bagua.init_process_group()
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net.with_bagua([optimizer], GradientAllReduceAlgorithm())
for step in range(5):
    if attempt != "2" and step == 3 and bagua.get_rank() == 1:
        os._exit(3)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
os.write(1, f"finished {bagua.get_rank()} attempt {attempt}\\n".encode())
os._exit(0)
"""


@pytest.mark.parametrize("rendezvous", [["--standalone"], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]])
def test_every_attempt_begins_anew(rendezvous: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *rendezvous,
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, str(script)], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")) == ["", "finished 0 attempt 2", "finished 1 attempt 2"]
