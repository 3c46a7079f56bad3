"""Ports that a test tells a program to listen on."""

from __future__ import annotations

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
