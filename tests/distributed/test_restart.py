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
    """With both kinds of rendezvous, at the same time."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1", str(script)]
    jobs = {
        " ".join(rendezvous): subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *rendezvous, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rendezvous in (["--standalone"], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"])
    }
    try:
        for rendezvous, job in jobs.items():
            output, errors = job.communicate(timeout=240)
            assert job.returncode == 0, f"{rendezvous}: {errors[-3000:]}"
            assert sorted(output.split("\n")) == ["", "finished 0 attempt 1", "finished 1 attempt 1"], rendezvous
    finally:
        for job in jobs.values():
            job.kill()
            job.communicate()
