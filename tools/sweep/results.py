"""What a sweep found: of every network the comparison's rows, and who won. Pure: from rows to winners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from measure.core.catalogue import ALGORITHMS, ALL_REDUCE, Promise
from measure.core.step_statistics import Row, TurnResult
from netlab import DelayUsage

from .grid import Network

# A speed-up below this wins nothing: who changes the training for it gains less than machines differ by.
LEAST_SPEED_UP = 1.05
# At this share the CPUs are what limits, whatever the network.
BUSY = 0.9


@dataclass(frozen=True)
class Winner:
    """`algorithm` is ALL_REDUCE, with a speed-up of 1, where none is faster than it in every round."""

    algorithm: str
    speed_up: float


@dataclass
class NetworkResult:
    network: Network
    is_limited: bool
    rows: list[Row] = field(default_factory=list)
    turns: list[TurnResult] = field(default_factory=list)
    delays: list[DelayUsage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def rows_of(self, model: str) -> list[Row]:
        return [row for row in self.rows if row.model == model]

    def machine_busy(self, model: str) -> float | None:
        """Of this machine's CPUs, mean over the algorithms."""
        known = [row.machine_busy for row in self.rows_of(model) if row.machine_busy is not None]
        return sum(known) / len(known) if known else None


def winner_of(rows: Sequence[Row], *, replicas_equal: bool, waiting: bool = False) -> Winner | None:
    """The fastest algorithm that is not gradient all-reduce, if it is faster than that in every round. None without
    gradient all-reduce.

    Args:
        rows: of one model in one network, their speed-ups over ALL_REDUCE.
        replicas_equal: only of those that keep all ranks' parameters the same.
        waiting: only of those that wait for other ranks in each step: who does not is nearly always the fastest.
    """
    if not any(row.algorithm == ALL_REDUCE for row in rows):
        return None
    wanted = {Promise.EQUAL} if replicas_equal else {Promise.EQUAL, Promise.OWN}
    best = Winner(ALL_REDUCE, 1.0)
    for row in rows:
        entry = ALGORITHMS[row.algorithm]
        if entry.promise not in wanted or (waiting and not entry.waits):
            continue
        if row.speed_up is None or row.speed_up.low <= 1.0:
            continue
        if row.speed_up.median >= LEAST_SPEED_UP and row.speed_up.median > best.speed_up:
            best = Winner(row.algorithm, row.speed_up.median)
    return best
