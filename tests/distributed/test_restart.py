"""torchrun --max-restarts: the ranks of the next attempt find each other, and not those that have died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    if attempt == "0" and step == 3 and bagua.get_rank() == 1:
        os._exit(3)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
os.write(1, f"finished {bagua.get_rank()} attempt {attempt}\\n".encode())
os._exit(0)
"""


def test_the_next_attempt_begins_anew(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--max-restarts", "1", "--monitor-interval", "0.1", str(script)]
    done = subprocess.run([*launcher, *options], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")) == ["", "finished 0 attempt 1", "finished 1 attempt 1"]
