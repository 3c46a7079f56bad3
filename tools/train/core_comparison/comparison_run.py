"""The run: model by model, round by round, contender by contender in an order that rotates. One thread drives it.

A contender that fails with a model is left out of it from then on and reported; the ranks are started anew.
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
from bagua.net.bench.rotation import rotated
from core_comparison.options import TRACED_STEPS, Options
from core_comparison.step_statistics import TurnResult, turn_result


@dataclass
class Outcome:
    """What was measured, and what was not."""

    turns: list[TurnResult] = field(default_factory=list)
    traces: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by model and contender
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
        self._lacking: set[str] = set()  # contenders that this installation does not have
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
            for contender in rotated(options.contenders, number):
                if self._can_run(model, contender):
                    self._turn(model, contender, number)
            longest = max(longest, self._clock() - round_began)

    def _can_run(self, model: str, contender: str) -> bool:
        """Starts the ranks, if there are none: only they know what their installation lacks."""
        if (model, contender) in self._ranks.failed or contender in self._lacking:
            return False
        self._ranks.ready()
        return contender not in self._lacking

    def _turn(self, model: str, contender: str, number: int) -> None:
        options = self._options
        what = f"{model}, {contender}, round {number + 1}/{options.rounds}"
        self._progress.advance(what, 0)
        events = None
        if self._has_settled(model, contender):
            events = self._ask("turn", model, contender, steps=options.steps, warmup=options.warmup)
        self._progress.advance(what)
        if events is None:
            return
        turn = turn_result(model, contender, number, events)
        self.outcome.turns.append(turn)
        if turn.kept is not None:
            # Stated once: what is said of later turns' memory is then wrong by as much.
            note = f"{contender} did not free everything with {model} ({turn.kept})"
            if not any(text.startswith(note.split(" (")[0]) for text in self.outcome.notes):
                self.outcome.notes.append(note)

    def _has_settled(self, model: str, contender: str) -> bool:
        """What these processes do once (load kernels, meet memory and peers) would be in the first turn's figures: an
        unmeasured one comes before it. False if that failed."""
        if model not in self._settled:
            steps = max(1, self._options.warmup)
            events = self._ask("settle", model, contender, steps=steps, warmup=self._options.warmup)
            if events is not None:
                self._settled.add(model)
        return model in self._settled

    def _traces(self, model: str, folder: Path) -> None:
        for contender in self._options.contenders:
            if not self._can_run(model, contender):
                continue
            if self._clock() >= self._deadline:
                self.outcome.notes.append(f"{model}, {contender}: not traced, --time-limit has passed")
                continue
            self._progress.advance(f"{model}, {contender}, trace", 0)
            path = folder / f"{model}.{contender}.json.gz"
            warmup = self._options.warmup
            events = self._ask("trace", model, contender, steps=TRACED_STEPS, warmup=warmup, path=str(path))
            if events is not None:
                self.outcome.traces[model, contender] = events[0]["communication"]

    def _started(self, facts: Mapping[str, Any]) -> None:
        self._settled.clear()
        self.outcome.facts = facts
        for contender, reason in facts.get("unavailable", {}).items():
            if contender not in self._lacking:
                self._lacking.add(contender)
                self.outcome.errors.append(f"{contender}: {reason}")

    def _ask(self, operation: str, model: str, contender: str, **fields: object) -> list[Event] | None:
        """None when it failed, which is then reported."""
        fields = {"contender": contender, **self._options.turn(model), **fields}
        label = f"{contender} with {model}"
        return self._ranks.ask((model, contender), label, operation, self._options.timeout_s, **fields)
