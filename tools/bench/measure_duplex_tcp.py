"""What TCP itself moves between two ranks, one way and in both directions at once: a ring uses both, so that this is
its limit on a machine or a link.

    python tools/bench/measure_duplex_tcp.py --streams 8,14 --memory 16M           # both ranks here, over loopback
    python -m tools.netlab run --rate 100G --mtu 9000 -- python tools/bench/measure_duplex_tcp.py --streams 4,8

Every connection has a process at each end that does nothing but send, or receive, in pieces of up to 1 MiB, through
memory of its own. Where RANK and MASTER_ADDR are set, as netlab does, this is one of the two ranks; rank 0 prints.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.net.bench.argument_types import byte_size, within
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import Column, render_rows

_PIECE_BYTES = 1 << 20
_PATIENCE_S = 30.0
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Share:
    """What one process has done."""

    is_sender: bool
    gigabytes_per_s: float
    cpu_s: float


@dataclass(frozen=True)
class Row:
    streams: int
    one_way: float  # GB/s
    out: float  # GB/s of rank 0 while rank 1 sends, too
    back: float
    cpu: float  # of one rank, s for each GB that it sends while it receives as many


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="measure_duplex_tcp.py",
        description="What TCP moves between two ranks, one way and in both directions at once.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--streams", type=_counts, default=[4, 8], help="connections each way, with commas (default 4,8)"
    )
    parser.add_argument(
        "--memory", type=byte_size, default=16 << 20, metavar="SIZE", help="of each process (default 16M)"
    )
    parser.add_argument("--seconds", type=within(float, 0.1, 600.0), default=2.0, help="of each turn (default 2)")
    given = parser.parse_args(words)
    if given.memory < 1:
        parser.error("--memory 0 leaves nothing to send; give at least 1")
    try:
        rank, address = _place()
    except ValueError as error:
        parser.error(str(error))
    if rank is not None:
        return _run(rank, address, given)
    listener = _listener(address)
    other = _FORK.Process(target=_run, args=(1, listener.getsockname(), given))
    other.start()
    try:
        return _run(0, address, given, listener)
    finally:
        other.join(_PATIENCE_S)
        other.kill()


def _counts(text: str) -> list[int]:
    return [within(int, 1, 256)(one) for one in text.split(",")]


def _place() -> tuple[int | None, tuple[str, int]]:
    """(rank, where rank 0 listens); no rank if nobody has started several."""
    if "RANK" not in os.environ:
        return None, ("127.0.0.1", 0)
    world_size = os.environ.get("WORLD_SIZE", "2")
    if world_size != "2":
        raise ValueError(f"WORLD_SIZE={world_size}: this is between two ranks; start two")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set, but not {' and '.join(missing)}, where rank 0 listens; set them, or unset RANK")
    if os.environ["RANK"] not in ("0", "1"):
        raise ValueError(f"RANK={os.environ['RANK']}: there are ranks 0 and 1")
    return int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _run(rank: int, address: tuple[str, int], given: argparse.Namespace, listener: socket.socket | None = None) -> int:
    connect = _accepting(listener or _listener(address)) if rank == 0 else _connecting(address)
    rows = []
    for streams in given.streams:
        one_way = _turn(rank, streams, False, connect, given)
        both = _turn(rank, streams, True, connect, given)
        sent = sum(share.gigabytes_per_s for share in both if share.is_sender)
        received = sum(share.gigabytes_per_s for share in both if not share.is_sender)
        cpu = sum(share.cpu_s for share in both) / given.seconds / sent
        rows.append(Row(streams, sum(share.gigabytes_per_s for share in one_way), sent, received, cpu))
    if rank == 0:
        columns = [
            Column[Row]("streams", "each way", lambda row: str(row.streams)),
            Column[Row]("one way", "GB/s", lambda row: f"{row.one_way:.3f}"),
            Column[Row]("both: out", "GB/s", lambda row: f"{row.out:.3f}"),
            Column[Row]("back", "GB/s", lambda row: f"{row.back:.3f}"),
            Column[Row]("CPU", "s/GB", lambda row: f"{row.cpu:.2f}"),
        ]
        print(f"TCP between two ranks, {format_size(given.memory)} for each process; {describe_machine().caption()}")
        print(render_rows(rows, columns), end="", flush=True)
    return 0


def _listener(address: tuple[str, int]) -> socket.socket:
    return socket.create_server(address, backlog=512)


def _accepting(listener: socket.socket) -> Callable[[], socket.socket]:
    listener.settimeout(_PATIENCE_S)
    return lambda: listener.accept()[0]


def _connecting(address: tuple[str, int]) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return socket.create_connection(address, timeout=_PATIENCE_S)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    return connect


def _turn(
    rank: int, streams: int, both_ways: bool, connect: Callable[[], socket.socket], given: argparse.Namespace
) -> list[Share]:
    """What this rank's processes have done. The first connections carry what rank 0 sends."""
    connections = [connect() for _ in range(streams * (2 if both_ways else 1))]
    start = _FORK.Barrier(len(connections))
    shares: Any = _FORK.Queue()
    processes = []
    for number, connection in enumerate(connections):
        connection.settimeout(given.seconds + _PATIENCE_S)
        work = _send if (number < streams) == (rank == 0) else _receive
        processes.append(_FORK.Process(target=work, args=(connection, given, start, shares)))
        processes[-1].start()
        connection.close()
    try:
        return [shares.get(timeout=given.seconds + 2 * _PATIENCE_S) for _ in processes]
    finally:
        for process in processes:
            process.join(_PATIENCE_S)
            process.kill()


def _send(connection: socket.socket, given: argparse.Namespace, start: Any, shares: Any) -> None:
    memory = memoryview(bytearray(given.memory))
    start.wait(_PATIENCE_S)
    began = now = time.perf_counter()
    moved = at = 0
    while now - began < given.seconds:
        moved += connection.send(memory[at : at + _PIECE_BYTES])
        at = at + _PIECE_BYTES if at + _PIECE_BYTES < given.memory else 0
        now = time.perf_counter()
    # The other end sees the end also while a process of this rank holds a duplicate of the socket.
    connection.shutdown(socket.SHUT_WR)
    shares.put(Share(True, moved / (now - began) / 1e9, _cpu_s()))


def _receive(connection: socket.socket, given: argparse.Namespace, start: Any, shares: Any) -> None:
    memory = memoryview(bytearray(given.memory))
    start.wait(_PATIENCE_S)
    moved = at = 0
    began = time.perf_counter()
    while count := connection.recv_into(memory[at : at + _PIECE_BYTES]):
        moved += count
        at = at + _PIECE_BYTES if at + _PIECE_BYTES < given.memory else 0
    shares.put(Share(False, moved / (time.perf_counter() - began) / 1e9, _cpu_s()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
