"""Counts the messages that a rank sends, for use inside a rank (support.ranks)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends to another by itself, without a collective."""
    sizes: list[int] = []
    original = dist.ProcessGroup.__dict__["send"]  # as read from the class it would not bind its group any more

    def send(self: dist.ProcessGroup, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        sizes.extend(tensor.nbytes for tensor in tensors)
        return original.__get__(self)(tensors, destination, tag)

    dist.ProcessGroup.send = send
    try:
        yield sizes
    finally:
        dist.ProcessGroup.send = original
