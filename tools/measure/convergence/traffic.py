"""How many bytes a rank sends: counted where Bagua and torch's Python code hand tensors to a process group.

A collective counts with what its fastest algorithm sends, on average over the ranks; with n ranks, of a tensor of B
bytes:

    all-reduce        2 (n - 1) / n B       reduce-scatter and all-gather
    all-to-all            (n - 1) / n B
    reduce-scatter        (n - 1) / n B     B: of what all ranks' parts are together
    all-gather            (n - 1) B         B: of one rank's part
    reduce, broadcast     (n - 1) / n B     one rank receives all, or sends to all, and sends or receives nothing
    send                            B

Headers of messages are not counted, and neither is what torch's C++ code sends by itself: buckets of torch's DDP
without a communication hook, and the parameters that it broadcasts at the start.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# Methods of a process group, also those of older torch: the position of what is sent, and how much of it n ranks send.
_METHODS: dict[str, tuple[int, Callable[[int], float]]] = {
    "allreduce": (0, lambda n: 2 * (n - 1) / n),
    "all_gather_single": (1, lambda n: n - 1),
    "_allgather_base": (1, lambda n: n - 1),
    "reduce_scatter_single": (1, lambda n: (n - 1) / n),
    "_reduce_scatter_base": (1, lambda n: (n - 1) / n),
    "all_to_all_single": (1, lambda n: (n - 1) / n),
    "alltoall_base": (1, lambda n: (n - 1) / n),
    "reduce": (0, lambda n: (n - 1) / n),
    "broadcast": (0, lambda n: (n - 1) / n),
    "send": (0, lambda _: 1),
}


class SentBytes:
    """Since it was made. Threads of the algorithm count, too."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        with self._lock:
            self._bytes += value

    def read(self) -> float:
        with self._lock:
            return self._bytes


@contextmanager
def counted() -> Iterator[SentBytes]:
    """What this process sends through any group meanwhile."""
    sent = SentBytes()
    group_type: Any = dist.ProcessGroup
    plain = {name: getattr(group_type, name) for name in _METHODS if hasattr(group_type, name)}
    for name, method in plain.items():
        setattr(group_type, name, _counting(method, *_METHODS[name], sent))
    try:
        yield sent
    finally:
        for name, method in plain.items():
            setattr(group_type, name, method)


def _counting(
    method: Callable[..., Any], position: int, part: Callable[[int], float], sent: SentBytes
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        payload = arguments[position]
        tensors = payload if isinstance(payload, list | tuple) else [payload]
        sent.add(part(group.size()) * sum(tensor.nbytes for tensor in tensors))
        return method(group, *arguments, **options)

    return call
