"""How many connections a comm uses: more where the network limits each of them, no more where nothing is won.

Two bagua-net-drivers, each on a host of its own (a network namespace), or both on this one. More connections pay where
the network and not the machine is the limit: a machine that cannot fill one of 400 Mbit/s would fail after ANSWER_S.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.lab_ring import Ring
from support.labs import Lab, needs_lab
from support.load_driver import ANSWER_S, LoadDriver, StartDriver, ask, connect_ring, plugin_library, quit_all

Pair = tuple[LoadDriver, LoadDriver]

_PLUGIN = ("--transport", "plugin", "--library")
_MESSAGE_BYTES = 1 << 20
_ESTABLISHED = "01"
_LISTENING = "0A"


def _start_arguments(rank: int) -> list[object]:
    return ["ring", "--rank", rank, "--nranks", 2, "--channels", 1, "--depth", 8, *_PLUGIN, plugin_library()]


@contextmanager
def _pair_across(lab: Lab, tmp_path: Path, environment: dict[str, str]) -> Iterator[Pair]:
    drivers: list[LoadDriver] = []
    try:
        for rank in range(2):
            variables = {**environment, **lab.rank_environment(rank)}
            with lab.inside(rank):
                drivers.append(LoadDriver(_start_arguments(rank), variables, tmp_path / f"rank{rank}.log"))
        yield drivers[0], drivers[1]
    finally:
        for driver in drivers:
            driver.end()


def _data_connections(pair: Pair) -> int:
    """Those to the port at which rank 1 listens, as its host sees them."""
    table = Path(f"/proc/{pair[1].process.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [(row[1], row[3], row[9]) for row in (line.split() for line in table)]
    inodes = _socket_inodes(pair[1].process.pid)
    (port,) = {local.rpartition(":")[2] for local, state, inode in rows if state == _LISTENING and inode in inodes}
    return sum(local.endswith(f":{port}") and state == _ESTABLISHED and inode in inodes for local, state, inode in rows)


def _established(lab: Lab) -> int:
    listed = lab.run(0, ["ss", "-H", "-t", "-n", "state", "established"], check=True).stdout
    return len(listed.splitlines())


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def _verify(pair: Pair, messages: int) -> None:
    for event in ask(pair, f"verify {messages * _MESSAGE_BYTES}", "verified"):
        assert event["wrong_elements"] == 0


@needs_lab
@pytest.mark.parametrize(("workers", "doublings"), [(0, 1), (2, 2)])
def test_a_comm_opens_more_connections_where_each_is_limited(
    workers: int, doublings: int, environment: dict[str, str], tmp_path: Path
) -> None:
    variables = {**environment, "BAGUA_NET_NWORKERS": str(workers)}
    with (
        Lab(rate_mbit=640, per_flow_mbit=80, ip_versions=(4,)) as lab,
        _pair_across(lab, tmp_path, variables) as pair,
    ):
        connect_ring(pair)
        wanted = _data_connections(pair) * 2**doublings
        deadline = time.monotonic() + ANSWER_S
        while (connections := _data_connections(pair)) < wanted:
            assert time.monotonic() < deadline, f"{connections} connections, and not {wanted}, after {ANSWER_S} s"
            _verify(pair, 16)
        # Those that came stay, and carry messages.
        _verify(pair, 8)
        assert _data_connections(pair) >= wanted
        quit_all(pair)


@needs_lab
@pytest.mark.parametrize(("delay_ms", "connections"), [(None, 4), (1, 2)])
def test_a_comm_begins_with_fewer_connections_on_a_long_path(
    delay_ms: float | None, connections: int, environment: dict[str, str], tmp_path: Path
) -> None:
    variables = {**environment, "BAGUA_NET_NWORKERS": "2"}
    with Lab(delay_ms=delay_ms, ip_versions=(4,)) as lab, _pair_across(lab, tmp_path, variables) as pair:
        connect_ring(pair)
        assert _data_connections(pair) == connections
        _verify(pair, 4)
        quit_all(pair)


@needs_lab
def test_medium_messages_that_wait_for_each_other_use_more_connections() -> None:
    """Of 64 KiB, as NCCL sends them in an all-reduce of 256 KiB over two channels."""
    with (
        Lab(rate_mbit=3200, per_flow_mbit=400, ip_versions=(4,)) as lab,
        Ring(lab, env={"BAGUA_NET_NWORKERS": "0"}) as ring,
    ):
        ring.connect()
        at_first = _established(lab)
        deadline = time.monotonic() + ANSWER_S
        while (connections := _established(lab)) < 2 * at_first:
            assert time.monotonic() < deadline, f"{connections} connections, {at_first} at first, after {ANSWER_S} s"
            ring.run(256 << 10, 200)
        ring.verify(256 << 10)
        ring.quit()


@needs_lab
def test_a_fixed_number_of_connections_stays(environment: dict[str, str], tmp_path: Path) -> None:
    variables = {**environment, "BAGUA_NET_NSTREAMS": "1"}
    with (
        Lab(rate_mbit=320, per_flow_mbit=40, ip_versions=(4,)) as lab,
        _pair_across(lab, tmp_path, variables) as pair,
    ):
        connect_ring(pair)
        # More than a second at 40 Mbit/s, every connection full: a comm that may choose has opened others by then. On a
        # slow machine it takes longer, and none may come then either.
        _verify(pair, 6)
        assert _data_connections(pair) == 1
        quit_all(pair)


def test_on_one_host_the_number_stays(start_driver: StartDriver) -> None:
    first, second = (start_driver(*_start_arguments(rank), BAGUA_NET_NWORKERS="2") for rank in range(2))
    pair = (first, second)
    connect_ring(pair)
    began_with = _data_connections(pair)
    _verify(pair, 200)
    assert _data_connections(pair) == began_with
    quit_all(pair)
