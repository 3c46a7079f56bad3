"""A service that answers as NCCL's RAS does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

OLD = {"SET FORMAT json": "ERROR: Unknown command SET FORMAT json\n"}  # before NCCL 2.28.7


def report(answers: Mapping[int, int], missing: Mapping[int, int] | None = None, *, dead: bool = False) -> str:
    """Of one communicator: how many all-reduces the process of each rank has launched.

    Args:
        answers: by process id, in the order of ranks.
        missing: ranks that do not answer, by process id.
    """
    ranks = [
        {"rank": rank, "host": "10.0.0.1", "pid": pid, "collective_counts": {"Broadcast": 1, "AllReduce": count}}
        for rank, (pid, count) in enumerate(answers.items())
    ]
    silent = [
        {"rank": rank, "host": "10.0.0.2", "pid": pid, "nvml_dev": 0, "status": {"considered_dead": dead}}
        for pid, rank in (missing or {}).items()
    ]
    one = {"hash": "0xabc", "ranks": ranks, "missing_ranks": silent}
    # The comma that NCCL 2.28 leaves out.
    return json.dumps({"communicators": [one]}, indent=1).replace('"nvml_dev": 0,', '"nvml_dev": 0')


@contextmanager
def ras_service(status: str, replies: Mapping[str, str] | None = None) -> Iterator[str]:
    """Its address. It answers one connection after the other until the end."""
    said = {"CLIENT PROTOCOL 2": "SERVER PROTOCOL 2\n", "TIMEOUT 5": "OK\n", "SET FORMAT json": "OK\n"}
    said.update(replies or {})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, said, status))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, said: Mapping[str, str], status: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rw") as file:
            for line in file:
                file.write(said.get(line.strip(), status))
                file.flush()
                if line.strip() not in said:
                    break
