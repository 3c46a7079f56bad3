"""A machine falls silent in the middle of a collective: the rank on the other one names it, and ends."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest
from support.labs import NEEDS_LAB, Lab
from support.processes import wait_until
from support.sweeps import rest_is_deep

pytestmark = NEEDS_LAB

PATIENCE_S = 120.0
SILENT_RANK = """
import signal, sys
import torch
import bagua.torch_api as bagua
from bagua.job import peer_watch
from bagua.job.job_thread import current_job_thread
peer_watch.ATTEMPT_S = 1
bagua.init_process_group(timeout=600)
rank, silent = bagua.get_rank(), int(sys.argv[1])
tensor = torch.ones(1 << 16)
bagua.allreduce_inplace(tensor)
if rank == silent:
    current_job_thread()
    print("ready", flush=True)
    signal.pause()
def is_watching():
    return (watch := current_job_thread()._lost._watch) is not None and watch._connection is not None
def tell():
    while not is_watching():
        time.sleep(0.01)
    print("ready", flush=True)
import threading, time
threading.Thread(target=tell).start()
bagua.allreduce_inplace(tensor)
"""


@pytest.mark.parametrize("silent", rest_is_deep([0, 1], 0))
def test_a_silent_machine_ends_the_job(silent: int) -> None:
    """Also if the store was on it."""
    with Lab() as lab:
        ranks = [
            lab.start(
                host,
                [sys.executable, "-c", SILENT_RANK, str(silent)],
                {**lab.rank_environment(host), "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONSAFEPATH": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        try:
            lines: list[str] = []
            readers = [threading.Thread(target=lambda out=rank.stdout: lines.append(out.readline())) for rank in ranks]
            for reader in readers:
                reader.start()
            wait_until(lambda: len(lines) == 2, "both ranks", PATIENCE_S)
            assert lines == ["ready\n", "ready\n"]
            lab.run(silent, ["ip", "link", "set", "eth0", "down"], check=True)
            _, log = ranks[1 - silent].communicate(timeout=PATIENCE_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    assert re.search(rf"rank {silent} \(host .*\) has answered no TCP packet for \d s: its machine or", log), log
    assert re.search(rf"CollectiveError: Rank {silent} \(host .*\) has answered no TCP packet for 6 s\.", log), log
