"""The serving end: waits for one peer that knows the token, answers it, starts load drivers for it, and ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from bagua.net.bench.driver import RAW, DriverRequest, DriverSettings, check_driver
from bagua.net.bench.errors import BenchError
from bagua.net.bench.processes import DriverProcess, LocalPlace
from bagua.net.bench.ranks import serve
from bagua.net.bench.rendezvous import LineConnection, keep_alive, listen_everywhere
from bagua.net.doctor.peer.facts import facts_of_this_host, parse_facts
from bagua.net.doctor.peer.handshake import GONE_S, HELLO_S, STEP_S, admit
from bagua.net.library import driver_path

# Of a whole examination, which takes a minute on a slow network.
_SESSION_S = 900.0
_IDLE_S = 120.0
_MAX_DRIVERS = 40  # six for the first pair of interfaces, and two for each further one
_MAX_STREAMS = 64
_MAX_MEMORY_BYTES = 256 << 20


def serve_one_peer(
    port: int, token: str, wait_s: float, environment: Mapping[str, str], say: Callable[[str], None]
) -> str:
    """
    Args:
        wait_s: for a peer that knows the token.

    Returns:
        Which peer was served.

    Raises:
        BenchError: the port cannot be listened on, no peer came in time, or it was lost on the way.
    """
    driver = driver_path()
    check_driver(driver)
    try:
        listener = listen_everywhere(port, 16)
    except OSError as error:
        raise BenchError(
            f"port {port} cannot be listened on ({error.strerror or error})\n"
            "Choose a free one: --serve PORT here, --peer HOST:PORT there."
        ) from error
    # It stays open: the peer tries its other addresses, too.
    with listener:
        connection = _await_peer(listener, port, token, wait_s, say)
        try:
            _answer(connection, driver, environment)
        finally:
            connection.close()
    return connection.peer


def _await_peer(
    listener: socket.socket, port: int, token: str, wait_s: float, say: Callable[[str], None]
) -> LineConnection:
    deadline = time.monotonic() + wait_s
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            accepted, address = listener.accept()
        except TimeoutError:
            raise BenchError(
                f"no peer came to port {port} within {wait_s:g} s\n"
                "Start `bagua-net doctor --peer` on the other host; check its route, and firewalls, to this port."
            ) from None
        peer = str(address[0]).removeprefix("::ffff:")
        connection = LineConnection(accepted, peer, HELLO_S)
        if admit(connection, token):
            accepted.settimeout(STEP_S)
            keep_alive(accepted, GONE_S)
            return connection
        connection.close()
        say(f"turned away {peer}, which does not know the token")


def _answer(connection: LineConnection, driver: Path, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _SESSION_S
    described = connection.receive(STEP_S)
    parse_facts(None if described is None else described.get("facts"))
    connection.send({"facts": facts_of_this_host(environment).as_json()})
    while True:
        message = connection.receive(_IDLE_S)
        if message is None or time.monotonic() > deadline:
            raise BenchError(f"{connection.peer} has said nothing for {_IDLE_S:g} s; its own output says why")
        if "begin" in message:
            break
        if "finish" in message:
            return
        connection.send({"pong": message.get("ping"), "pad": message.get("pad")})
    place = LocalPlace(driver_settings(driver, connection.local_address, environment))
    failed = True
    try:
        failed = serve(connection, _starter(place), deadline)
    finally:
        place.close(failed=failed)


def driver_settings(driver: Path, address: str, environment: Mapping[str, str]) -> DriverSettings:
    """Of raw TCP drivers at one end."""
    return DriverSettings(
        driver=driver.absolute(),
        library=Path(),
        channels=1,
        address=address,
        interface="",
        local_ranks=1,
        timeout_s=STEP_S,
        environment=dict(environment),
    )


def _starter(place: LocalPlace) -> Callable[[Mapping[str, Any]], DriverProcess]:
    """Starts nothing but raw TCP ends of a bounded size, and a bounded number of them."""
    started = 0

    def start(order: Mapping[str, Any]) -> DriverProcess:
        nonlocal started
        known = {one.name for one in fields(DriverRequest)}
        if not isinstance(order, dict) or not set(order) <= known:
            raise BenchError("the order to start a driver is of another version of bagua; install the same on both")
        for name, limit in (
            ("rank", 1),
            ("ranks", 2),
            ("streams", _MAX_STREAMS),
            ("memory_bytes", _MAX_MEMORY_BYTES),
            ("write_bytes", 1 << 20),
        ):
            value = order.get(name, 0)
            if not isinstance(value, int) or not 0 <= value <= limit:
                raise BenchError(f"a driver with {name}={value!r} was asked for; the limit is {limit}")
        if order.get("backend") != RAW or started >= _MAX_DRIVERS:
            raise BenchError(f"this end starts at most {_MAX_DRIVERS} drivers of raw TCP, and nothing else")
        started += 1
        return place.start(DriverRequest(**order))

    return start
