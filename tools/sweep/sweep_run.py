"""The run: network by network, each with ranks of its own, in which all algorithms take turns. One thread drives it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure.core.ranks import start_ranks
from measure.core.run import CoreRun
from measure.core.step_statistics import faults_of, rows_of
from measure.ranks.lab_placement import LabPlacement
from netlab import Lab, NetlabError

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress
from bagua.net.bench.turns import Turns

from .grid import PlannedNetwork
from .results import NetworkResult


class SweepInterruptedError(Exception):
    """Somebody ended the program while a network was measured."""

    def __init__(self, result: NetworkResult) -> None:
        super().__init__("interrupted")
        self.result = result  # of the turns that were over


# Makes the network, trains all algorithms in it and removes it.
Measure = Callable[[PlannedNetwork, argparse.Namespace], NetworkResult]


@dataclass
class SweepOutcome:
    results: list[NetworkResult] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors_of_run: list[str] = field(default_factory=list)  # that are no network's

    @property
    def errors(self) -> list[str]:
        return self.errors_of_run + [f"{result.network}: {error}" for result in self.results for error in result.errors]


def run_sweep(
    options: argparse.Namespace,
    planned: Sequence[PlannedNetwork],
    measure: Measure,
    after_each: Callable[[SweepOutcome], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> SweepOutcome:
    """What fails in one network is one of its errors; the others are measured. What was measured until somebody
    interrupts it is returned, with an error.

    The time limit is divided anew before each network among those that are left, so that none takes the time of those
    after it; but one round of each is always run, unless the time is over when it would begin.

    Args:
        after_each: network, is called with what is known then, for a run that may be cut.
    """
    outcome = SweepOutcome()
    deadline = clock() + options.time_limit
    left = {str(one.network): one for one in planned}

    def turn(name: str, _variant: str, _round: int) -> None:
        began = clock()
        share = (deadline - began) / len(left)
        one = left.pop(name)
        try:
            result = measure(one, argparse.Namespace(**{**vars(options), "time_limit": share}))
        except SweepInterruptedError as interruption:
            outcome.results.append(interruption.result)
            raise KeyboardInterrupt from None
        result.seconds = clock() - began
        outcome.results.append(result)
        after_each(outcome)

    turns: Turns[None] = Turns()
    try:
        turns.take(
            dict.fromkeys(left, ("",)),
            1,
            turn,
            time_limit_s=options.time_limit,
            failures=(BenchError, NetlabError),
            clock=clock,
        )
    except KeyboardInterrupt:
        after_each(outcome)
        turns.errors.append(f"interrupted; networks not begun: {len(left)}")
    outcome.errors_of_run = turns.errors
    return outcome


class LabMeasurement:
    """A Measure with real networks and ranks."""

    def __init__(self, log_folder: Path, progress: Progress) -> None:
        self._log_folder = log_folder
        self._progress = progress
        self.facts: Mapping[str, Any] = {}  # of the last ranks

    def __call__(self, planned: PlannedNetwork, options: argparse.Namespace) -> NetworkResult:
        """Raises SweepInterruptedError instead of KeyboardInterrupt, once the network has ranks."""
        network = planned.network
        lab = Lab(
            options.ranks,
            rate_mbit=network.rate_gbit * 1e3 if planned.is_limited else None,
            delay_ms=network.delay_ms,
            tcp_buffer_bytes=network.tcp_buffer_bytes,
        )
        self._progress.message(f"{network}{'' if planned.is_limited else ' (no limit but this machine)'}")
        with lab:
            gpus = None
            if options.device == "cuda":
                gpus = options.ranks if options.sharing is None else options.sharing.gpus
            placement = LabPlacement(lab, gpus=gpus)
            run = CoreRun(options, lambda: start_ranks(options, self._log_folder, placement), self._progress)
            try:
                run.run()
            except KeyboardInterrupt:
                raise SweepInterruptedError(_result(planned, options, run, lab.delay_usage())) from None
            finally:
                self.facts = run.facts
            return _result(planned, options, run, lab.delay_usage())


def _result(planned: PlannedNetwork, options: argparse.Namespace, run: CoreRun, delays: list[Any]) -> NetworkResult:
    return NetworkResult(
        planned.network,
        planned.is_limited,
        rows=rows_of(run.results, options.baseline),
        turns=run.results,
        delays=delays,
        notes=run.turns.notes,
        errors=run.turns.errors + faults_of(run.results, options.tolerance),
    )
