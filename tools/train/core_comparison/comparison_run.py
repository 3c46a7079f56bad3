"""The run: model by model, round by round, algorithm by algorithm in an order that rotates. One thread drives it.

An algorithm that fails with a model is left out of it from then on and reported; the ranks are started anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rank_team.renewed_team import RenewedTeam, Team

from bagua.net.bench.endpoint import Event
from bagua.net.bench.progress import Progress
from bagua.net.bench.turns import rotated
from core_comparison.options import TRACED_STEPS, Options
from core_comparison.step_statistics import TurnResult, turn_result


@dataclass
class Outcome:
    """What was measured, and what was not."""

    turns: list[TurnResult] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class ComparisonRun:
    def __init__(
        self,
        options: Options,
        start: Callable[[], Team],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._progress = progress
        self._clock = clock
        self._deadline = clock() + options.time_limit_s
        self._settled: set[str] = set()  # models that these ranks have trained
        self._lacking: set[str] = set()  # algorithms that this installation does not have
        self.outcome = Outcome()
        self._ranks = RenewedTeam(start, self._started, self.outcome.errors, progress)

    def run(self) -> Outcome:
        """Raises BenchError only when no ranks can be started at all; later on it is one of the outcome's errors."""
        self._ranks.drive(self._models, self.outcome.turns)
        return self.outcome

    def _models(self) -> None:
        for place, model in enumerate(self._options.models):
            self._rounds(model, models_left=len(self._options.models) - place)
            if self._options.trace_folder is not None:
                self._traces(model, self._options.trace_folder)

    def _rounds(self, model: str, models_left: int) -> None:
        options = self._options
        began = self._clock()
        # An equal share for every model: a slow one may not use up the time of those after it.
        deadline = began + max(0.0, self._deadline - began) / models_left
        longest = 0.0
        for number in range(options.rounds):
            round_began = self._clock()
            if round_began >= self._deadline or (number and longest > deadline - round_began):
                self.outcome.notes.append(
                    f"{model}: {number} of {options.rounds} rounds ran, for no more fits into its share of"
                    f" --time-limit {options.time_limit_s:g} s"
                )
                return
            for algorithm in rotated(options.algorithms, number):
                if self._can_run(model, algorithm):
                    self._turn(model, algorithm, number)
            longest = max(longest, self._clock() - round_began)

    def _can_run(self, model: str, algorithm: str) -> bool:
        """Starts the ranks, if there are none: only they know what their installation lacks."""
        if (model, algorithm) in self._ranks.failed or algorithm in self._lacking:
            return False
        self._ranks.ready()
        return algorithm not in self._lacking

    def _turn(self, model: str, algorithm: str, number: int) -> None:
        options = self._options
        what = f"{model}, {algorithm}, round {number + 1}/{options.rounds}"
        self._progress.advance(what, 0)
        events = None
        if self._has_settled(model, algorithm):
            events = self._ask("turn", model, algorithm, steps=options.steps, warmup=options.warmup)
        self._progress.advance(what)
        if events is None:
            return
        turn = turn_result(model, algorithm, number, events)
        self.outcome.turns.append(turn)
        if turn.kept is not None:
            # Stated once: what is said of later turns' memory is then wrong by as much.
            note = f"{algorithm} did not free everything with {model} ({turn.kept})"
            if not any(text.startswith(note.split(" (")[0]) for text in self.outcome.notes):
                self.outcome.notes.append(note)

    def _has_settled(self, model: str, algorithm: str) -> bool:
        """What these processes do once (load kernels, meet memory and peers) would be in the first turn's figures: an
        unmeasured one comes before it. False if that failed."""
        if model not in self._settled:
            steps = max(1, self._options.warmup)
            events = self._ask("settle", model, algorithm, steps=steps, warmup=self._options.warmup)
            if events is not None:
                self._settled.add(model)
        return model in self._settled

    def _traces(self, model: str, folder: Path) -> None:
        for algorithm in self._options.algorithms:
            if not self._can_run(model, algorithm):
                continue
            if self._clock() >= self._deadline:
                self.outcome.notes.append(f"{model}, {algorithm}: not traced, --time-limit has passed")
                continue
            self._progress.advance(f"{model}, {algorithm}, trace", 0)
            path = folder / f"{model}.{algorithm}.json.gz"
            warmup = self._options.warmup
            events = self._ask("trace", model, algorithm, steps=TRACED_STEPS, warmup=warmup, path=str(path))
            if events is not None:
                self.outcome.traces.append(path)

    def _started(self, facts: Mapping[str, Any]) -> None:
        self._settled.clear()
        self.outcome.facts = facts
        for algorithm, reason in facts.get("unavailable", {}).items():
            if algorithm not in self._lacking:
                self._lacking.add(algorithm)
                self.outcome.errors.append(f"{algorithm}: {reason}")

    def _ask(self, operation: str, model: str, algorithm: str, **fields: object) -> list[Event] | None:
        """None when it failed, which is then reported."""
        fields = {"algorithm": algorithm, **self._options.turn(model), **fields}
        label = f"{algorithm} with {model}"
        return self._ranks.ask((model, algorithm), label, operation, self._options.timeout_s, **fields)
