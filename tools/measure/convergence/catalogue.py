"""What can be compared: tasks and algorithms with their settings.

docs/explanation/convergence.md documents these settings; the limits are those that an algorithm has to keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bagua.codecs import codec_names
from bagua.comm_ops.compressed import DEFAULT_CODEC

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
    """
    batch_size: of all ranks together, which 2, 3 and 4 ranks can share: their number changes nothing but who computes
        what.
    epochs: how long is trained; None: so many steps, a part of an epoch.
    optimizer: of every algorithm that brings none.
    learning_rates: by optimizer; SGD has momentum 0.9, Adam its defaults.
    """

    batch_size: int
    epochs: int | None
    optimizer: str
    learning_rates: Mapping[str, float]
    about: str
    steps: int | None = None

    @property
    def length(self) -> str:
        return f"{self.steps} steps" if self.epochs is None else f"{self.epochs} epochs"


TASKS: dict[str, TaskSettings] = {
    "digits": TaskSettings(60, 50, SGD, {SGD: 0.1, ADAM: 0.01}, "scikit-learn's 1,797 handwritten digits, an MLP"),
    "photographs": TaskSettings(
        *(120, 12, SGD, {SGD: 0.05, ADAM: 0.002}),
        "26,000 patches of scikit-learn's two photographs, denoised by an MLP",
    ),
    "text": TaskSettings(
        *(24, None, ADAM, {ADAM: 0.002}),
        "sources of Python's standard library, a GPT of 137,000 parameters predicts the next byte",
        steps=1000,
    ),
    "text-small": TaskSettings(
        *(24, None, ADAM, {ADAM: 0.008}),
        "the same with 30,000 parameters and more steps, for algorithms that need many",
        steps=3000,
    ),
    "text-large": TaskSettings(
        *(48, None, ADAM, {ADAM: 0.001}), "the same with 10.9 million parameters, for GPUs", steps=600
    ),
}
# By device.
DEFAULT_SEEDS = {"cpu": 2, "cuda": 5}
DEFAULT_TASKS = {"cpu": ("digits", "photographs", "text"), "cuda": ("digits", "photographs", "text-large")}


@dataclass(frozen=True)
class Case:
    """An algorithm with its settings.

    name: in tables and on the command line.
    algorithm: as registered with Bagua, or ERROR_FEEDBACK, or FSDP.
    options: its arguments. `hierarchical` is off, since ranks of one machine would exchange plain averages otherwise
        and nothing of the algorithm would be left to see.
    optimizer: None: the task's.
    qadam: options of its optimizer.
    replicas_differ: each rank has a model of its own, and what is evaluated is their mean.
    start_share: part of the steps that are the algorithm's warm-up with gradient all-reduce.
    momentum_share: part of the rounds over which the outer momentum rises.
    """

    name: str
    algorithm: str
    options: Mapping[str, object] = field(default_factory=dict)
    optimizer: str | None = None
    qadam: Mapping[str, object] = field(default_factory=dict)
    replicas_differ: bool = False
    start_share: float = 0.0
    momentum_share: float = 0.0

    @property
    def is_started(self) -> bool:
        """Local steps that the baseline's learning rate is for."""
        return bool(self.start_share or self.momentum_share)


# bagua.comm_hooks.error_feedback_bytegrad, with torch's DDP.
ERROR_FEEDBACK = "error_feedback"
# torch's FSDP2, with options of bagua.fsdp.compress_communication; only with text.
FSDP = "fsdp"
CODECS = tuple(codec_names())
BASELINE = "gradient_allreduce"
BASELINE_ADAM = "gradient_allreduce-adam"
_FLAT: Mapping[str, object] = {"hierarchical": False}
_SHIFT_ONE: Mapping[str, object] = {**_FLAT, "peer_selection_mode": "shift_one"}
_ROUNDS: Mapping[str, object] = {"sync_every": 20}
# About as in DiLoCo's paper, where 24,000 of 88,000 steps are such a start.
START_SHARE = 0.3


def _after_start(
    name: str, algorithm: str, start: float = START_SHARE, momentum: float = 0.0, **options: object
) -> Case:
    """Local steps from a model that is trained already, as their papers use them; or with a momentum that rises."""
    return Case(name, algorithm, options, replicas_differ=True, start_share=start, momentum_share=momentum)


def _with_codecs(algorithm: str, **settings: bool) -> list[Case]:
    """One for each compression; the default one goes by the algorithm's name alone."""
    return [
        Case(algorithm, algorithm, _FLAT, **settings)
        if codec == DEFAULT_CODEC
        else Case(f"{algorithm}-{codec}", algorithm, {**_FLAT, "codec": codec}, **settings)
        for codec in CODECS
    ]


def _of_fsdp() -> list[Case]:
    """Gradients in each codec, without error feedback and with it; gradients and weights."""
    both: Mapping[str, object] = {"gradients": "int4", "weights": "int4", "error_feedback": True}
    return [
        Case(FSDP, FSDP),
        *(Case(f"fsdp_gradients-{codec}", FSDP, {"gradients": codec}) for codec in CODECS),
        *(Case(f"fsdp_feedback-{codec}", FSDP, {"gradients": codec, "error_feedback": True}) for codec in CODECS),
        Case("fsdp_weights-int8", FSDP, {"gradients": "int8", "weights": "int8"}),
        Case("fsdp_weights-int4", FSDP, both),
        Case("fsdp_weights-int4-differences", FSDP, {**both, "weight_differences": True}),
    ]


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(BASELINE, "gradient_allreduce"),
        *_with_codecs("bytegrad"),
        *_with_codecs(ERROR_FEEDBACK),
        Case("powersgd", "powersgd", {"rank": 4}),
        Case("decentralized", "decentralized", _FLAT, replicas_differ=True),
        Case("decentralized-shift_one", "decentralized", _SHIFT_ONE, replicas_differ=True),
        *_with_codecs("low_precision_decentralized", replicas_differ=True),
        Case("async", "async", {"sync_interval_ms": 5}, replicas_differ=True),
        Case("local_sgd", "local_sgd", {"sync_every": 10}, replicas_differ=True),
        Case("diloco", "diloco", _ROUNDS, replicas_differ=True),
        Case("streaming_diloco", "streaming_diloco", {**_ROUNDS, "delay": 2}, replicas_differ=True),
        Case(
            "streaming_diloco-int4", "streaming_diloco", {**_ROUNDS, "delay": 2, "codec": "int4"}, replicas_differ=True
        ),
        _after_start("local_sgd-started", "local_sgd", sync_every=20),
        _after_start("diloco-started", "diloco", sync_every=20),
        _after_start("diloco-started-100", "diloco", sync_every=100),
        _after_start("streaming_diloco-started-int4", "streaming_diloco", sync_every=20, delay=2, codec="int4"),
        _after_start("streaming_diloco-started-100-int4", "streaming_diloco", sync_every=100, delay=5, codec="int4"),
        _after_start("diloco-started_int4", "diloco", sync_every=20, warmup_codec="int4"),
        _after_start("diloco-started_int4-100", "diloco", sync_every=100, warmup_codec="int4"),
        _after_start("diloco-short_start-100", "diloco", 0.2, 0.3, sync_every=100, warmup_codec="int4"),
        _after_start("diloco-rising", "diloco", 0.0, 0.5, sync_every=20),
        _after_start(
            "streaming_diloco-rising-int4", "streaming_diloco", 0.0, 0.5, sync_every=20, delay=2, codec="int4"
        ),
        Case(BASELINE_ADAM, "gradient_allreduce", optimizer=ADAM),
        Case("qadam", "qadam", _FLAT, optimizer=QADAM),
        Case("qadam-growing", "qadam", _FLAT, optimizer=QADAM, qadam={"freeze_bias_correction": False}),
        *_of_fsdp(),
    )
}
DEFAULT_CASES = tuple(name for name, case in CASES.items() if not case.is_started and case.algorithm != FSDP)


def optimizer_of(task: str, case: str) -> str:
    return CASES[case].optimizer or TASKS[task].optimizer


def learning_rate_of(task: str, case: str, ranks: int) -> float:
    """The largest of the schedule.

    Adam divides by the root of a second moment. Where each rank has one of its own gradients' alone, of a batch that is
    `ranks` times smaller, the part of it that is noise is as many times larger, and steps come out shorter by up to the
    root of that. The learning rate makes up for it, but not in a training that begins with common gradients.
    """
    optimizer = optimizer_of(task, case)
    rate = TASKS[task].learning_rates[ADAM if optimizer == QADAM else optimizer]
    has_own_gradients = CASES[case].replicas_differ and not CASES[case].is_started
    return rate * math.sqrt(ranks) if optimizer == ADAM and has_own_gradients else rate


def baseline_of(task: str, case: str) -> str | None:
    """The case that this one is compared with: gradient all-reduce with the same optimizer (Adam for QAdam), and FSDP
    as it is for FSDP that is compressed. None for those that are compared with nothing."""
    if CASES[case].algorithm == "gradient_allreduce" or case == FSDP:
        return None
    if CASES[case].algorithm == FSDP:
        return FSDP
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
