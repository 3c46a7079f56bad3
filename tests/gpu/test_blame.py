"""`bagua-net blame` and the lines of stalls in a real NCCL job of which one rank is late, and then stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.gpu_job import RunJob
from support.ports import free_port

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("blamed_job.py")


def test_a_rank_that_is_late_and_one_that_is_stopped(run_job: RunJob) -> None:
    ras = f"localhost:{free_port(2)}"  # the first job on a host has NCCL's usual port
    job = run_job(script=SCRIPT, ENABLE_BAGUA_NET="1", BAGUA_NET_STALL_S="1", NCCL_RAS_ADDR=ras)
    assert (job.code, job.networks, job.right) == (0, {"BaguaNet"}, True), job.output + job.logs
    result = next(json.loads(line) for line in job.output.splitlines() if line.startswith('{"'))
    assert result["kinds"] == ["idle", "logged idle", "stopped", "logged stopped"], job.output + job.logs
    # Rank 1 has finished the first all-reduce, and rank 0 is in the second.
    assert "\nrank 0 is in all_reduce, number " in result["logged"][0], result["logged"]
    assert "\nrank 1 has finished all_reduce, number " in result["logged"][0], result["logged"]
    if tuple(map(int, result["nccl"].split("."))) >= (2, 28, 7):
        late, stopped = result["said"]
        assert re.match(rf"rank 1 \(\S+, pid {result['pid']}\) has launched \d+ AllReduce, others up to ", late), late
        assert re.match(rf"rank 1 \(\S+, pid {result['pid']}\) does not answer NCCL", stopped), stopped
    # Rank 0 says for whom it waits, ever more rarely, and that it goes on.
    lines = [line for line in job.logs.splitlines() if "has waited for" in line and f"process {result['pid']})" in line]
    assert 1 <= len(lines) <= 8, job.logs
    assert "to receive from" in lines[0]
    assert "goes on, after at least" in job.logs
