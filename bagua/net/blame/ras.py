"""What NCCL's RAS service knows: how many operations each rank of a communicator has launched, and which ranks do not
answer it. It sees ranks that communicate within a host, too.

Source: src/ras/client.cc of NCCL, protocol 2. Reports are JSON since NCCL 2.28.7; those of older versions are text for
people.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bagua.host_port import require_port
from bagua.net.blame.collectives import each_of
from bagua.net.stats.quantities import printable

_DEFAULT_ADDRESS = "localhost:28028"

_ANSWER_S = 5  # that the service gives each process
_DEADLINE_S = 15.0
_MAX_BYTES = 64 << 20
# NCCL 2.28 leaves out a comma.
_WITHOUT_COMMA = re.compile(r'("nvml_dev": -?\d+)\s*\n(\s*"status")')


@dataclass(frozen=True)
class RasRank:
    """
    Attributes:
        host: an IP address, or "unknown".
        launched: operations by name; None: it does not answer.
        is_dead: it has not answered for so long that NCCL takes it for dead.
    """

    rank: int
    host: str
    pid: int
    launched: Mapping[str, int] | None
    is_dead: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True)
class RasCommunicator:
    id: str
    ranks: tuple[RasRank, ...]

    def findings(self) -> list[str]:
        """Who does not answer, and who has launched fewer operations than others: one line each."""
        silent = [one for one in self.ranks if one.launched is None]
        lines = [f"{one} does not answer NCCL{', which takes it for dead' * one.is_dead}" for one in silent]
        answers = [(one, one.launched) for one in self.ranks if one.launched is not None]
        for name in dict.fromkeys(name for _, launched in answers for name in launched):
            counts = [launched.get(name, 0) for _, launched in answers]
            least, most = min(counts), max(counts)
            if least < most:
                behind = [one for (one, _), count in zip(answers, counts, strict=True) if count == least]
                behind.sort(key=lambda one: one.rank)
                who = str(behind[0]) if len(behind) == 1 else each_of([one.rank for one in behind])
                lines.append(f"{who} has launched {least} {name}, others up to {most}")
        return [f"{line} (communicator {self.id} of {len(self.ranks)} ranks)" for line in lines]


def findings(pids: Collection[int], address: str | None = None) -> list[str]:
    """What the service says of the communicators that one of these processes is in.

    Args:
        pids: as the processes themselves see them.
        address: HOST:PORT; None: of NCCL_RAS_ADDR, or NCCL's default.

    Raises:
        OSError: nobody answers there, or not within 15 s.
        ValueError: the address is none, or the answer is no report, as that of NCCL before 2.28.7.
    """
    communicators = _ask(address or os.environ.get("NCCL_RAS_ADDR") or _DEFAULT_ADDRESS)
    own = [one for one in communicators if any(rank.pid > 0 and rank.pid in pids for rank in one.ranks)]
    return [line for one in own for line in one.findings()]


def _ask(address: str) -> list[RasCommunicator]:
    host_and_port = require_port(address)
    deadline = time.monotonic() + _DEADLINE_S
    with socket.create_connection(host_and_port, timeout=2) as connection:
        lines = _lines(connection, deadline)
        for request, reply in (
            ("CLIENT PROTOCOL 2", "SERVER PROTOCOL 2"),
            (f"TIMEOUT {_ANSWER_S}", "OK"),
            ("SET FORMAT json", "OK"),
        ):
            connection.sendall(f"{request}\n".encode())
            if (answer := next(lines, "")) != reply:
                raise ValueError(f"{request!r} was answered with {printable(answer)!r}")
        connection.sendall(b"STATUS\n")
        return _communicators("\n".join(lines))


def _lines(connection: socket.socket, deadline: float) -> Iterator[str]:
    """Until the other end closes."""
    received = b""
    total = 0
    while True:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data = connection.recv(1 << 16)
        total += len(data)
        if total > _MAX_BYTES:
            raise ValueError(f"the report is longer than {_MAX_BYTES} bytes")
        *complete, received = (received + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in complete)
        if not data:
            yield received.decode(errors="replace")
            return


def _communicators(text: str) -> list[RasCommunicator]:
    """
    Raises:
        ValueError: it is no report.
    """
    try:
        report = json.loads(_WITHOUT_COMMA.sub(r"\1,\n\2", text))
        return [
            RasCommunicator(
                printable(str(one["hash"])),
                (*map(_rank, one["ranks"]), *map(_missing_rank, one["missing_ranks"])),
            )
            for one in report["communicators"]
        ]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a report of NCCL's RAS service: {error!r}") from None


def _rank(found: Any) -> RasRank:
    launched = {printable(str(name)): int(count) for name, count in found["collective_counts"].items()}
    return RasRank(int(found["rank"]), printable(str(found["host"])), int(found["pid"]), launched)


def _missing_rank(found: Any) -> RasRank:
    is_dead = bool(found["status"]["considered_dead"])
    return RasRank(int(found["rank"]), printable(str(found["host"])), int(found["pid"]), None, is_dead)
