"""bagua-net-bench --busy-per-cpu: as many busy processes as asked for, as long as the run, and not longer."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.bench_command import Bench
from support.ports import free_port
from support.processes import living_pids, wait_until

from bagua.net.bench.process_tree import descendants

CPUS = len(os.sched_getaffinity(0))
RUN = ["-b", "1K", "-e", "1K", "-n", "3", "--repeats", "2", "--backends", "bare"]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_they_compute_and_end_with_the_run(bench: Bench, number: signal.Signals) -> None:
    running = subprocess.Popen(
        bench.command(*RUN, "--busy-per-cpu", "1"),
        env=bench.environment({"at": "run", "do": "hang", "transport": "bare"}),
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(living_pids(bench.pids)) == 2, "the start of the drivers")
    busy = set(descendants(running.pid)) - set(living_pids(bench.pids))
    assert len(busy) == CPUS
    tenth = os.sysconf("SC_CLK_TCK") // 10
    wait_until(lambda: all(cpu_ticks(pid) >= tenth for pid in busy), "0.1 s of CPU time of each")
    running.send_signal(number)
    running.wait(60)
    wait_until(lambda: not any(map(is_alive, busy)), "the end of every process")


def test_a_launcher_must_say_who_is_first_on_a_host(bench: Bench) -> None:
    """PMI tells a rank and a size only."""
    environment = bench.environment() | {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    finished = subprocess.run(
        bench.command(*RUN, "--busy-per-cpu", "1"), env=environment, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 2
    assert "does not say which rank is the first of its host" in finished.stderr


def test_launched_ranks_of_one_host_share_them(bench: Bench) -> None:
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "busy"}
    command = bench.command(*RUN, "--busy-per-cpu", "1", "--port", str(free_port()))
    ranks = [
        subprocess.Popen(
            command,
            env={**bench.environment(), **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "1 busy process per CPU" in said[0][0]
