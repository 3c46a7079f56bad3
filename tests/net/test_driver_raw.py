"""Raw mode of bagua-net-driver: every byte, and each error."""

from __future__ import annotations

import time

import pytest
from support.load_driver import (
    FAILURE_S,
    LoadDriver,
    StartDriver,
    ask,
    loopback_bytes,
    quit_all,
)
from support.processes import wait_until

MIB = 1 << 20


def start_raw(start: StartDriver, streams: int, *options: object) -> tuple[LoadDriver, LoadDriver]:
    server = start("raw", "--role", "server", "--streams", streams, *options)
    address = server.expect("listening")["address"]
    client = start("raw", "--role", "client", "--streams", streams, "--connect", address, *options)
    for end in (server, client):
        end.expect("connected")
    return server, client


@pytest.mark.parametrize("streams", [1, 3])
def test_a_run_moves_every_byte_and_reports_its_cost(start_driver: StartDriver, streams: int) -> None:
    ends = start_raw(start_driver, streams, "--write-bytes", 65536, "--memory-bytes", 8 * MIB)
    # Memory of a byte, less than a block, more than the run, a whole number of blocks and none; it shrinks and grows.
    runs = [
        (1, 1),
        (1000, 1),
        (65537, 8 * MIB),
        (MIB, 1000),
        (64 * MIB, 8 * MIB),
        (3 * MIB, 65536),
        (64 * MIB, 100_003),
    ]
    for size, memory in runs:
        moved, began = loopback_bytes(), time.monotonic()
        results = ask(ends, f"run {size} {memory}", "result")
        moved, wall = loopback_bytes() - moved, time.monotonic() - began
        assert moved >= size
        for result in results:
            assert result["bytes"] == size
            assert 0 < result["seconds"] < wall
    assert all(result["cpu_s"] > 0 for result in results)
    quit_all(ends)


def test_a_raw_end_that_dies_is_an_error_of_the_other(start_driver: StartDriver) -> None:
    for victim in (0, 1):
        ends = start_raw(start_driver, 2)
        moved = loopback_bytes()
        for end in ends:
            end.say(f"run {1 << 40} {MIB}")
        wait_until(lambda moved=moved: loopback_bytes() - moved > 8 * MIB, "traffic of the run")
        ends[victim].process.kill()
        message = ends[1 - victim].expect_failure(FAILURE_S)
        assert "stream" in message
        assert "has that process ended" in message or "has the other process ended" in message
