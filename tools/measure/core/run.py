"""Runs the comparison: models are the cases, algorithms the variants, and a turn trains a new model on all ranks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

from bagua.net.bench.api import Event, Progress, Turns
from measure.core.catalogue import FLOAT32, MODELS
from measure.core.step_statistics import TurnResult, turn_result
from measure.ranks.renewed_team import RenewedTeam, Team, keeping


def size_of(given: argparse.Namespace, model: str) -> dict[str, Any]:
    """The part of the command that describes the model and its size."""
    entry = MODELS[model]
    on_gpu = given.device == "cuda"
    return {
        "model": model,
        "length": given.length or (entry.length if on_gpu else entry.length_on_cpu),
        "batch_size": given.batch_size or (entry.batch_size if on_gpu else entry.batch_size_on_cpu),
        "dtype": given.dtype or (entry.dtype if on_gpu else FLOAT32),
    }


class CoreRun:
    """
    Args:
        given: The options of measure.core.tool.
    """

    def __init__(
        self,
        given: argparse.Namespace,
        start: Callable[[], Team],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = given
        self._progress = progress
        self._clock = clock
        self._ranks = RenewedTeam(start)
        self._settled: set[tuple[str, int]] = set()  # models that these ranks have trained
        self.turns: Turns[TurnResult] = Turns()

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._ranks.facts

    @property
    def results(self) -> list[TurnResult]:
        return self.turns.all()

    def run(self) -> None:
        """Raises BenchError only when no ranks can be started at all; later on it is one of the errors."""
        given = self._given
        with keeping(self.turns, self._ranks):
            lacking: Mapping[str, str] = self._ranks.ready().facts.get("unavailable", {})
            self.turns.errors += [f"{algorithm}: {reason}" for algorithm, reason in lacking.items()]
            algorithms = [name for name in given.algorithms if name not in lacking]
            self.turns.take(
                dict.fromkeys(given.model, algorithms),
                given.rounds,
                self._turn,
                time_limit_s=given.time_limit,
                progress=self._progress,
                clock=self._clock,
            )

    def _turn(self, model: str, algorithm: str, number: int) -> TurnResult:
        given = self._given
        self._ranks.ready()
        # Initialization (loading kernels, allocating memory, connecting) would distort the first turn.
        if (model, self._ranks.starts) not in self._settled:
            self._ask("settle", model, algorithm, steps=max(1, given.warmup))
            self._settled.add((model, self._ranks.starts))
        turn = turn_result(model, algorithm, number, self._ask("turn", model, algorithm, steps=given.steps))
        note = f"{algorithm} did not free everything with {model}"
        # Noted once: the memory figures of all later turns include it.
        if turn.kept is not None and not any(text.startswith(note) for text in self.turns.notes):
            self.turns.notes.append(f"{note} ({turn.kept})")
        return turn

    def _ask(self, operation: str, model: str, algorithm: str, **fields: object) -> list[Event]:
        fields = {"algorithm": algorithm, "warmup": self._given.warmup, **size_of(self._given, model), **fields}
        return self._ranks.ask(operation, self._given.timeout, **fields)
