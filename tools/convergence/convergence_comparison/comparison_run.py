"""The run: seed by seed, task by task, algorithm by algorithm in an order that rotates. One thread drives it.

An algorithm that fails with a task is left out of it from then on and reported; the ranks are started anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rank_team.renewed_team import RenewedTeam, Team

from bagua.net.bench.progress import Progress
from bagua.net.bench.turns import rotated
from convergence_comparison.catalogue import cases_of
from convergence_comparison.options import Options
from convergence_comparison.statistics import TrainingResult, training_result


@dataclass
class Outcome:
    """What was trained, and what was not."""

    trainings: list[TrainingResult] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    sizes: dict[str, Mapping[str, int]] = field(default_factory=dict)  # of each task's splits
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def trainings_of(options: Options) -> int:
    return options.seeds * sum(len(cases_of(task, options.cases)) for task in options.tasks)


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
        self._longest: dict[str, float] = {}  # seconds of a training, by task
        self.outcome = Outcome()
        self._ranks = RenewedTeam(start, self._started, self.outcome.errors, progress)

    def run(self) -> Outcome:
        """Raises BenchError only when no ranks can be started at all; later on it is one of the outcome's errors."""
        self._ranks.drive(self._seeds, self.outcome.trainings)
        return self.outcome

    def _started(self, facts: Mapping[str, Any]) -> None:
        self.outcome.facts = facts

    def _seeds(self) -> None:
        for number in range(self._options.seeds):
            if not self._seed(number):
                break

    def _seed(self, number: int) -> bool:
        """False if the time is up."""
        for task in self._options.tasks:
            for case in rotated(cases_of(task, self._options.cases), number):
                if (task, case) in self._ranks.failed:
                    continue
                began = self._clock()
                if began + self._longest.get(task, 0.0) >= self._deadline:
                    limit = self._options.time_limit_s
                    self.outcome.errors.append(
                        f"--time-limit {limit:g} s ended the run at seed {number + 1} of {self._options.seeds}, before"
                        f" {case} with {task}; allow more, or fewer --tasks"
                    )
                    return False
                self._train(task, case, number)
                self._longest[task] = max(self._longest.get(task, 0.0), self._clock() - began)
        return True

    def _train(self, task: str, case: str, number: int) -> None:
        options, seed = self._options, number + 1
        what = f"{task}, {case}, seed {seed}/{options.seeds}"
        self._progress.advance(what, 0)
        fields = {"task": task, "case": case, "seed": seed, "steps": options.steps}
        label = f"{case} with {task}, seed {seed}"
        events = self._ranks.ask((task, case), label, "train", options.timeout_s, **fields)
        self._progress.advance(what)
        if events is None:
            return
        self.outcome.trainings.append(training_result(task, case, seed, events))
        names = ("train_samples", "test_samples", "train_targets", "test_targets", "parameters")
        self.outcome.sizes[task] = {name: int(events[0][name]) for name in names}
