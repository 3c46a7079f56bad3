"""A rank dies in the middle of training: the others say which, and nobody waits indefinitely."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.forked_launcher import run_launcher
from support.ranks import run_ranks
from support.training import NormNet, batches, loss_of, momentum, wrap

from bagua.job.failure_report import CollectiveError

# Without this, torch ends the process where NCCL fails, before Python can say anything: see failure_report.py.
RAISED_BY_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1"}


def _interrupted(how: str, where: str) -> tuple[str, tuple[int, ...]]:
    rank, device = begin_to_lose_one()
    torch.manual_seed(rank)
    net = NormNet().to(device)
    optimizer = momentum(net)
    if rank == VICTIM and where == "wrapping":
        die()
    try:
        model = wrap(how, net, optimizer)
        if rank == VICTIM:
            # After the last layer's gradient, or before the forward pass of step 3 begins.
            if where == "backward":
                net.second.weight.register_hook(_Countdown(3))
            else:
                model.register_forward_pre_hook(_Countdown(3))
        with model.join() if where == "join" else contextlib.nullcontext():
            for batch in batches(rank, 6, device):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    except CollectiveError as error:
        return str(error), error.missing_ranks
    raise AssertionError("all steps were made without the rank that died")


class _Countdown:
    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            die()


@pytest.mark.parametrize(
    ("how", "where"),
    [("with_bagua", "backward"), ("wrapper", "forward"), ("with_bagua", "wrapping"), ("wrapper", "join")],
)
def test_survivors_name_the_rank_that_died(how: str, where: str) -> None:
    told = run_ranks(3, _interrupted, how, where, env=RAISED_BY_NCCL, expect_death={VICTIM})
    assert told[VICTIM] is None
    for message, missing in (told[0], told[2]):
        assert missing == (VICTIM,), message
        assert message.startswith(f"Rank {VICTIM} (host ")
        assert "from the last checkpoint" in message


# The victim waits until all are connected; torchrun then ends the others within its monitoring interval of 0.1 s.
_UNDER_TORCHRUN = """
import os, signal
import torch
import bagua.torch_api as bagua

bagua.init_process_group()
rank = bagua.get_rank()
tensor = torch.ones(8)
bagua.allreduce_inplace(tensor)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
bagua.allreduce_inplace(tensor)
"""


def test_the_diagnosis_reaches_the_log_under_torchrun(tmp_path: Path) -> None:
    """torchrun ends the others when it looks again, long before the roll call would be over. After 0.1 s by default: on
    a busy machine they may not have run by then."""
    script = tmp_path / "train.py"
    script.write_text(_UNDER_TORCHRUN)
    options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_launcher("torch.distributed.run", options, tmp_path, environment, 240, forks=True)
    assert done.returncode != 0
    assert re.search(
        r"^bagua: Rank 1 \(host .*\) exited\.\nOperation on rank 0: all_reduce", done.stderr, re.MULTILINE
    ), done.stderr
