"""`measure memory`: the memory that each algorithm needs in addition to plain training, in bytes per parameter,
compared with what docs/reference/algorithms states.

Plain training is the same model and optimizer without Bagua: parameters, gradients and the state of the optimizer.
`kept` is allocated between steps, `at the peak` is the maximum within a step; both with gradients that are reused. With
`fresh gradients`, which autograd allocates in each step after zero_grad(set_to_none=True), the gradients that wait for
their bucket are added. An algorithm that needs more than is stated is an error. If the model is so small that noise
would hide a copy of its parameters, the verdict is "too small to tell".

What is stated is for float32 and ranks that are not nodes (`hierarchical=False`). What an algorithm *keeps* is there
between the steps. Its *scratch* is there only while it works; but on CPUs the communication thread keeps that of
communication, up to KEPT_BYTES. What is stated of scratch are the algorithm's tensors; gloo's buffers are
neither stated nor, where they would matter, small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagua.comm_ops.all_reduce import WINDOW_BYTES
from bagua.kernels.scratch_memory import KEPT_BYTES
from bagua.net.bench.api import Column, Event, Label, names_of, within
from measure.convergence.catalogue import ADAM, CASES, QADAM, SGD
from measure.memory_probe import ALLOCATOR_SETTINGS, Probe
from measure.rank import join_bagua
from measure.runner import Case, Plan, Row, Sample, Tool, name_of, ranks_text

# With which QAdam begins to compress; it is over when steps are measured.
QADAM_WARMUP_STEPS = 2
# Until gradients, states and buffers exist, and QAdam compresses.
_SETTLING_STEPS = QADAM_WARMUP_STEPS + 3
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Stated:
    """
    kept, kept_of_bucket: bytes per parameter, and per element of the largest bucket.
    scratch: of the optimizer, bytes per parameter; on CPUs it steps a few parameters at a time, and needs next to none.
    exchanged: scratch of communication, bytes per element of the largest bucket with so many ranks on such a device.
    sums: buckets are summed over the ranks, at least at first, which on CPUs takes others' versions of the own part.
    """

    kept: float = 0.0
    kept_of_bucket: float = 0.0
    scratch: float = 0.0
    exchanged: Callable[[int, str], float] = lambda _ranks, _device: 0.0
    sums: bool = False

    def bytes_of(self, parameters: int, largest_bucket: int, ranks: int, device: str) -> tuple[float, float]:
        """Kept, and at the peak."""
        exchanged = self.exchanged(ranks, device) * largest_bucket
        if self.sums and device == "cpu":
            exchanged = max(exchanged, (1 - 1 / ranks) * min(_ELEMENT_BYTES * largest_bucket, WINDOW_BYTES))
        of_thread = min(exchanged, KEPT_BYTES) if device == "cpu" else 0.0
        kept = self.kept * parameters + self.kept_of_bucket * largest_bucket + of_thread
        # The optimizer steps when communication is over.
        stepping = 0.0 if device == "cpu" else self.scratch * parameters
        return kept, kept + max(stepping, exchanged - of_thread)


# Of an element that is compressed.
BYTE = 1 + 8 / 1024


def _chunks(ranks: int, _device: str) -> float:
    """What is sent, what is received, and the sum of the own chunk."""
    return (2 + 1 / ranks) * BYTE


def _differences(ranks: int, device: str) -> float:
    """The difference in float32, on GPUs with that of a neighbour, and then the messages: the own one and those of the
    neighbours."""
    messages = (1 + min(2, ranks - 1)) * BYTE
    return 4 + messages if device == "cpu" else 4 + max(4, messages)


# Of each, with the options of CASES.
STATED = {
    # Gradients lie in the buckets, where they are summed.
    "gradient_allreduce": Stated(sums=True),
    "bytegrad": Stated(exchanged=_chunks),
    # Momenta have buckets of their own, which are sent as those of bytegrad are, and summed during warm-up. On GPUs the
    # step has the square roots of all variances at once.
    "qadam": Stated(kept=4, scratch=4, exchanged=_chunks, sums=True),
    "decentralized": Stated(kept=4, sums=True),
    "decentralized-shift_one": Stated(kept=4, exchanged=lambda _ranks, _device: 4),
    # W, L and R.
    "low_precision_decentralized": Stated(kept=12, exchanged=_differences),
    # A contribution and a difference, and one mean for all buckets.
    "async": Stated(kept=8, kept_of_bucket=4),
}
PLAIN = "plain training"
_MIB = 1 << 20
# What Python's objects, threads, groups of an algorithm's own and the allocator's rounding may add.
_NOISE_BYTES = 4 * _MIB
# gloo's own buffers are in what is measured on a CPU; gradient_allreduce, without scratch, shows how large they are.
GLOO_BYTES = 6 * _MIB
_COPY_BYTES = 4  # of a parameter


# --- on a rank -------------------------------------------------------------------------------------------------------

_is_warm: list[bool] = []


def prepare(_: torch.device) -> None:
    join_bagua()


def measure(device: torch.device, **fields: Any) -> dict[str, Any]:
    """With gradients that stay where they are, and with fresh ones in each step. What this process does once is in no
    figure: its first measurement is repeated."""
    for _ in range(1 if _is_warm else 2):
        in_place, fresh = (_measure(device, set_to_none=set_to_none, **fields) for set_to_none in (False, True))
    _is_warm.append(True)
    return {**in_place, "fresh_peak": fresh["peak"]}


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    # One parameter after the other: an optimizer's temporary copies of all would hide what is to be measured.
    if kind == ADAM:
        return torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    if kind == QADAM:
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        optimizer: torch.optim.Optimizer = QAdamOptimizer(model.parameters(), lr=1e-4, warmup_steps=QADAM_WARMUP_STEPS)
        return optimizer
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=False)


def _measure(
    device: torch.device, variant: str, optimizer: str, layers: int, width: int, steps: int, set_to_none: bool, **_: Any
) -> dict[str, Any]:
    """
    Args:
        optimizer: Of plain training.
        set_to_none: zero_grad's.
    """
    from measure.convergence.training import make_algorithm

    chosen = CASES.get(variant)
    probe = Probe(device)
    sample = torch.ones(1, width, device=device)
    probe.begin()
    torch.manual_seed(0)
    # Much of it is parameters, and next to nothing activations: batches have one sample.
    model: Any = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))
    stepping = _optimizer(optimizer if chosen is None else chosen.optimizer or SGD, model)
    if chosen is not None:
        model.with_bagua([stepping], make_algorithm(variant, stepping, 0))

    def train(count: int) -> None:
        for _ in range(count):
            stepping.zero_grad(set_to_none=set_to_none)
            model(sample).square().mean().backward()
            stepping.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    try:
        train(_SETTLING_STEPS)
        probe.restart()
        train(steps)
        use = probe.use()
        if chosen is not None and chosen.algorithm == "async":
            model.bagua_algorithm.abort(model)
        buckets = [] if chosen is None else [bucket.flattened_tensor().numel() for bucket in model.bagua_buckets]
    finally:
        if chosen is not None:
            model.bagua_ddp.detach()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "kept": use.kept, "peak": use.peak, "largest_bucket": max(buckets, default=0)}


# --- the tool --------------------------------------------------------------------------------------------------------


def beyond(row: Row, name: str) -> int:
    """Bytes beyond what plain training with the same optimizer has; the rank with most."""
    pairs = row.turns.pairs(row.case, row.variant, PLAIN)
    return max(one - other for mine, plain in pairs for one, other in zip(mine[name], plain[name], strict=True))


class Memory(Tool):
    name = "memory"
    title = "Memory of training beyond plain training, {ranks} ranks"
    ranks = (1, 16)
    options = (
        ("algorithms", names_of("algorithm", list(STATED)), tuple(STATED), "which ones"),
        ("layers", within(int, 1, 10_000), 24, "linear layers"),
        ("width", within(int, 1, 65_536), 1024, "of each"),
        ("steps", within(int, 1, 1000), 6, "that are measured"),
    )
    same = ("layers", "width", "steps")
    settings = ALLOCATOR_SETTINGS

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        # What the library that communicates may have in the peak.
        self._allowance = (GLOO_BYTES if given.device == "cpu" else 0) + _NOISE_BYTES

        def of(row: Row, count: float) -> str:
            return f"{count / row.values('parameters')[0]:+.2f}"

        self.columns = (
            Column("algorithm", "", lambda row: row.variant, left=True),
            Column("kept", "B/parameter", lambda row: of(row, beyond(row, "kept"))),
            Column("stated", "B/parameter", lambda row: of(row, self._stated(row)[0])),
            Column("at the peak", "B/parameter", lambda row: of(row, beyond(row, "peak"))),
            Column("stated", "at most", lambda row: of(row, self._stated(row)[1])),
            Column("fresh gradients", "at the peak", lambda row: of(row, beyond(row, "fresh_peak"))),
            Column("largest bucket", "MiB", lambda row: f"{row.values('largest_bucket')[0] * 4 / _MIB:.1f}"),
            Column("", "", self._verdict, left=True),
        )

        self.metrics = (
            ("memory", "MiB", lambda row: [beyond(row, "peak") / _MIB]),
            ("memory_kept", "MiB", lambda row: [beyond(row, "kept") / _MIB]),
            ("memory_kept_stated", "MiB", lambda row: [self._stated(row)[0] / _MIB]),
            ("memory_fresh_gradients", "MiB", lambda row: [beyond(row, "fresh_peak") / _MIB]),
            ("memory_per_parameter", "B", lambda row: [beyond(row, "peak") / row.values("parameters")[0]]),
        )

    def labels(self, row: Row) -> dict[str, Label]:
        parameters = row.values("parameters")[0]
        return {"model": "linear", "algorithm": name_of(row.variant), "parameters": parameters, **self.where}

    def cases(self) -> Plan:
        found: dict[Case, list[str]] = {}
        for name in self.given.algorithms:
            plain = ADAM if CASES[name].optimizer == QADAM else SGD
            found.setdefault(Case(optimizer=plain), [PLAIN]).append(name)
        return found

    def sample(self, events: Sequence[Event]) -> Sample:
        by_rank = {key: [event[key] for event in events] for key in ("kept", "peak", "fresh_peak")}
        return {**{key: events[0][key] for key in ("parameters", "largest_bucket")}, **by_rank}

    def rows(self) -> list[Row]:
        found = self.turns.samples
        return [Row(self.turns, case, name) for case, name in found if name != PLAIN and (case, PLAIN) in found]

    def _stated(self, row: Row) -> tuple[float, float]:
        """Bytes kept, and at the peak."""
        size = row.values("parameters")[0], row.values("largest_bucket")[0]
        return STATED[row.variant].bytes_of(*size, self.given.ranks, self.given.device)

    def is_loud(self, row: Row) -> bool:
        """More than is stated, by more than noise."""
        kept, peak = self._stated(row)
        return beyond(row, "kept") > kept + _NOISE_BYTES or beyond(row, "peak") > peak + self._allowance

    def _verdict(self, row: Row) -> str:
        if self.is_loud(row):
            return "MORE"
        # In a smaller model one more copy of all parameters, the least fault worth finding, would go unseen.
        tells = _COPY_BYTES * row.values("parameters")[0] > self._allowance
        return f"as stated, within {self._allowance / _MIB:g} MiB" if tells else "too small to tell"

    def faults(self, rows: Sequence[Row]) -> list[str]:
        return [f"{row.variant} needs more than is stated" for row in rows if self.is_loud(row)]

    def heading(self) -> str:
        return f"{ranks_text(self.given, self.facts)}; {self.given.layers} layers of float32"


main = Memory.main
