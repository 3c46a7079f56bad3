"""What the network interfaces of this host carried during a run, from the kernel's counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua.net import native

# The counters of some NICs are updated once a second.
_WINDOW_S = 1.0
SATURATED = 0.85


@dataclass(frozen=True)
class Traffic:
    """Of the interface that carried most.

    Attributes:
        interface: its name; "" where nothing was measured.
        nbytes: in the direction that carried more.
        peak_bytes_per_s: in the busiest second; 0.0 if the run was shorter.
        speed_bytes_per_s: of the link, each way; None: unknown.
    """

    interface: str
    nbytes: int
    peak_bytes_per_s: float
    speed_bytes_per_s: float | None

    @property
    def is_saturated(self) -> bool:
        return self.speed_bytes_per_s is not None and self.peak_bytes_per_s >= SATURATED * self.speed_bytes_per_s


NO_TRAFFIC = Traffic("", 0, 0.0, None)

Counters = Mapping[tuple[str, str], int]  # (interface, direction) -> bytes


def read_counters(table: Path = Path("/proc/net/dev")) -> dict[tuple[str, str], int]:
    counters = {}
    try:
        lines = table.read_text(encoding="ascii").splitlines()[2:]
    except OSError:
        return {}
    for line in lines:
        name, _, rest = line.partition(":")
        fields = rest.split()
        counters[name.strip(), "received"] = int(fields[0])
        counters[name.strip(), "sent"] = int(fields[8])
    return counters


def link_speed(interface: str) -> float | None:
    """Bytes per second, each way, as far as the plugin believes it; None: unknown."""
    try:
        known = {row.name: row.speed_mbps for row in native.interfaces({})}
    except (ValueError, RuntimeError):
        return None
    mbps = known.get(interface, 0)
    return mbps * 1e6 / 8 if mbps > 0 else None


class TrafficMeter:
    """Of one run. `sample` is called about once a second."""

    def __init__(self, now: float, read: Callable[[], Counters] = read_counters, window_s: float = _WINDOW_S) -> None:
        self._read = read
        self._window_s = window_s
        self._first = self._last = read()
        self._last_at = now
        self._peaks: dict[tuple[str, str], float] = {}

    def sample(self, now: float) -> None:
        if now - self._last_at < self._window_s:
            return
        counters = self._read()
        for key, value in counters.items():
            rate = (value - self._last.get(key, value)) / (now - self._last_at)
            self._peaks[key] = max(rate, self._peaks.get(key, 0.0))
        self._last, self._last_at = counters, now

    def result(self, speed: Callable[[str], float | None] = link_speed) -> Traffic:
        counters = self._read()
        moved = {key: value - self._first.get(key, value) for key, value in counters.items()}
        if not moved:
            return NO_TRAFFIC
        busiest = max(moved, key=lambda key: moved[key])
        return Traffic(busiest[0], moved[busiest], self._peaks.get(busiest, 0.0), speed(busiest[0]))
