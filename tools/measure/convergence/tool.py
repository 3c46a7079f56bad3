"""`measure convergence`: train with every algorithm to the end and compare final losses and accuracies with gradient
all-reduce's, and bytes sent. Nothing is downloaded: the data comes with scikit-learn and Python."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bagua.net.bench.api import BenchError, Progress, Turns, describe_machine, names_of, shows_colour, within
from measure.convergence.catalogue import (
    ACCURACY_LIMIT_POINTS,
    CASES,
    DEFAULT_CASES,
    DEFAULT_SEEDS,
    DEFAULT_TASKS,
    LOSS_LIMIT_PERCENT,
    TASKS,
    cases_of,
)
from measure.convergence.earlier import NO_RUN, EarlierRun, read_earlier, still_to_train, together
from measure.convergence.figure import write_figure
from measure.convergence.report import report_of
from measure.convergence.statistics import TrainingResult, software_of, training_result
from measure.options import add_ranks, add_results, check_results, choose_device, parser_of
from measure.ranks.renewed_team import RenewedTeam, Team, keeping
from measure.ranks.team import on_this_host

_EPILOG = """\
tasks:
{tasks}

One process group for all; with every seed each algorithm trains each task from the same start with the same batches, in
an order that rotates, until the learning rate is zero. What is evaluated is the mean of the ranks' models. An algorithm
holds if its mean over the seeds is at most {points:g} points of accuracy and {percent:g} % of loss worse than gradient
all-reduce with the same optimizer.

examples:
  measure convergence --nproc-per-node 4 --json convergence.json --plot convergence.png
  measure convergence --tasks digits --algorithms bytegrad,async --seeds 3

exit status: 0, or 1 if a training failed, figures are missing or an algorithm falls short, or 2 if an option was wrong.
"""


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does. `gpus` counts them."""
    tasks = "\n".join(f"  {name:<12} {task.about}, {task.length}" for name, task in TASKS.items())
    parser = parser_of(
        "convergence",
        "Does an algorithm train as well as gradient all-reduce? On data that packages ship, to the end.",
        _EPILOG.format(tasks=tasks, points=ACCURACY_LIMIT_POINTS, percent=LOSS_LIMIT_PERCENT),
    )
    parser.add_argument(
        "--tasks",
        type=names_of("task", list(TASKS)),
        metavar="LIST",
        help=_default({device: ",".join(names) for device, names in DEFAULT_TASKS.items()}),
    )
    parser.add_argument(
        "--algorithms",
        type=names_of("algorithm", list(CASES)),
        default=DEFAULT_CASES,
        metavar="LIST",
        help=f"of {', '.join(CASES)} (default all); what they are compared with is trained as well",
    )
    add_ranks(parser, least=2, most=4)
    length = parser.add_argument_group("how long")
    length.add_argument("--seeds", type=within(int, 1, 100), metavar="N", help=_default(DEFAULT_SEEDS))
    length.add_argument(
        "--steps",
        type=within(int, 1, 10_000_000),
        metavar="N",
        help="steps of each training, with the schedule made for them (default: the task's own number)",
    )
    length.add_argument(
        "--time-limit",
        type=within(float, 1.0, 86400.0),
        default=3600.0,
        metavar="S",
        help="seconds for the whole run; no seed begins that is longer than what is left (default 3600)",
    )
    length.add_argument(
        "--timeout", type=within(float, 1.0, 3600.0), default=300.0, metavar="S", help="for one training (default 300)"
    )
    output = add_results(parser, plot=True)
    output.add_argument(
        "--earlier",
        type=Path,
        metavar="PATH",
        help="a file of --details: its trainings are put in the same table, and not repeated; refused if their data or"
        " software was another",
    )
    given = parser.parse_args(words)
    choose_device(parser, given, gpus)
    given.tasks = given.tasks or DEFAULT_TASKS[given.device]
    given.seeds = given.seeds or DEFAULT_SEEDS[given.device]
    check_results(parser, given)
    try:
        given.earlier = read_earlier(given.earlier, given.ranks) if given.earlier else NO_RUN
    except ValueError as error:
        parser.error(str(error))
    return given


def _default(values: Mapping[str, object]) -> str:
    """By device, for --help."""
    return "default: " + "; ".join(f"{value} on {device}" for device, value in values.items())


class ConvergenceRun:
    """Tasks are the cases, algorithms the variants, seeds the rounds.

    Attributes:
        sizes: of each task's splits.
    """

    def __init__(
        self,
        given: argparse.Namespace,
        start: Callable[[], Team],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
        earlier: EarlierRun = NO_RUN,
    ) -> None:
        self._given, self._progress, self._clock, self._earlier = given, progress, clock, earlier
        self._ranks = RenewedTeam(start)
        self.turns: Turns[TrainingResult] = Turns()
        self.sizes: dict[str, Mapping[str, int]] = {}

    @property
    def facts(self) -> Mapping[str, object]:
        return self._ranks.facts or self._earlier.facts

    @property
    def trainings(self) -> list[TrainingResult]:
        return together(self._earlier.trainings, self.turns.all())

    def run(self) -> None:
        """Raises BenchError only when no ranks can be started at all; later on it is one of the errors."""
        given = self._given
        with keeping(self.turns, self._ranks):
            self.turns.take(
                plan_of(given, self._earlier),
                given.seeds,
                self._train,
                time_limit_s=given.time_limit,
                rounds_first=True,
                progress=self._progress,
                clock=self._clock,
            )

    def _train(self, task: str, case: str, number: int) -> TrainingResult:
        given, seed = self._given, number + 1
        events = self._ranks.ask("train", given.timeout, task=task, case=case, seed=seed, steps=given.steps)
        names = ("train_samples", "test_samples", "parameters")
        self.sizes[task] = {name: int(events[0][name]) for name in names}
        return training_result(task, case, seed, events, software_of(self._ranks.facts))


def plan_of(given: argparse.Namespace, earlier: EarlierRun) -> dict[str, list[str]]:
    """The algorithms to train, for each task."""
    wanted = {task: cases_of(task, given.algorithms) for task in given.tasks}
    return still_to_train(wanted, earlier.trainings, given.seeds)


def main(words: Sequence[str] | None = None) -> int:
    given = parse_options(words)
    earlier: EarlierRun = vars(given).pop("earlier")
    turns = given.seeds * sum(map(len, plan_of(given, earlier).values()))
    with Progress(turns) as progress:
        start = on_this_host("measure.convergence.worker", given, given.timeout)
        run = ConvergenceRun(given, start, progress, earlier=earlier)
        try:
            run.run()
        except BenchError as error:
            print(f"measure convergence: {error}", file=sys.stderr)
            return 1
    report = report_of(run.trainings, run.sizes, given, run.facts, run.turns, colour=shows_colour(sys.stdout))
    machine = describe_machine()
    if given.plot is not None and report.rows:
        title = f"Convergence, {given.ranks} ranks, {given.seeds} seeds each"
        write_figure(given.plot, run.trainings, title, machine.caption())
        report.written.append(given.plot)
    code = report.publish(given, machine)
    return 1 if any(row.falls_short for row in report.rows) else code
