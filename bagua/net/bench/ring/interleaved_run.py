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
        calibration_deadline = clock() + _CALIBRATION_SHARE * (deadline - clock())
        estimates = _calibrate(
            visit, results, calibration_deadline, clock, verify=verify, timeout_s=timeout_s, display=display
        )
    measured = sorted({size for _, size in estimates})
    if not measured:
        raise BenchError(
            "The time budget ended before anything was measured.\nRaise --time-budget, or choose fewer backends."
        )
    costs = {size: sum(estimates[session.name, size] for session in visit.at(size)) for size in measured}
    plan = make_plan(costs)
    results.plan = plan
    with progress(steps * plan.repeats) as display:
        display.message(
            f"measuring {len(costs)} sizes, {len(visit.sessions)} backends, {plan.repeats} repetitions:"
            f" about {plan.expected_s:.0f} s"
        )
        for repetition in range(plan.repeats):
            for index, size in enumerate(measured):
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


def _calibrate(
    visit: Visit,
    results: RunResults,
    deadline: float,
    clock: Callable[[], float],
    *,
    verify: bool,
    timeout_s: float,
    display: Progress,
) -> dict[tuple[str, int], float]:
    """Verifies every size once and measures roughly how long an iteration takes."""
    estimates: dict[tuple[str, int], float] = {}
    before, took = 0, 0.0
    for size in visit.all_sizes():
        began = clock()
        # A larger size takes longer in proportion at most; this one and all above it are left out.
        if began + (took * size / before if before else 0.0) > deadline:
            return estimates
        iterations = _CALIBRATION_SMALL if size <= _SMALL_BYTES else 1
        for session in visit.at(size):
            display.advance(f"verifying {format_size(size)}, {session.name}", 0)
            if verify:
                verification = session.verify(size, timeout_s)
                if verification is not None:
                    results.verifications[session.name, size] = verification
                    if not verification.correct:
                        display.message(f"WRONG DATA: {session.name} at {format_size(size)}: {verification.message}")
            estimates[session.name, size] = session.run(size, iterations, 1, timeout_s).seconds
            display.advance(f"verifying {format_size(size)}, {session.name}")
        before, took = size, clock() - began
    return estimates
