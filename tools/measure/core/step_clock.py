"""When steps end: on a GPU by events on the training stream, so that the host is free to run ahead as it is in a real
training; on a CPU by the clock."""

from __future__ import annotations

import time

import torch


class StepClock:
    """`mark` at the beginning of the first step and at the end of each. One thread, the training's."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if not self._is_cuda:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Of each step; waits for the last."""
        if not self._is_cuda:
            return [end - begin for begin, end in zip(self._times[:-1], self._times[1:], strict=True)]
        self._events[-1].synchronize()
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
