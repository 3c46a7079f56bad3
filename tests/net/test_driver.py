"""bagua-net-driver through its protocol: rings over the plugin and over plain sockets, and each error."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.load_driver import (
    FAILURE_S,
    LoadDriver,
    StartDriver,
    ask,
    connect_ring,
    driver_executable,
    loopback_bytes,
    plugin_library,
    quit_all,
)
from support.processes import is_alive, wait_until

TRANSPORTS = ("bare", "plugin")
SIZES = (1, 3, 8, 1000, 1024, 65536, 100_001, (1 << 20) + 4, (5 << 20) + 1)


@pytest.fixture
def start(start_driver: StartDriver) -> StartDriver:
    return start_driver


def options_of(transport: str) -> list[object]:
    return ["--transport", transport, *(["--library", plugin_library()] if transport == "plugin" else [])]


def start_ranks(
    start: StartDriver, transport: str, nranks: int = 2, *options: object, **variables: str
) -> list[LoadDriver]:
    common = [*options_of(transport), "--nranks", nranks, *options]
    return [start("ring", "--rank", rank, *common, **variables) for rank in range(nranks)]


def voluntary_switches(pid: int) -> int:
    """Of all threads that the process has now, since each began."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split(":")[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def verify(ranks: list[LoadDriver], size: int) -> None:
    for event in ask(ranks, f"verify {size}", "verified"):
        assert event == {"event": "verified", "bytes": size, "wrong_elements": 0, "first_wrong": None}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("nranks", [2, 3])
def test_a_ring_sums_rightly(start: StartDriver, transport: str, nranks: int) -> None:
    ranks = start_ranks(start, transport, nranks)
    connect_ring(ranks)
    for size in SIZES:
        verify(ranks, size)
    quit_all(ranks)


def test_no_thread_wakes_while_connections_are_idle(start: StartDriver) -> None:
    ranks = start_ranks(start, "plugin", 2, "--channels", 16, BAGUA_NET_NWORKERS="2")
    connect_ring(ranks)
    verify(ranks, 16 << 20)

    def is_quiet() -> bool:
        """In a second of real time, as sleeping threads have no event. A slow machine wakes nobody either."""
        before = voluntary_switches(ranks[0].process.pid)
        time.sleep(1.0)
        return voluntary_switches(ranks[0].process.pid) == before

    wait_until(is_quiet, "a second in which no thread wakes")
    quit_all(ranks)


def test_channels_are_spread_over_all_devices(start: StartDriver) -> None:
    ranks = start_ranks(start, "plugin", 2, "--device", "all", "--channels", 3, BAGUA_NET_RAILS="2")
    for event in connect_ring(ranks):
        assert (event["net_name"], event["table"], len(event["devices"])) == ("BaguaNet", "v12", 2)
    verify(ranks, 1 << 20)
    quit_all(ranks)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_moves_every_byte_and_reports_its_cost(start: StartDriver, transport: str) -> None:
    ranks = start_ranks(start, transport)
    connect_ring(ranks)
    size, iterations, warmup = 8 << 20, 5, 2
    moved, began = loopback_bytes(), time.monotonic()
    results = ask(ranks, f"run {size} {iterations} {warmup}", "result")
    moved, wall = loopback_bytes() - moved, time.monotonic() - began
    # Each of two ranks sends the whole buffer once per all-reduce: half of it in each of two steps.
    assert moved >= 2 * size * (iterations + warmup)
    for result in results:
        assert (result["bytes"], len(result["seconds"])) == (size, iterations)
        assert all(taken > 0 for taken in result["seconds"])
        assert sum(result["seconds"]) < wall
        assert result["cpu_s"] > 0
    # Nothing of a run is left over in the connections.
    verify(ranks, size)
    quit_all(ranks)


def test_a_driver_does_not_outlive_its_parent(environment: dict[str, str]) -> None:
    command = [str(driver_executable()), "ring", "--transport", "bare", "--rank", "0", "--nranks", "2"]
    # The parent hands its own stdin on, which this test keeps open: the end of stdin is not what ends the driver.
    script = (
        "import subprocess, sys, time\n"
        f"driver = subprocess.Popen({command!r}, stdin=sys.stdin, stdout=subprocess.PIPE)\n"
        "driver.stdout.readline()\n"
        "print(driver.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        wait_until(lambda: not is_alive(pid), f"the end of driver {pid}", FAILURE_S)


def test_the_reason_of_the_plugin_is_passed_on(start: StartDriver) -> None:
    driver = start("ring", "--rank", 0, "--nranks", 2, *options_of("plugin"), BAGUA_NET_NSTREAMS="many")
    message = driver.expect_failure()
    assert "init of BaguaNet (table v12) returned" in message
    assert "BAGUA_NET_NSTREAMS" in message
    assert "many" in message


def run_until_ended(ranks: list[LoadDriver]) -> None:
    """Returns as soon as data flows."""
    moved = loopback_bytes()
    for rank in ranks:
        rank.say(f"run {16 << 20} 100000 0")
    wait_until(lambda: loopback_bytes() - moved > 32 << 20, "traffic of the run")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("nranks", [2, 3])
def test_a_rank_that_dies_is_an_error_of_its_neighbours(start: StartDriver, transport: str, nranks: int) -> None:
    ranks = start_ranks(start, transport, nranks)
    connect_ring(ranks)
    run_until_ended(ranks)
    ranks[1].process.send_signal(signal.SIGKILL)
    # The error travels round the ring: who fails closes its connections, and so the next one fails.
    messages = [rank.expect_failure(FAILURE_S) for rank in (ranks[0], *ranks[2:])]
    assert all("127.0.0.1" in message for message in messages), messages
