"""Raw mode of bagua-net-driver: every byte, and each error."""

from __future__ import annotations

import socket
import time

import pytest
from support.load_driver import (
    ANSWER_S,
    FAILURE_S,
    LoadDriver,
    StartDriver,
    ask,
    loopback_bytes,
    quit_all,
)
from support.processes import wait_until

MIB = 1 << 20
SERVER = ("raw", "--role", "server", "--streams", "1")


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


def test_raw_ends_with_different_stream_counts_get_an_error(start_driver: StartDriver) -> None:
    server = start_driver("raw", "--role", "server", "--streams", 2)
    address = server.expect("listening")["address"]
    client = start_driver("raw", "--role", "client", "--streams", 3, "--connect", address)
    assert "--streams 3, this server has 2" in server.expect_failure(FAILURE_S)
    # The server is gone by then, or just going: while the client connects its streams, or waits for the answer.
    message = client.expect_failure(FAILURE_S)
    assert "stream" in message or f"connect to {address}" in message


def test_a_raw_server_without_a_client_fails_at_the_deadline(start_driver: StartDriver) -> None:
    server = start_driver("raw", "--role", "server", "--streams", 4, "--timeout-ms", 500)
    host, _, port = server.expect("listening")["address"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_S):  # a silent stranger is no client
        assert "only 0 of 4 streams were connected within 500 ms" in server.expect_failure(FAILURE_S)


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


def test_raw_runs_of_different_sizes_get_an_error(start_driver: StartDriver) -> None:
    server, client = start_raw(start_driver, 2, "--timeout-ms", 2500)
    server.say("run 2000000 1000000")
    client.say("run 1000000 1000000")
    assert "1000000 of 2000000 bytes" in server.expect_failure(FAILURE_S)
    client.expect_failure(FAILURE_S)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("raw", "--role", "client", "--streams", "1"), ["--connect is missing"]),
        ((*SERVER, "--memory-bytes", "0"), ['--memory-bytes is "0"', "from 1 to 1099511627776"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_command_line_is_explained(
    start_driver: StartDriver, arguments: tuple[str, ...], parts: list[str]
) -> None:
    message = start_driver(*arguments).expect_failure()
    for part in parts:
        assert part in message
