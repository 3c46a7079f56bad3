"""How busy the CPUs were while steps were measured: where they are, it is they that limit, not the network."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CpuShare:
    """Between two readings."""

    own_cores: float  # CPUs that this process kept busy, on average
    machine_busy: float | None  # of all CPUs' time, by anybody and the kernel; 0 to 1


class CpuClock:
    """Reads at once when made, and when asked."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._own = time.process_time()
        self._machine = _machine_ticks()

    def share(self) -> CpuShare:
        seconds = time.perf_counter() - self._began
        own = time.process_time() - self._own
        busy_before, all_before = self._machine
        busy, everything = _machine_ticks()
        ticks = everything - all_before
        return CpuShare(own / max(seconds, 1e-9), (busy - busy_before) / ticks if ticks > 0 else None)


def _machine_ticks() -> tuple[int, int]:
    """(busy, all) of all CPUs since the machine started."""
    try:
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    idle = fields[3] + fields[4]  # idle, and idle with a disk at work
    return sum(fields) - idle, sum(fields)
