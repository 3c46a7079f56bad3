"""What one call of a codec costs from Python, its launch included: launched directly, and through Triton.

The device is idle when a call begins, as before the first bucket of a step. A time is that between two CUDA events
around the call; `host` is how long the call kept the host. A copy and both ways to launch take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch

Call = Callable[[int], object]


def table(operations: Iterable[tuple[str, Call, Call]], rounds: int) -> Iterator[str]:
    """Lines: of each (description, operation, copy of the same bytes) the medians of `rounds` calls."""
    from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch

    direct = KernelLaunch.__call__
    ways = ("copy", "direct", "triton")
    yield f"{'us: device (host)':>36}" + "".join(f"{way:>24}" for way in ways)
    for description, operation, copy in operations:
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(rounds + 10):
            for way in ways:
                KernelLaunch.__call__ = KernelLaunch.through_triton if way == "triton" else direct  # type: ignore[method-assign]
                measured = _measure(copy if way == "copy" else operation, turn)
                if turn >= 10:  # compiled, and buffers touched
                    times[way].append(measured)
        KernelLaunch.__call__ = direct  # type: ignore[method-assign]
        device = {way: statistics.median(one for one, _ in times[way]) for way in ways}
        host = {way: statistics.median(one for _, one in times[way]) for way in ways}
        cells = [f"{device[way]:.1f} ({host[way]:.1f}) {device[way] / device['copy']:.2f} x" for way in ways]
        yield f"{description:>36}" + "".join(f"{cell:>24}" for cell in cells)


def _measure(call: Call, turn: int) -> tuple[float, float]:
    """Microseconds between events, and of the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    begin = time.perf_counter()
    call(turn)
    host = time.perf_counter() - begin
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3, host * 1e6
