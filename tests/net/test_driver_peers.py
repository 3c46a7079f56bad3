"""Peers mode of bagua-net-driver, with the built library: data, promises about idle comms, and each error."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from support.load_driver import ANSWER_S, Event, LoadDriver, StartDriver, plugin_library, quit_all
from support.processes import wait_until

TRANSPORTS = ("bare", "plugin")
# Whatever the machine: the plugin alone would take none on two CPUs.
TWO_WORKERS = {"BAGUA_NET_NWORKERS": "2"}
MANY = 64


def start_pair(
    start: StartDriver, transport: str, comms: int, *options: object, **variables: str
) -> tuple[LoadDriver, LoadDriver]:
    library = ["--library", plugin_library()] if transport == "plugin" else []
    common = ["--transport", transport, *library, "--comms", comms, *options]
    first, second = (start("peers", "--rank", rank, *common, **variables) for rank in range(2))
    return first, second


def connect(pair: tuple[LoadDriver, LoadDriver]) -> list[Event]:
    listening = [rank.expect("listening") for rank in pair]
    for rank, peer in zip(pair, reversed(listening), strict=True):
        rank.say("connect " + " ".join(peer["handles"]))
    for rank in pair:
        rank.expect("connected")
    return listening


def ask(pair: tuple[LoadDriver, LoadDriver], command: str, event: str) -> list[Event]:
    for rank in pair:
        rank.say(command)
    return [rank.expect(event) for rank in pair]


def verify(pair: tuple[LoadDriver, LoadDriver], size: int, messages: int) -> None:
    for event in ask(pair, f"verify {size} {messages}", "verified"):
        expected = {"bytes": size, "messages": messages, "wrong_elements": 0, "first_wrong_message": None}
        assert event == {"event": "verified", **expected}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("comms", "in_flight"), [(1, 1), (1, 32), (3, 8), (MANY, 8)], ids=str)
def test_every_message_arrives_rightly(start_driver: StartDriver, transport: str, comms: int, in_flight: int) -> None:
    pair = start_pair(start_driver, transport, comms, "--in-flight", in_flight)
    connect(pair)
    for size in (1, 1000, 65536, 100_001, 1 << 20):
        # Neither a multiple of the comms nor of the window.
        verify(pair, size, 2 * comms + 3)
    quit_all(pair)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_reports_its_cost(start_driver: StartDriver, transport: str) -> None:
    pair = start_pair(start_driver, transport, 5)
    connect(pair)
    began = time.monotonic()
    results = ask(pair, "run 262144 100 10", "result")
    wall = time.monotonic() - began
    for result in results:
        assert (result["bytes"], result["messages"]) == (262144, 100)
        assert 0 < result["seconds"] < wall
        assert result["cpu_user_s"] + result["cpu_system_s"] > 0
    # Nothing of a run is left over in the connections.
    verify(pair, 1000, 11)
    quit_all(pair)


def switches(pair: tuple[LoadDriver, LoadDriver]) -> list[dict[str, float]]:
    """Of each rank: how often each thread but the driver's own has gone to sleep so far."""
    return [
        {
            f"{name} {int(thread)}": count
            for name, thread, count in zip(
                event["thread_names"], event["thread_ids"], event["thread_voluntary_switches"], strict=True
            )
        }
        for event in ask(pair, "footprint", "footprint")
    ]


@pytest.mark.parametrize("comms", [1, MANY])
def test_no_thread_of_the_plugin_wakes_while_nothing_flows(start_driver: StartDriver, comms: int) -> None:
    pair = start_pair(start_driver, "plugin", comms, **TWO_WORKERS)
    connect(pair)
    ask(pair, f"run 1048576 {2 * comms + 30} 0", "result")
    after_traffic = switches(pair)
    for threads in after_traffic:
        workers = [name for name in threads if "io" in name]
        assert len(workers) == 2, threads
    # They may still be on their way to sleep.
    state: dict[str, Any] = {"last": after_traffic}

    def is_quiet() -> bool:
        time.sleep(0.1)
        before, state["last"] = state["last"], switches(pair)
        return bool(before == state["last"])

    wait_until(is_quiet, "all threads asleep after the traffic", 30)
    asleep = switches(pair)
    time.sleep(1)
    assert switches(pair) == asleep, "a thread woke in a second without traffic"
    # The figure is one that moves: the same threads work again.
    verify(pair, 1 << 20, 2 * comms)
    awake = switches(pair)
    for before, after in zip(asleep, awake, strict=True):
        assert after.keys() == before.keys()
        assert sum(after.values()) > sum(before.values())
    quit_all(pair)


def test_many_comms_need_no_more_threads_than_one(start_driver: StartDriver) -> None:
    threads = []
    for comms in (1, MANY):
        pair = start_pair(start_driver, "plugin", comms, **TWO_WORKERS)
        listening = connect(pair)
        ask(pair, f"run 1048576 {2 * MANY} 0", "result")
        footprints = ask(pair, "footprint", "footprint")
        # The main thread, two workers, and one that makes connections.
        assert all(footprint["threads"] <= 4 for footprint in footprints), footprints
        threads.append([sorted(footprint["thread_names"]) for footprint in footprints])
        assert [event["before_threads"] for event in listening] == [1, 1]
        quit_all(pair)
    assert threads[0] == threads[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_comm_holds_little_memory(start_driver: StartDriver, transport: str) -> None:
    """Far above what is measured, far below one message's buffer."""
    pair = start_pair(start_driver, transport, MANY)
    listening = connect(pair)
    ask(pair, f"run 1048576 {2 * MANY} 0", "result")
    for before, after in zip(listening, ask(pair, "footprint", "footprint"), strict=True):
        grown = after["resident_bytes"] - before["before_resident_bytes"]
        assert grown < 2 * MANY * 256 * 1024
        assert after["tcp_sockets"] >= 2 * MANY
        assert after["descriptors"] >= after["tcp_sockets"]
        assert after["socket_memory_bytes"] < 2 * MANY * 64 * 1024
        assert before["before_tcp_sockets"] == 0
    quit_all(pair)


def test_sockets_that_hold_data_are_counted(start_driver: StartDriver) -> None:
    """One rank sends and the other does not receive: the kernel has the bytes."""
    first, second = start_pair(start_driver, "bare", 1)
    connect((first, second))
    first.say("run 1048576 1 0")
    held: dict[str, int] = {}

    def holds_data() -> bool:
        second.say("footprint")
        held.update(second.expect("footprint"))
        return held["socket_memory_bytes"] >= 4096

    wait_until(holds_data, "received bytes in the idle rank's socket", ANSWER_S)
    assert held["tcp_sockets"] == 2


def test_a_low_limit_of_descriptors_is_raised(start_driver: StartDriver) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1024:
        pytest.skip(f"needs a hard limit of 1024 descriptors; it is {hard}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        pair = start_pair(start_driver, "bare", 200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connect(pair)
    verify(pair, 1000, 200)
    quit_all(pair)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_silent_peer_is_an_error_that_says_where(start_driver: StartDriver, transport: str) -> None:
    pair = start_pair(start_driver, transport, 3, "--timeout-ms", 1500)
    connect(pair)
    pair[0].say("run 1000 7 0")
    message = pair[0].expect_failure()
    assert "no message completed for 1500 ms at rank 0 (its peer is rank 1)" in message
    assert "0 of 7 messages received" in message
    assert "message 0 on comm 0" in message
    assert "--timeout-ms" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_peer_is_an_error(start_driver: StartDriver, transport: str) -> None:
    pair = start_pair(start_driver, transport, 3)
    connect(pair)
    pair[1].process.kill()
    pair[0].say("run 1048576 100 0")
    message = pair[0].expect_failure()
    assert message


PEERS = ("peers", "--transport", "bare")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((*PEERS, "--rank", "0", "--comms", "1025"), ['--comms is "1025"', "from 1 to 1024"]),
        ((*PEERS, "--rank", "0", "--comms", "1", "--in-flight", "33"), ['--in-flight is "33"', "from 1 to 32"]),
        ((*PEERS, "--rank", "0", "--comms", "3", "--address", "127.0.0.1:65534"), ["65534", "3 channels"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_command_line_is_explained(
    start_driver: StartDriver, arguments: tuple[str, ...], parts: list[str]
) -> None:
    message = start_driver(*arguments).expect_failure()
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("run 1048577 1 0", ['BYTES of run is "1048577"', "from 1 to 1048576"]),
        ("verify 8", ["has 1 arguments", "verify BYTES MESSAGES"]),
        ("footprint now", ["has 1 arguments", "written: footprint"]),
        ("stop", ['unknown command "stop"', "connect, run, verify, footprint and quit"]),
    ],
)
def test_a_bad_command_is_explained(start_driver: StartDriver, command: str, parts: list[str]) -> None:
    pair = start_pair(start_driver, "bare", 1)
    connect(pair)
    pair[0].say(command)
    message = pair[0].expect_failure()
    for part in parts:
        assert part in message


def test_a_run_before_connect_is_explained(start_driver: StartDriver) -> None:
    pair = start_pair(start_driver, "bare", 1)
    pair[0].expect("listening")
    pair[0].say("verify 8 1")
    assert 'command "verify" came before "connect"' in pair[0].expect_failure()
