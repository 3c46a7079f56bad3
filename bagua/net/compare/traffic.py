"""What the network interfaces of this host carried during a run, from the kernel's counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The counters of some NICs are updated once a second.
_WINDOW_S = 1.0
_INTERVAL_S = 0.25
# Of a run; with more, every other one is dropped.
_MAX_SAMPLES = 2000
# Of a run's bytes. Start-up moves few, and the first steps, which are slow, are in the first part.
MIDDLE = (0.1, 0.9)
# With less, it is not training, or a step more or less at either end would count.
_MIN_BYTES = 16 << 20
_MIN_MIDDLE_S = 2.0
SATURATED = 0.85


@dataclass(frozen=True)
class Traffic:
    """Of the interface that carried most.

    Attributes:
        interface: its name; "" where nothing was measured.
        nbytes: in the direction that carried more.
        peak_bytes_per_s: in the busiest second; 0.0 if the run was shorter.
        speed_bytes_per_s: of the link, each way; None: unknown.
        middle_s: how long it took to carry the middle 80 % of `nbytes`; None: too few, or too short to tell.
    """

    interface: str
    nbytes: int
    peak_bytes_per_s: float
    speed_bytes_per_s: float | None
    middle_s: float | None = None

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
    """Bytes per second, each way; virtual interfaces have none."""
    try:
        mbps = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return mbps * 1e6 / 8 if mbps > 0 else None


class TrafficMeter:
    """Of one run. `sample` is called several times a second."""

    def __init__(self, now: float, read: Callable[[], Counters] = read_counters) -> None:
        self._read = read
        self._first = self._last = read()
        self._last_at = now
        self._peaks: dict[tuple[str, str], float] = {}
        self._samples = [(now, self._first)]
        self._interval_s = _INTERVAL_S

    def sample(self, now: float) -> None:
        if now - self._samples[-1][0] < self._interval_s:
            return
        counters = self._read()
        self._samples.append((now, counters))
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[1:-1:2]
            self._interval_s *= 2
        if now - self._last_at < _WINDOW_S:
            return
        for key, value in counters.items():
            rate = (value - self._last.get(key, value)) / (now - self._last_at)
            self._peaks[key] = max(rate, self._peaks.get(key, 0.0))
        self._last, self._last_at = counters, now

    def result(self, now: float, speed: Callable[[str], float | None] = link_speed) -> Traffic:
        counters = self._read()
        moved = {key: value - self._first.get(key, value) for key, value in counters.items()}
        if not moved:
            return NO_TRAFFIC
        busiest = max(moved, key=lambda key: moved[key])
        curve = [(at, sample.get(busiest, 0)) for at, sample in [*self._samples, (now, counters)]]
        peak = self._peaks.get(busiest, 0.0)
        return Traffic(busiest[0], moved[busiest], peak, speed(busiest[0]), _middle_s(curve))


def _middle_s(curve: Sequence[tuple[float, int]]) -> float | None:
    """
    Args:
        curve: (seconds, bytes so far), in order.
    """
    begin, total = curve[0][1], curve[-1][1] - curve[0][1]
    if total < _MIN_BYTES:
        return None
    seconds = _reached(curve, begin + MIDDLE[1] * total) - _reached(curve, begin + MIDDLE[0] * total)
    return seconds if seconds >= _MIN_MIDDLE_S else None


def _reached(curve: Sequence[tuple[float, int]], nbytes: float) -> float:
    """When so many bytes were carried; between two samples the rate is taken to be even."""
    number = next(number for number, (_, carried) in enumerate(curve) if carried >= nbytes)
    (before, low), (after, high) = curve[number - 1], curve[number]
    return before + (after - before) * (nbytes - low) / (high - low)
