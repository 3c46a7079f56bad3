"""The asking end: meets the serving end, examines the path, and makes the report."""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bagua.net import secret_file
from bagua.net.bench.driver import check_driver
from bagua.net.bench.errors import BenchError, ConnectionLostError
from bagua.net.bench.processes import LocalPlace
from bagua.net.bench.ranks import RemotePlace
from bagua.net.bench.rendezvous import LineConnection
from bagua.net.doctor.finding import Report
from bagua.net.doctor.peer.bandwidth import Bandwidth, measure_bandwidth, progress_steps
from bagua.net.doctor.peer.checks import (
    check_bandwidth,
    check_mtu,
    check_names,
    check_ports,
    check_reach,
    check_route,
    check_secrets,
    check_versions,
    is_same_host,
)
from bagua.net.doctor.peer.facts import HostFacts, facts_of_this_host, parse_facts, resolved, tcp_facts
from bagua.net.doctor.peer.handshake import STEP_S, connect, introduce
from bagua.net.doctor.peer.joined import STREAMS, NicPair, check_joined, joined_pairs, together
from bagua.net.doctor.peer.reach import reach_of
from bagua.net.doctor.peer.serving import driver_settings
from bagua.net.library import driver_path
from bagua.progress import Progress
from bagua.version import __version__

_PINGS = 30
# More than TCP's first window, so that packets of full size are under way in both directions.
_LARGE_BYTES = 256 << 10
_LARGE_S = 6.0
_PROBE_S = 2.0


def examine_peer(
    host: str,
    port: int,
    token: str,
    *,
    wait_s: float,
    transfer_s: float,
    environment: Mapping[str, str],
    progress: Callable[[int], Progress],
    still_waits: Callable[[str], None] = lambda _: None,
) -> Report:
    """
    Args:
        wait_s: until the other end listens.
        transfer_s: of each transfer.
        still_waits: called while it does not listen, with the reason; may raise.

    Raises:
        BenchError: the peer cannot be reached, is none of ours, has another token, or is lost on the way.
    """
    driver = driver_path()
    check_driver(driver)
    connected = connect(host, port, wait_s, still_waits)
    remote = str(connected.getpeername()[0])
    connection = LineConnection(connected, f"{host} ({remote})" if host != remote else host, STEP_S)
    try:
        introduce(connection, token)
        here, there = _exchange_facts(connection, environment)
        round_trip_s = statistics.median(_ping(connection, number) for number in range(_PINGS))
        large_passes = _large_passes(connection)
        tcp = tcp_facts(connected)
        local = connection.local_address
        addresses = {one: _probe(one, port) for one in _used_addresses(there, remote)}
        same_host = is_same_host(local, remote, here, there)
        differ = here.uses_ipv6 != there.uses_ipv6 and None not in (here.uses_ipv6, there.uses_ipv6)
        pairs = [] if same_host or differ else joined_pairs(local, remote, here, there)
        bandwidth = Bandwidth()
        if large_passes:
            connection.send({"begin": True})
            bandwidth = _measure(connection, there.host, pairs, driver, environment, transfer_s, round_trip_s, progress)
        else:
            connection.send({"finish": True})
    finally:
        connection.close()
    fastest = round_trip_s if tcp.min_rtt_s is None else tcp.min_rtt_s
    ends = [one for one in (here.interface_of(local), there.interface_of(remote)) if one is not None]
    speeds = [one.speed_mbps for one in ends if one.speed_mbps]
    reach = reach_of(bandwidth, here, there, min(speeds, default=0), tcp.min_rtt_s)
    is_joined = bool(pairs and bandwidth.rates)
    if is_joined and reach is not None:
        reach = together(reach, pairs)
    sections = (
        check_names(host, resolved(host), remote, here, there, same_host=same_host),
        check_versions(here, there),
        check_route(local, remote, here, there, same_host=same_host),
        check_secrets(here, there),
        check_mtu(local, remote, here, there, tcp, large_passes, same_host=same_host),
        *([check_ports(addresses, bandwidth, local, remote)] if large_passes else []),
        check_bandwidth(bandwidth, tcp, round_trip_s, reach, same_host=same_host),
        *([check_joined(pairs, local, remote, here, there)] if is_joined else []),
        check_reach(reach, fastest, same_host=same_host, is_encrypted=bool(secret_file.cipher(environment))),
    )
    return Report(__version__, sections, python=sys.executable)


def _exchange_facts(connection: LineConnection, environment: Mapping[str, str]) -> tuple[HostFacts, HostFacts]:
    here = facts_of_this_host(environment)
    connection.send({"facts": here.as_json()})
    answer = connection.receive(2 * STEP_S)
    return here, parse_facts(None if answer is None else answer.get("facts"))


def _ping(connection: LineConnection, number: int, pad: str = "", timeout_s: float = STEP_S) -> float:
    began = time.perf_counter()
    connection.send({"ping": number, "pad": pad})
    answer = connection.receive(timeout_s)
    if answer is None or answer.get("pong") != number or answer.get("pad") != pad:
        raise BenchError(
            f"{connection.peer} did not answer within {timeout_s:g} s\n"
            "Look at its own output; check that the host is not overloaded."
        )
    return time.perf_counter() - began


def _large_passes(connection: LineConnection) -> bool:
    """After this fails the connection is of no more use."""
    try:
        _ping(connection, _PINGS, "x" * _LARGE_BYTES, _LARGE_S)
    except ConnectionLostError:
        raise
    except BenchError:
        return False
    return True


def _used_addresses(there: HostFacts, known: str) -> list[str]:
    """Those of interfaces that a job would use, beside the one that is known to answer."""
    return [
        address
        for one in there.interfaces
        if one.used and not one.loopback
        for address in one.addresses[:2]
        if address != known and not address.lower().startswith("fe80")
    ]


def _probe(address: str, port: int) -> str:
    """ "" if the serving end's port answers at that address, or why not."""
    try:
        with contextlib.closing(socket.create_connection((address, port), timeout=_PROBE_S)):
            return ""
    except OSError as error:
        return str(error.strerror or error)


def _measure(
    connection: LineConnection,
    host: str,
    pairs: Sequence[NicPair],
    driver: Path,
    environment: Mapping[str, str],
    transfer_s: float,
    round_trip_s: float,
    progress: Callable[[int], Progress],
) -> Bandwidth:
    """Of the addresses of the connection, which are those of the first pair. The others get theirs."""
    here = LocalPlace(driver_settings(driver, connection.local_address, environment))
    there = RemotePlace(connection, host, 1)
    failed = True
    try:
        with progress(progress_steps() + len(pairs[1:]) * progress_steps((STREAMS,))) as display:
            found = measure_bandwidth(here, there, transfer_s, round_trip_s, display)
            for pair in pairs[:1]:
                pair.bandwidth = found
            for pair in pairs[1:]:
                ends = (pair.local, pair.remote)
                pair.bandwidth = measure_bandwidth(here, there, transfer_s, round_trip_s, display, (STREAMS,), ends)
        failed = bool(found.failed)
        return found
    except BenchError:
        # That the peer has gone says more than a reset of a data connection, which may be noticed first.
        while connection.receive(_PROBE_S) is not None:
            pass
        raise
    finally:
        here.close(failed=failed)
        there.close(failed=failed)
