"""The run: every repetition measures every size with every backend, in an order that rotates.

Interleaving is what makes backends comparable: a neighbour's load or a frequency step hits all of them alike, and
ratios are taken within one repetition of a size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress
from bagua.net.bench.ring.iteration_plan import IterationPlan
from bagua.net.bench.ring.sessions import Sample, Session, Verification
from bagua.net.bench.sizes import format_size
from bagua.net.bench.turns import rotated

# Enough for an estimate that is not one scheduling accident.
_CALIBRATION_SMALL = 20
_SMALL_BYTES = 64 * 1024
# A command may take this many times its estimate before it counts as hung.
_PATIENCE = 10
# Of the time that is left: what verifying and calibrating may take, so that something is measured.
_CALIBRATION_SHARE = 0.5
# Of that: what large sizes may take, so that something is left for the small ones, which take little.
_LARGE_SHARE = 0.8


@dataclass
class RunResults:
    """samples[backend][size][repetition]; a backend that does not run at a size has no entry for it."""

    samples: dict[str, dict[int, list[Sample]]] = field(default_factory=dict)
    verifications: dict[tuple[str, int], Verification] = field(default_factory=dict)
    plan: IterationPlan | None = None
    unmeasured: list[int] = field(default_factory=list)  # sizes for which the time budget did not suffice

    def wrong(self) -> list[tuple[str, int, str]]:
        """(backend, size, message) of every failed verification."""
        return [
            (name, size, verification.message)
            for (name, size), verification in self.verifications.items()
            if not verification.correct
        ]


@dataclass(frozen=True)
class Visit:
    """What runs where: `sizes[name]` are the sizes of that backend."""

    sessions: Sequence[Session]
    sizes: Mapping[str, Sequence[int]]

    def all_sizes(self) -> list[int]:
        return sorted({size for sizes in self.sizes.values() for size in sizes})

    def at(self, size: int) -> list[Session]:
        return [session for session in self.sessions if size in self.sizes[session.name]]


def run_interleaved(
    visit: Visit,
    *,
    make_plan: Callable[[Mapping[int, float]], IterationPlan],
    verify: bool,
    timeout_s: float,
    progress: Callable[[int], Progress],
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> RunResults:
    """No size is begun that is not expected to end by `deadline`.

    make_plan gets the measured cost of each size. progress(total) opens the display of a phase."""
    results = RunResults({session.name: {size: [] for size in visit.sizes[session.name]} for session in visit.sessions})
    steps = sum(len(visit.at(size)) for size in visit.all_sizes())
    with progress(steps) as display:
        available_s = _CALIBRATION_SHARE * (deadline - clock())
        estimates = _calibrate(visit, results, available_s, clock, verify=verify, timeout_s=timeout_s, display=display)
    measured = sorted({size for _, size in estimates})
    if not measured:
        raise BenchError(
            "The time budget ended before anything was measured.\nRaise --time-budget, or choose fewer backends."
        )
    costs = {size: sum(estimates[session.name, size] for session in visit.at(size)) for size in measured}
    plan = make_plan(costs)
    results.plan = plan
    with progress(steps * plan.repeats) as display:
        # Raw TCP is one backend, with several numbers of connections.
        backends = len({session.name.partition(" ")[0] for session in visit.sessions})
        counts = (_count(len(costs), "size"), _count(backends, "backend"), _count(plan.repeats, "repetition"))
        display.message(f"measuring {', '.join(counts)}: about {plan.expected_s:.0f} s")
        for repetition in range(plan.repeats):
            # The largest first: where the time runs out, the small ones are given up.
            for index, size in reversed(list(enumerate(measured))):
                planned = plan.sizes[size]
                if clock() + costs[size] * (planned.iterations + planned.warmup) > deadline:
                    continue
                for session in rotated(visit.at(size), repetition + index):
                    what = f"repetition {repetition + 1}/{plan.repeats}, {format_size(size)}, {session.name}"
                    display.advance(what, 0)
                    count = planned.iterations + planned.warmup
                    patience = timeout_s + _PATIENCE * count * estimates[session.name, size]
                    sample = session.run(size, planned.iterations, planned.warmup, patience)
                    results.samples[session.name][size].append(sample)
                    display.advance(what)
    results.unmeasured = [
        size for size in visit.all_sizes() if not any(by_size.get(size) for by_size in results.samples.values())
    ]
    return results


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _calibrate(
    visit: Visit,
    results: RunResults,
    available_s: float,
    clock: Callable[[], float],
    *,
    verify: bool,
    timeout_s: float,
    display: Progress,
) -> dict[tuple[str, int], float]:
    """Verifies every size once and measures roughly how long an iteration takes. A size that is not expected to end in
    the time is left out: large sizes go first, from the smallest of them upwards, since each tells what the next may
    take; then the small ones, the smallest last."""
    estimates: dict[tuple[str, int], float] = {}
    seconds: dict[int, float] = {}
    began = clock()
    sizes = visit.all_sizes()
    small = [size for size in sizes[:-1] if size <= _SMALL_BYTES]
    for size in [*sizes[len(small) :], *reversed(small)]:
        share = 1.0 if size in small else _LARGE_SHARE
        size_began = clock()
        if size_began + _expected_s(size, seconds) > began + share * available_s:
            continue
        for session in visit.at(size):
            display.advance(f"verifying {format_size(size)}, {session.name}", 0)
            if verify:
                verification = session.verify(size, timeout_s)
                if verification is not None:
                    results.verifications[session.name, size] = verification
                    if not verification.correct:
                        display.message(f"WRONG DATA: {session.name} at {format_size(size)}: {verification.message}")
            estimates[session.name, size] = session.run(size, _calibration_iterations(size), 1, timeout_s).seconds
            display.advance(f"verifying {format_size(size)}, {session.name}")
        seconds[size] = clock() - size_began
    return estimates


def _calibration_iterations(size: int) -> int:
    return _CALIBRATION_SMALL if size <= _SMALL_BYTES else 1


def _expected_s(size: int, seconds: Mapping[int, float]) -> float:
    """From what calibrating the nearest size took. Latency does not grow with the size, and the time of the bytes grows
    in proportion: on a busy machine even a large size is mostly latency, so it is the geometric mean of the two."""
    if not seconds:
        return 0.0
    nearest = min(seconds, key=lambda of: max(of, size) / min(of, size))
    # One more warms up, and one verifies.
    iterations = (_calibration_iterations(size) + 2) / (_calibration_iterations(nearest) + 2)
    return seconds[nearest] * iterations * math.sqrt(max(1.0, size / nearest))
