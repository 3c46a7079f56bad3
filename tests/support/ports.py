"""Ports that a test tells a program to listen on."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack

# Below the range from which the kernel takes ports for connections: any of these could get the port before the program
# does. Each worker of pytest-xdist has a part of its own, and takes one port after the other: a port is in use only a
# while after it was found free, and until then another worker would find it free as well.
_FIRST, _PARTS, _PORTS = 12_000, 16, 1100
_next = random.SystemRandom().randrange(_PORTS)


def free_port(count: int = 1) -> int:
    """The first of `count` that follow each other."""
    global _next
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    part = int(worker) % _PARTS if worker.isdigit() else random.SystemRandom().randrange(_PARTS)
    while True:
        first = _next % (_PORTS - count + 1)
        _next = first + count
        port = _FIRST + part * _PORTS + first
        with ExitStack() as stack:
            try:
                for offset in range(count):
                    stack.enter_context(socket.socket()).bind(("", port + offset))
            except OSError:
                continue
            return port


def take_another_port() -> None:
    """In all ranks of a job, before they end its process group to make another one: MASTER_PORT becomes a port of which
    rank 0 says that it is free. At the former one, some could still find the former store."""
    import torch.distributed as dist

    ports = [free_port()]
    dist.broadcast_object_list(ports, 0)
    os.environ["MASTER_PORT"] = str(ports[0])
