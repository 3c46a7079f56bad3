"""`measure convergence`: train with every algorithm to the end and compare final losses and accuracies with gradient
all-reduce's, and bytes sent. Nothing is downloaded: the data comes with scikit-learn and Python.

One process group for all; with every seed each algorithm trains each task from the same start with the same batches,
until the learning rate is zero. What is evaluated is the mean of the ranks' models. Differences are paired: an
algorithm's training is compared with the baseline's of the same seed. An algorithm holds if its mean over the seeds is
within ACCURACY_LIMIT_POINTS and LOSS_LIMIT_PERCENT of gradient all-reduce with the same optimizer; better than that is
not an error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bagua.net.bench.api import MISSING, Column, Event, Figure, describe_machine, figures, names_of, within
from measure.convergence.catalogue import (
    ACCURACY_LIMIT_POINTS,
    CASES,
    DEFAULT_CASES,
    DEFAULT_SEEDS,
    DEFAULT_TASKS,
    LOSS_LIMIT_PERCENT,
    TASKS,
    baseline_of,
    cases_of,
)
from measure.convergence.figure import write_figure
from measure.network import LOOPBACK, parse_network
from measure.processes import Placement
from measure.runner import Case, Plan, Row, Sample, Tool, name_of, number

HOLDS = "holds"
# Of a training, what all ranks have in common; see training.Trained.
_COMMON = ("steps", "train_loss", "test_loss", "accuracy", "replica_test_loss", "spread", "averages", "staleness")
_COMMON += ("curve_steps", "curve_loss", "source", "train_samples", "test_samples", "parameters")


def pairs(row: Row) -> list[tuple[Sample, Sample]] | None:
    """Trainings and those of the baseline with the same seeds; None: it is compared with nothing."""
    baseline = baseline_of(row.case.task, row.variant)
    return None if baseline is None else row.turns.pairs(row.case, row.variant, baseline)


def mean_and_deviation(row: Row, name: str, factor: float = 1.0) -> tuple[float, float] | None:
    """Of a single training over the seeds."""
    values = [value * factor for value in row.values(name) if value is not None]
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return math.inf, math.inf
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def difference(row: Row, name: str) -> tuple[float, float | None] | None:
    """From the baseline: the mean of the paired differences, and its standard error, of two pairs or more. Of losses in
    per cent of the baseline's mean, of accuracy in points; more loss and more accuracy is positive. A value that is not
    a number makes it infinite: it is close to nothing."""
    found = pairs(row)
    if found is None or None in row.values(name):
        return None
    gaps = [mine[name] - base[name] for mine, base in found]
    unit = 0.01 if name == "accuracy" else 0.01 * statistics.fmean([base[name] for _, base in found] or [math.nan])
    if not gaps or not all(map(math.isfinite, gaps)) or not unit > 0:
        return math.inf, None
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) / unit if len(gaps) > 1 else None
    return statistics.fmean(gaps) / unit, error


def reached(training: Sample, baseline: Sample) -> tuple[float, float] | None:
    """The step, and the bytes that a rank has sent until then, when the test loss is first no more than
    LOSS_LIMIT_PERCENT above the baseline's final one; None: never. Between two evaluations the loss is taken for
    linear."""
    loss = baseline["test_loss"] * (1 + LOSS_LIMIT_PERCENT / 100)
    before: tuple[float, float, float] | None = None
    curve = (training[name] for name in ("curve_steps", "curve_bytes", "curve_loss"))
    for step, sent, now in zip(*curve, strict=True):
        if now <= loss:
            if before is None:
                return step, sent
            step_before, sent_before, loss_before = before
            part = (loss_before - loss) / (loss_before - now) if math.isfinite(loss_before) else 1.0
            return step_before + part * (step - step_before), sent_before + part * (sent - sent_before)
        before = step, sent, now
    return None


def all_reached(row: Row) -> list[tuple[float, float]]:
    """By seed; empty if one of them never is."""
    own = [(one, one) for one in row.turns.of(row.case, row.variant)]
    found = pairs(row)
    times = [reached(one, base) for one, base in (own if found is None else found)]
    return [] if None in times else times


def verdict(row: Row) -> str:
    """HOLDS, or in what the algorithm is worse than its baseline by more than the limits; empty without a baseline."""
    if pairs(row) is None:
        return ""
    losses = row.values("test_loss")
    if diverged := sum(not math.isfinite(loss) for loss in losses):
        return f"falls short: diverged with {diverged} of {len(losses)} seeds"
    short = [
        f"{what} {gap[0]:+.2g} %"
        for what, name in (("train loss", "train_loss"), ("test loss", "test_loss"))
        if (gap := difference(row, name)) is not None and not gap[0] <= LOSS_LIMIT_PERCENT
    ]
    gap = difference(row, "accuracy")
    if gap is not None and not gap[0] >= -ACCURACY_LIMIT_POINTS:
        short.append(f"accuracy {gap[0]:+.2g} points")
    return "falls short: " + ", ".join(short) if short else HOLDS


def steps_per_average(row: Row) -> float | None:
    averages = sum(value or 0 for value in row.values("averages"))
    return sum(row.values("steps")) / averages if averages else None


def kilobytes_per_step(row: Row) -> list[float]:
    return [one["curve_bytes"][-1] / one["steps"] / 1e3 for one in row.turns.of(row.case, row.variant)]


# --- cells -----------------------------------------------------------------------------------------------------------


def _loss(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        mean, _ = mean_and_deviation(row, name) or (math.inf, 0.0)
        return f"{mean:#.4g}" if math.isfinite(mean) else "none"

    return cell


def _spread(name: str, style: str, factor: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = mean_and_deviation(row, name, factor)
        if found is None:
            return MISSING
        return f"{found[0]:{style}} ± {found[1]:.2g}" if math.isfinite(found[0]) else "none"

    return cell


def _difference(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if (found := difference(row, name)) is None:
            return MISSING
        mean, error = found
        return f"{mean:+.2f}" + ("" if error is None else f" ± {error:.2f}") if math.isfinite(mean) else "none"

    return cell


def _reached(position: int, style: str, unit: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = [one[position] / unit for one in all_reached(row)]
        return format(statistics.fmean(found), style) if found else MISSING

    return cell


_of_one = _loss("replica_test_loss")


def _apart(row: Row) -> float:
    return max(row.values("spread"))


def _by_device(values: Mapping[str, object]) -> str:
    return "; ".join(f"{value} on {device}" for device, value in values.items())


class Convergence(Tool):
    name = "convergence"
    epilog = "\n".join(["tasks:", *(f"  {name:<12} {task.about}, {task.length}" for name, task in TASKS.items())])
    title = "Convergence on {ranks} ranks, {seeds} seeds"
    keeps_turns = True
    rounds_first = True
    same = ("steps",)
    ranks = (2, 4)
    options = (
        ("tasks", names_of("task", list(TASKS)), None, f"default: {_by_device(DEFAULT_TASKS)}"),
        ("algorithms", names_of("algorithm", list(CASES)), DEFAULT_CASES, "trained, and what they are compared with"),
        ("seeds", within(int, 1, 100), None, f"default: {_by_device(DEFAULT_SEEDS)}"),
        ("steps", within(int, 1, 10_000_000), None, "of each training, with the schedule made for them"),
        ("plot", Path, None, "a picture (.png, .svg or .pdf)"),
        ("network", parse_network, LOOPBACK, "that a rank per host is joined by, as 1G+25ms; as root"),
    )
    length = (None, 3600.0, 300.0)
    module = "measure.convergence.training"
    columns = (
        Column("task", "", lambda row: row.case.task, left=True),
        Column("algorithm", "", lambda row: row.variant, left=True),
        Column("seeds", "", lambda row: str(len(row.values()))),
        Column("train loss", "", _loss("train_loss")),
        Column("to baseline", "%", _difference("train_loss")),
        Column("test loss", "± of one", _spread("test_loss", "#.4g")),
        Column("to baseline", "%", _difference("test_loss")),
        Column("accuracy", "%, ± of one", _spread("accuracy", ".2f", 100), optional=True),
        Column("to baseline", "points", _difference("accuracy"), optional=True),
        Column("apart", "part", lambda row: f"{_apart(row):.1e}" if _apart(row) else MISSING, optional=True),
        Column("one rank", "test loss", lambda row: _of_one(row) if _apart(row) else MISSING, optional=True),
        Column("averaged", "each steps", lambda row: number(steps_per_average(row), ".1f"), optional=True),
        Column("sent", "kB/step", lambda row: f"{statistics.fmean(kilobytes_per_step(row)):.4g}"),
        Column("same loss", "steps", _reached(0, ".0f")),
        Column("same loss", "MB sent", _reached(1, ".3g", 1e6)),
        Column("speed", "steps/s", lambda row: f"{statistics.median(row.values('steps_per_second')):.0f}"),
        Column("verdict", "", verdict, left=True),
    )

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        super().check(parser, given)
        given.tasks = given.tasks or DEFAULT_TASKS[given.device]
        given.seeds = given.seeds or DEFAULT_SEEDS[given.device]

    def placement(self) -> AbstractContextManager[Placement]:
        placement: AbstractContextManager[Placement] = self.given.network.placement(self.given)
        return placement

    @property
    def rounds(self) -> int:
        return self.given.seeds

    def cases(self) -> Plan:
        return {Case(task=task): cases_of(task, self.given.algorithms) for task in self.given.tasks}

    def sample(self, events: Sequence[Event]) -> Sample:
        named = {name: self.facts.get(name) for name in ("python", "torch", "nccl", "device")}
        return {
            **{name: events[0][name] for name in _COMMON},
            "seconds": max(event["seconds"] for event in events),
            "steps_per_second": min(event["steps_per_second"] for event in events),
            # Sent per rank, mean over the ranks.
            "curve_bytes": [
                statistics.fmean(sent) for sent in zip(*(one["curve_bytes"] for one in events), strict=True)
            ],
            "software": ", ".join(f"{name} {value}" for name, value in named.items() if value),
        }

    def rows(self) -> list[Row]:
        """In the order of the catalogue; none if trainings are not comparable."""
        found = set(self.turns.samples)
        places = [(Case(task=task), name) for task in TASKS for name in CASES]
        return [] if self._mixed() else [Row(self.turns, *place) for place in places if place in found]

    def _mixed(self) -> list[str]:
        """Tasks whose trainings are of other data, with other software, or of another length."""
        found = []
        for case in dict.fromkeys(case for case, _ in self.turns.samples):
            mine = [one for (of, _), samples in self.turns.samples.items() if of == case for one in samples.values()]
            for what in ("source", "software", "steps"):
                values = sorted({str(one[what]) for one in mine})
                if len(values) > 1:
                    found.append(
                        f"{case}: trainings that differ in {what} cannot be in one table: {'; '.join(values)}.\n"
                        "Run all of them with the same Python, packages and --steps."
                    )
        return found

    def block(self, row: Row) -> object:
        return row.case

    def is_loud(self, row: Row) -> bool:
        return verdict(row) not in (HOLDS, "")

    def faults(self, rows: Sequence[Row]) -> Iterator[str]:
        yield from self._mixed()
        for row in rows:
            if self.is_loud(row):
                yield f"{row.variant} with {row.case}: {verdict(row)}"
            for seed, one in self.turns.samples[row.case, row.variant].items():
                # Values that are not numbers are equal to nothing, not even to each other: the verdict speaks of them.
                if not CASES[row.variant].replicas_differ and one["spread"] and math.isfinite(one["test_loss"]):
                    yield (
                        f"{row.variant} with {row.case}, seed {seed + 1}: the ranks ended with different parameters"
                        f" ({one['spread']:.2g} of their length apart)"
                    )

    def closing(self, rows: Sequence[Row]) -> Iterator[str]:
        for row in {row.case: row for row in rows}.values():
            one = self.turns.of(row.case, row.variant)[0]
            yield (
                f"{row.case}: {one['train_samples']} samples to train with, {one['test_samples']} to test,"
                f" {one['parameters']} parameters, {one['steps']} steps of {TASKS[row.case.task].batch_size} samples;"
                f" {one['source']}"
            )
        yield (
            "to baseline: of the same seed's gradient all-reduce with the same optimizer, mean over the seeds ± its"
            " standard error; above 0 is more loss, more accuracy"
        )
        yield (
            "sent: by a rank, headers not counted; same loss: when the test loss is first at most"
            f" {LOSS_LIMIT_PERCENT:g} % above the baseline's final one, in mean over the seeds"
        )
        if any(map(_apart, rows)):
            yield "apart: a replica's largest distance from the mean of all, over its length; evaluated is the mean"

    def figures(self, row: Row) -> list[Figure]:
        """Repetitions are seeds; differences from the baseline are taken within a seed."""
        labels = {"model": row.case.task, "algorithm": name_of(row.variant), **self.where}
        values: dict[tuple[str, str], Sequence[float | None]] = {
            ("accuracy", "%"): [None if one is None else one * 100 for one in row.values("accuracy")],
            ("train_loss", ""): row.values("train_loss"),
            ("loss", ""): row.values("test_loss"),
            ("loss_difference", "%"): [
                (one["test_loss"] / base["test_loss"] - 1) * 100 for one, base in pairs(row) or ()
            ],
            ("sent", "kB/step"): kilobytes_per_step(row),
            ("steps_to_loss", "steps"): [steps for steps, _ in all_reached(row)],
        }
        measured = figures(labels, values)
        for point, step in enumerate(row.values("curve_steps")[0]):
            curve = {
                ("loss", ""): [losses[point] for losses in row.values("curve_loss")],
                ("sent", "MB"): [sent[point] / 1e6 for sent in row.values("curve_bytes")],
            }
            measured += figures({**labels, "step": step}, curve)
        return measured

    def parameters(self) -> Mapping[str, Any]:
        rows = self.rows()
        return {
            "data": {row.case.task: row.values("source")[0] for row in rows},
            "verdicts": {f"{row.case.task}, {row.variant}": verdict(row) for row in rows},
        }

    def draw(self, rows: Sequence[Row]) -> list[Path]:
        if self.given.plot is None:
            return []
        title = self.named(self.title)
        write_figure(self.given.plot, rows, title, describe_machine().caption())
        return [self.given.plot]


main = Convergence.main
