"""How many connections a comm uses: more where the network limits each of them, no more where nothing is won.

Two bagua-net-drivers, each on a host of its own (a network namespace), or both on this one. More connections pay where
the network and not the machine is the limit: a machine that cannot fill one of 400 Mbit/s would fail after ANSWER_S.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.lab_ring import Ring
from support.labs import Lab, needs_lab
from support.load_driver import ANSWER_S, LoadDriver, StartDriver, ask, connect_ring, plugin_library, quit_all

_MESSAGE_BYTES = 1 << 20
_ESTABLISHED = "01"
_LISTENING = "0A"


def _ring(lab: Lab, **variables: str) -> Ring:
    return Ring(lab, channels=1, env=variables, arguments=("--depth", 8))


def _data_connections(pair: Sequence[LoadDriver]) -> int:
    """Those to the port at which rank 1 listens, as its host sees them."""
    table = Path(f"/proc/{pair[1].process.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [(row[1], row[3], row[9]) for row in (line.split() for line in table)]
    inodes = _socket_inodes(pair[1].process.pid)
    (port,) = {local.rpartition(":")[2] for local, state, inode in rows if state == _LISTENING and inode in inodes}
    return sum(local.endswith(f":{port}") and state == _ESTABLISHED and inode in inodes for local, state, inode in rows)


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


@needs_lab
@pytest.mark.parametrize("workers", [0, 2])
def test_a_comm_opens_more_connections_where_each_is_limited(workers: int) -> None:
    """Twice as many at least: of those that a trial opens, some may not come in time on a busy machine."""
    with (
        Lab(rate_mbit=640, per_flow_mbit=80, ip_versions=(4,)) as lab,
        _ring(lab, BAGUA_NET_NWORKERS=str(workers)) as ring,
    ):
        ring.connect()
        wanted = 2 * _data_connections(ring.drivers)
        deadline = time.monotonic() + ANSWER_S
        while (connections := _data_connections(ring.drivers)) < wanted:
            assert time.monotonic() < deadline, f"{connections} connections, and not {wanted}, after {ANSWER_S} s"
            ring.verify(16 * _MESSAGE_BYTES)
        # Those that came stay, and carry messages.
        ring.verify(8 * _MESSAGE_BYTES)
        assert _data_connections(ring.drivers) >= wanted
        ring.quit()


@needs_lab
@pytest.mark.parametrize(("delay_ms", "connections"), [(None, 4), (1, 2)])
def test_a_comm_begins_with_fewer_connections_on_a_long_path(delay_ms: float | None, connections: int) -> None:
    with Lab(delay_ms=delay_ms, ip_versions=(4,)) as lab, _ring(lab, BAGUA_NET_NWORKERS="2") as ring:
        ring.connect()
        assert _data_connections(ring.drivers) == connections
        ring.verify(4 * _MESSAGE_BYTES)
        ring.quit()


@needs_lab
def test_a_fixed_number_of_connections_stays() -> None:
    with (
        Lab(rate_mbit=320, per_flow_mbit=40, ip_versions=(4,)) as lab,
        _ring(lab, BAGUA_NET_NSTREAMS="1") as ring,
    ):
        ring.connect()
        # More than a second at 40 Mbit/s, every connection full: a comm that may choose has opened others by then. On a
        # slow machine it takes longer, and none may come then either.
        ring.verify(6 * _MESSAGE_BYTES)
        assert _data_connections(ring.drivers) == 1
        ring.quit()


def test_on_one_host_the_number_stays(start_driver: StartDriver) -> None:
    arguments = ("--nranks", 2, "--channels", 1, "--depth", 8, "--transport", "plugin", "--library", plugin_library())
    pair = [start_driver("ring", "--rank", rank, *arguments, BAGUA_NET_NWORKERS="2") for rank in range(2)]
    connect_ring(pair)
    began_with = _data_connections(pair)
    for event in ask(pair, f"verify {200 * _MESSAGE_BYTES}", "verified"):
        assert event["wrong_elements"] == 0
    assert _data_connections(pair) == began_with
    quit_all(pair)
