"""A machine falls silent in the middle of a collective: the rank on the other one names it, and ends."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
from support.forked_program import run_program
from support.labs import NEEDS_LAB, Lab, enter_namespace
from support.processes import wait_until
from support.ranks import run_ranks
from support.sweeps import rest_is_deep

pytestmark = NEEDS_LAB

PATIENCE_S = 120.0
SILENT_RANK = """
import os, sys, threading, time
import torch
import bagua.torch_api as bagua
from bagua.job import peer_watch
from bagua.job.job_thread import current_job_thread
peer_watch.ATTEMPT_S = 1
bagua.init_process_group(timeout=600)
rank, silent = bagua.get_rank(), int(sys.argv[1])
tensor = torch.ones(1 << 16)
bagua.allreduce_inplace(tensor)
def wait_until(holds):
    while not holds():
        time.sleep(0.01)
    open(f"ready {rank}", "w")
if rank == silent:
    current_job_thread()
    wait_until(lambda: True)
    while not os.path.exists("silent"):
        time.sleep(0.01)
    os._exit(0)
def is_watching():
    return (watch := current_job_thread()._lost._watch) is not None and watch._connection is not None
threading.Thread(target=wait_until, args=[is_watching]).start()
bagua.allreduce_inplace(tensor)
"""


def _run_on(namespaces: list[str], silent: int, folder: str) -> tuple[int, str, str]:
    os.chdir(folder)
    enter_namespace(namespaces[int(os.environ["RANK"])])
    return run_program(SILENT_RANK, [str(silent)])


@pytest.mark.parametrize("silent", rest_is_deep([0, 1], 0))
def test_a_silent_machine_ends_the_job(silent: int, tmp_path: Path) -> None:
    """Also if the store was on it."""
    with Lab() as lab:

        def cut() -> None:
            wait_until(lambda: len([*tmp_path.glob("ready *")]) == 2, "both ranks", PATIENCE_S)
            lab.run(silent, ["ip", "link", "set", "eth0", "down"], check=True)
            (tmp_path / "silent").touch()

        cutting = threading.Thread(target=cut)
        cutting.start()
        namespaces = [str(lab.hosts[host].namespace.path) for host in range(2)]
        environments = [lab.rank_environment(host) for host in range(2)]
        told = run_ranks(2, _run_on, namespaces, silent, str(tmp_path), env=environments, timeout=PATIENCE_S)
        cutting.join()
    log = told[1 - silent][2]
    assert re.search(rf"rank {silent} \(host .*\) has answered no TCP packet for \d s: its machine or", log), log
    assert re.search(rf"CollectiveError: Rank {silent} \(host .*\) has answered no TCP packet for 6 s\.", log), log
