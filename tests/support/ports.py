"""Ports that a test tells a program to listen on."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack


def free_port(count: int = 1) -> int:
    """The first of `count` that follow each other. Below the range from which the kernel takes ports for connections:
    any of these could get the port before the program does."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
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
