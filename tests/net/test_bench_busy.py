"""bagua-net-bench --busy-per-cpu: as many busy processes as asked for, as long as the run, and not longer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.bench_command import Bench
from support.ports import free_port
from support.processes import living_pids, wait_until

CPUS = len(os.sched_getaffinity(0))
RUN = ["-b", "1K", "-e", "1K", "-n", "3", "--repeats", "2", "--backends", "bare"]


def test_head_and_json_say_so(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    finished = bench.run(*RUN, "--busy-per-cpu", "2", "--json", str(path))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[0].endswith("over lo (127.0.0.1), 2 busy processes per CPU")
    assert json.loads(path.read_text())["parameters"]["busy_per_cpu"] == 2
    assert len(list(bench.pids.iterdir())) == 2 + 2 * CPUS


def test_without_it_there_are_none(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    finished = bench.run(*RUN, "--json", str(path))
    assert "busy" not in finished.stdout
    assert json.loads(path.read_text())["parameters"]["busy_per_cpu"] == 0
    assert len(list(bench.pids.iterdir())) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_run(bench: Bench, number: signal.Signals) -> None:
    running = subprocess.Popen(
        bench.command(*RUN, "--busy-per-cpu", "1"),
        env=bench.environment({"at": "run", "do": "hang", "transport": "bare"}),
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(living_pids(bench.pids)) == 2 + CPUS, "the start of every process", 30)
    running.send_signal(number)
    running.wait(30)
    wait_until(lambda: living_pids(bench.pids) == [], "the end of every process", 30)


def test_a_failed_run_ends_them(bench: Bench) -> None:
    finished = bench.run(*RUN, "--busy-per-cpu", "1", fault={"at": "run", "do": "kill", "transport": "bare", "rank": 1})
    assert finished.returncode == 1
    assert "killed by SIGKILL" in finished.stderr


def test_one_that_cannot_start_is_named(bench: Bench) -> None:
    finished = bench.run(*RUN, "--busy-per-cpu", "1", fault={"at": "start", "do": "exit"})
    assert finished.returncode == 1
    # All of them exit; the first to be noticed may be any.
    assert any(f"busy process {number} of {CPUS}" in finished.stderr for number in range(1, CPUS + 1)), finished.stderr


@pytest.mark.parametrize("value", ["-1", "65", "two"])
def test_what_cannot_be_is_explained(bench: Bench, value: str) -> None:
    finished = bench.run(*RUN, "--busy-per-cpu", value)
    assert finished.returncode == 2
    assert "0..64" in finished.stderr


def test_a_launcher_must_say_who_is_first_on_a_host(bench: Bench) -> None:
    """PMI tells a rank and a size only."""
    environment = bench.environment() | {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    finished = subprocess.run(
        bench.command(*RUN, "--busy-per-cpu", "1"), env=environment, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 2
    assert "does not say which rank is the first of its host" in finished.stderr


def test_of_launched_ranks_the_first_of_a_host_keeps_it_busy(bench: Bench) -> None:
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
    # Two ranks of the one backend, and the busy processes of one of them.
    assert len(list(bench.pids.iterdir())) == 2 + CPUS
    assert living_pids(bench.pids) == []
