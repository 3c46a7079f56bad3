"""The turns in one network of several NICs."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netlab import Lab

from bagua.net.bench.api import BenchError, Progress, Turns
from measure.networks.comparison import Sample
from measure.nics.comparison import RAW_ALL, RAW_BEST, RAW_CASE, Row, median, row_of, size_case
from measure.nics.lab_ranks import DriverRanks, GpuRanks, LabRanks
from measure.nics.nic_set import NicSet
from measure.nics.raw_tcp import RawTcp
from measure.nics.setups import Setup

# Of one turn.
_ALL_REDUCE_SECONDS = 0.1
_RAW_SECONDS = 0.3
# An all-reduce is done so often in a turn, at least: checked, tried, timed.
_LEAST_RUNS = 5
# A setup that would take longer for a turn is left out: with a NIC that loses packets, one may take a minute.
_MOST_TURN_SECONDS = 8.0
# The time of this size or more grows with the size.
_TELLING_BYTES = 1 << 20


class NicRun:
    """All setups in one network. The ranks are started at once and idle until `take`, so that several networks can
    load torch at the same time. A context manager; raises BenchError or NetlabError when it cannot be started."""

    def __init__(self, given: argparse.Namespace, nic_set: NicSet, setups: Sequence[Setup], logs: Path) -> None:
        self._given, self.nic_set = given, nic_set
        self._setups = {setup.name: setup for setup in setups}
        self._logs = logs
        self._stack = ExitStack()
        self._failed = True
        self.ranks: dict[str, LabRanks] = {}
        self.turns: Turns[Sample] = Turns()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self.lab: Lab = starting.enter_context(self.nic_set.lab())
            self._raw = starting.enter_context(RawTcp(self.nic_set, self.lab, self._given.timeout))
            starting.callback(self._close_ranks)
            for number, setup in enumerate(self._setups.values()):
                if self._given.device == "cpu":
                    self.ranks[setup.name] = DriverRanks(self.nic_set, setup, self.lab, self._given.timeout)
                else:
                    logs = self._logs / self.nic_set.name.replace("/", "_") / str(number)
                    self.ranks[setup.name] = GpuRanks(self._given, self.nic_set, setup, self.lab, logs)
            self._stack = starting.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._stack.close()

    def _close_ranks(self) -> None:
        with ExitStack() as closing:
            for ranks in self.ranks.values():
                closing.callback(partial(ranks.close, failed=self._failed))

    def form(self, pool: ThreadPoolExecutor) -> dict[str, Future[None]]:
        """Begins to connect the ranks of all setups."""
        return {name: pool.submit(ranks.form) for name, ranks in self.ranks.items()}

    def keep_formed(self, forming: Mapping[str, Future[None]]) -> None:
        """Waits for what `form` began. A setup that fails is left out and is an error."""
        for name, future in forming.items():
            try:
                future.result()
            except BenchError as error:
                self.turns.errors.append(f"{name}: {error}")
                self.ranks.pop(name).close(failed=True)

    @property
    def facts(self) -> Mapping[str, Any]:
        return next((ranks.facts for ranks in self.ranks.values()), {})

    def take(self, time_limit_s: float, progress: Progress) -> None:
        """Raw TCP, then all-reduces by size, smallest first."""
        given = self._given
        end = time.monotonic() + time_limit_s
        cases: list[tuple[str, int]] = [(RAW_CASE, 0), *((size_case(size), size) for size in sorted(given.sizes))]
        for number, (case, size) in enumerate(cases):
            variants = [RAW_BEST, RAW_ALL] if not size else self._quick_enough(cases[number - 1], case, size)
            left = end - time.monotonic()
            share = left / (len(cases) - number)
            limit = f"--time-limit {given.time_limit:g}"
            self.turns.take(
                {case: variants}, given.rounds, self._turn, time_limit_s=share, limit=limit, progress=progress
            )
        for name, ranks in self.ranks.items():
            if error := ranks.fault(name):
                self.turns.errors.append(error)

    def _quick_enough(self, before: tuple[str, int], case: str, size: int) -> list[str]:
        """The setups of which a turn is not too long, by the size before this one where it tells."""
        case_before, size_before = before
        found = []
        for name in self.ranks:
            known = median(self.turns, case_before, name) if size_before >= _TELLING_BYTES else 0.0
            expected = math.inf if known is None else known * size / max(1, size_before) * _LEAST_RUNS
            if expected <= _MOST_TURN_SECONDS:
                found.append(name)
            elif known is not None:
                self.turns.notes.append(f"{case} with {name} was left out: a turn would take {expected:.0f} s")
        return found

    def _turn(self, case: str, variant: str, number: int) -> Sample:
        network = self.nic_set.name
        if case == RAW_CASE:
            nics = range(len(self.nic_set.nics) if variant == RAW_ALL else 1)
            return Sample(network, case, variant, number, 1e9 / self._raw.rate(nics, _RAW_SECONDS))
        size = next(size for size in self._given.sizes if size_case(size) == case)
        seconds = self.ranks[variant].all_reduce(size, _ALL_REDUCE_SECONDS)
        return Sample(network, case, variant, number, seconds)

    def rows(self) -> list[Row]:
        found = [row_of(self.turns, self.nic_set.name, size) for size in sorted(self._given.sizes)]
        return [row for row in found if row is not None]
