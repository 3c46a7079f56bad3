"""What can be compared: tasks and algorithms with their settings, known without loading torch.

docs/explanation/convergence.md documents these settings; the limits are those that an algorithm has to keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SGD, ADAM, QADAM = "sgd", "adam", "qadam"

# Of the mean over the seeds, worse than the baseline; to be better is no fault.
ACCURACY_LIMIT_POINTS = 0.5
LOSS_LIMIT_PERCENT = 1.0

# The learning rate rises over this part of the steps and then falls linearly to zero, for every algorithm alike.
WARMUP_SHARE = 0.05
# QAdam does not compress in this part of the steps; that it is so much in short trainings has its reason in
# docs/reference/algorithms/qadam.md. async averages gradients in its part.
QADAM_WARMUP_SHARE = 1 / 3
ASYNC_WARMUP_SHARE = WARMUP_SHARE


@dataclass(frozen=True)
class TaskSettings:
    """`batch_size` is that of all ranks together, which 2, 3 and 4 ranks can share: their number changes nothing but
    who computes what."""

    batch_size: int
    epochs: int
    optimizer: str  # of every algorithm that brings none
    learning_rates: Mapping[str, float]  # by optimizer; SGD has momentum 0.9, Adam its defaults
    about: str


TASKS: dict[str, TaskSettings] = {
    "digits": TaskSettings(60, 50, SGD, {SGD: 0.1, ADAM: 0.01}, "scikit-learn's 1,797 handwritten digits, an MLP"),
    "photographs": TaskSettings(
        120, 12, SGD, {SGD: 0.05, ADAM: 0.002}, "26,000 patches of scikit-learn's two photographs, denoised by an MLP"
    ),
    "characters": TaskSettings(
        36, 8, ADAM, {ADAM: 0.012}, "465,000 characters of Python's reference manual, a GRU predicts the next one"
    ),
}
DEFAULT_TASKS = tuple(TASKS)


@dataclass(frozen=True)
class Case:
    """An algorithm with its settings.

    name: in tables and on the command line.
    algorithm: as registered with Bagua.
    options: its arguments. `hierarchical` is off, since ranks of one machine would exchange plain averages otherwise
        and nothing of the algorithm would be left to see.
    optimizer: None: the task's.
    replicas_differ: each rank has a model of its own, and what is evaluated is their mean.
    """

    name: str
    algorithm: str
    options: Mapping[str, object] = field(default_factory=dict)
    optimizer: str | None = None
    replicas_differ: bool = False


BASELINE = "gradient_allreduce"
BASELINE_ADAM = "gradient_allreduce-adam"
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(BASELINE, "gradient_allreduce"),
        Case("bytegrad", "bytegrad", {"hierarchical": False}),
        Case("decentralized", "decentralized", {"hierarchical": False}, replicas_differ=True),
        Case(
            "decentralized-shift_one",
            "decentralized",
            {"hierarchical": False, "peer_selection_mode": "shift_one"},
            replicas_differ=True,
        ),
        Case(
            "low_precision_decentralized", "low_precision_decentralized", {"hierarchical": False}, replicas_differ=True
        ),
        Case("async", "async", {"sync_interval_ms": 5}, replicas_differ=True),
        Case(BASELINE_ADAM, "gradient_allreduce", optimizer=ADAM),
        Case("qadam", "qadam", {"hierarchical": False}, optimizer=QADAM),
    )
}
DEFAULT_CASES = tuple(CASES)


def optimizer_of(task: str, case: str) -> str:
    return CASES[case].optimizer or TASKS[task].optimizer


def learning_rate_of(task: str, case: str, ranks: int) -> float:
    """The largest of the schedule.

    Adam divides by the root of a second moment. Where each rank has one of its own gradients' alone, of a batch that is
    `ranks` times smaller, the part of it that is noise is as many times larger, and steps come out shorter by up to the
    root of that. The learning rate makes up for it.
    """
    optimizer = optimizer_of(task, case)
    rate = TASKS[task].learning_rates[ADAM if optimizer == QADAM else optimizer]
    return rate * math.sqrt(ranks) if optimizer == ADAM and CASES[case].replicas_differ else rate


def baseline_of(task: str, case: str) -> str | None:
    """The case that this one is compared with: gradient all-reduce with the same optimizer (Adam for QAdam). None for
    those that are compared with nothing."""
    if CASES[case].algorithm == "gradient_allreduce":
        return None
    if CASES[case].optimizer is None or TASKS[task].optimizer == ADAM:
        return BASELINE
    return BASELINE_ADAM


def cases_of(task: str, chosen: Sequence[str]) -> tuple[str, ...]:
    """What has to be trained for the chosen: these and their baselines, each once. Where a task's own optimizer is
    Adam, gradient all-reduce with Adam is gradient all-reduce."""
    names = set(chosen) | {baseline for name in chosen if (baseline := baseline_of(task, name)) is not None}
    if TASKS[task].optimizer == ADAM and BASELINE_ADAM in names:
        names = (names - {BASELINE_ADAM}) | {BASELINE}
    return tuple(name for name in CASES if name in names)
