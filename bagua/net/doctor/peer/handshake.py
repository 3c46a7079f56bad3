"""How the two ends meet: JSON lines over one TCP connection (`LineConnection`), both ends proving that they know the
token before anything else is said.

| step | sender | line |
|---|---|---|
| 1 | serving end | {"magic": "bagua-net-doctor/1", "nonce": hex} |
| 2 | asking end | {"magic": ..., "nonce": hex, "proof": HMAC(token, serving end's nonce, 1)} |
| 3 | serving end | {"proof": HMAC(token, asking end's nonce, 0)}, or {"error": why} |
| 4 | both | {"facts": {...}}, the asking end first |
| 5 | asking end | {"ping": number, "pad": text}, answered by {"pong": number, "pad": text}; any number of times |
| 6 | asking end | {"begin": true}; then the orders of remote_place.py |
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from bagua.net.bench.errors import BenchError
from bagua.net.bench.rendezvous import LineConnection, keep_alive, proof

MAGIC = "bagua-net-doctor/1"
DEFAULT_PORT = 29512  # beside that of bagua-net-bench, and outside Linux's ephemeral range
# An unauthenticated peer (a port scanner) may hold the serving end for this long at most.
HELLO_S = 3.0
STEP_S = 15.0
GONE_S = 30.0
_CONNECT_S = 5.0
_RETRY_S = 0.3
_SERVING, _ASKING = 0, 1


def new_token() -> str:
    return secrets.token_hex(12)


def check_name(host: str) -> None:
    """
    Raises:
        BenchError: the name has no address.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unknown(host, error) from error


def _unknown(host: str, error: Exception) -> BenchError:
    return BenchError(
        f"the name {host!r} cannot be resolved ({getattr(error, 'strerror', error)})\n"
        "Correct it, add it to DNS or /etc/hosts, or give the address."
    )


def connect(host: str, port: int, wait_s: float, still_waits: Callable[[str], None] = lambda _: None) -> socket.socket:
    """
    Args:
        wait_s: how long to try again while nothing listens there.
        still_waits: called between attempts, with the reason; may raise.

    Raises:
        BenchError: the name is unknown, or nothing answers.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            connected = socket.create_connection((host, port), timeout=_CONNECT_S)
            keep_alive(connected, GONE_S)
            return connected
        except (socket.gaierror, UnicodeError) as error:
            raise _unknown(host, error) from error
        except TimeoutError as error:
            reason = "no answer"
            if time.monotonic() > deadline:
                raise BenchError(
                    f"no answer from {host}, port {port}, within {_CONNECT_S:g} s\n"
                    "Check that the host is up and that no firewall drops connections to that port."
                ) from error
        except OSError as error:
            reason = str(error.strerror or error)
            if time.monotonic() > deadline:
                raise BenchError(
                    f"{host}, port {port}: {error.strerror or error}\n"
                    f"Start `bagua-net doctor --serve {port}` there, and open the port."
                ) from error
        still_waits(reason)
        time.sleep(_RETRY_S)


def introduce(connection: LineConnection, token: str) -> None:
    """The asking end.

    Raises:
        BenchError: the other end is none of ours, or has another token.
    """
    greeting = connection.receive(STEP_S)
    if greeting is None or greeting.get("magic") != MAGIC:
        raise BenchError(
            f"what listens at {connection.peer} is not `bagua-net doctor --serve` of this kind\n"
            "Give the port on which it listens: --peer HOST:PORT."
        )
    nonce = secrets.token_hex(16)
    connection.send({"magic": MAGIC, "nonce": nonce, "proof": proof(token, str(greeting.get("nonce")), _ASKING)})
    answer = connection.receive(STEP_S)
    if answer is None or not hmac.compare_digest(str(answer.get("proof")), proof(token, nonce, _SERVING)):
        raise BenchError(
            f"{connection.peer} has another token\nGive both ends the same --token, the one that was printed last."
        )


def admit(connection: LineConnection, token: str) -> bool:
    """The serving end. False, within HELLO_S, for whoever does not know the token."""
    nonce = secrets.token_hex(16)
    try:
        connection.send({"magic": MAGIC, "nonce": nonce})
        hello = connection.receive(HELLO_S)
        if hello is None:
            return False
        if not hmac.compare_digest(str(hello.get("proof")), proof(token, nonce, _ASKING)):
            with suppress(BenchError):
                connection.send({"error": "token"})
            return False
        connection.send({"proof": proof(token, str(hello.get("nonce")), _SERVING)})
    except BenchError:
        return False
    return True
