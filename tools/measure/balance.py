"""`measure balance`: what samplers make of samples with a heavy tail of lengths: the work of the slowest rank, and the
time.

Compared: torch's DistributedSampler; batches of similar lengths as the Transformers library makes them
(group_by_length); LoadBalancingDistributedSampler; and its batch sampler, with a batch_fn that sorts indices window by
window.
A step takes as long as its slowest rank. `imbalance` is that rank's tokens over the mean rank's, over an epoch,
computed exactly from the lengths; `padding` is tokens with padding over tokens without. `busiest rank` is the CPU time
of each step's busiest rank, added up over an epoch of training, and `wall` the time that the epoch takes here: where
each rank has a core, they differ by the communication. Samples are `packed` (no padding) or `padded` to the longest of
the batch.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua.net.bench.api import Column, Figure, PairedRatio, Progress, Turns, figures, paired_ratio, render_rows, within
from measure.options import add_length, add_ranks, add_results, check_results, choose_device, parser_of
from measure.ranks.rank_process import join_bagua, run_rank
from measure.ranks.renewed_team import RenewedTeam, keeping
from measure.ranks.team import on_this_host
from measure.report import Report, ranks_text
from measure.results import case_of
from measure.sampler_orders import SAMPLERS, batches_of

FORMS = ("packed", "padded")
_EXACT_EPOCHS = 5
_TIMEOUT_S = 300.0


def lengths_of(samples: int) -> list[int]:
    """Log-normal."""
    spread = torch.randn(samples, generator=torch.Generator().manual_seed(0))
    return [min(2048, max(8, round(64 * math.exp(value)))) for value in spread.tolist()]


def tokens(batch: Sequence[int], lengths: Sequence[int], form: str) -> int:
    found = [lengths[index] for index in batch]
    return sum(found) if form == "packed" else max(found) * len(found)


def exact(name: str, form: str, lengths: Sequence[int], size: int, ranks: int) -> tuple[list[float], list[float]]:
    """(imbalance, padding) of some epochs."""
    imbalance, padding = [], []
    for epoch in range(_EXACT_EPOCHS):
        by_rank = [batches_of(name, lengths, size, ranks, rank, epoch) for rank in range(ranks)]
        steps = [[tokens(batch, lengths, form) for batch in step] for step in zip(*by_rank, strict=True)]
        work = sum(map(sum, steps))
        imbalance.append(ranks * sum(map(max, steps)) / work)
        padding.append(work / sum(tokens(batch, lengths, "packed") for batches in by_rank for batch in batches))
    return imbalance, padding


class Worker:
    """One rank."""

    def __init__(self) -> None:
        self._training: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def formed(self, join: Mapping[str, Any]) -> Mapping[str, Any]:
        facts = join_bagua(join)
        torch.set_num_threads(1)
        return facts

    def epoch(self, _: torch.device, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """The CPU time of each step's busiest rank, and the wall time."""
        width, lengths = command["width"], lengths_of(command["samples"])
        ranks, rank = dist.get_world_size(), dist.get_rank()
        batches = batches_of(command["sampler"], lengths, command["batch_size"], ranks, rank, command["epoch"])
        if self._training is None:
            self._training = _wrapped(width)
        model, optimizer = self._training
        spent = []
        dist.barrier()
        started = time.perf_counter()
        for batch in batches:
            before = time.thread_time()  # that of computing; others communicate
            optimizer.zero_grad()
            model(torch.ones(tokens(batch, lengths, command["form"]), width)).square().mean().backward()
            optimizer.step()
            spent.append(time.thread_time() - before)
        dist.barrier()
        wall = time.perf_counter() - started
        busiest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        return {"busiest_s": float(busiest.sum()), "wall_s": wall}


def _wrapped(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped: Any = model
    wrapped.with_bagua([optimizer], GradientAllReduceAlgorithm())
    return model, optimizer


@dataclass(frozen=True)
class Row:
    sampler: str
    form: str
    imbalance: list[float]
    padding: list[float]
    busiest_s: list[float]
    wall_s: list[float]
    speed_up: PairedRatio  # of the busiest rank, over torch's DistributedSampler


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("sampler", "", lambda row: row.sampler, left=True),
    Column("form", "", lambda row: row.form, left=True),
    Column("imbalance", "x", lambda row: _median(row.imbalance)),
    Column("padding", "x", lambda row: _median(row.padding)),
    Column("busiest rank", "s", lambda row: _median(row.busiest_s)),
    Column("wall", "s", lambda row: _median(row.wall_s)),
    Column("busiest rank", f"{SAMPLERS[0]} / this", lambda row: str(row.speed_up), left=True),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("balance", "The work of each step's busiest rank by sampler, exact and measured, on CPUs.")
    add_ranks(parser)
    for name, most, default, about in (
        ("--samples", 1_000_000, 1024, "of the data set"),
        ("--batch-size", 10_000, 8, "of each rank"),
        ("--width", 10_000, 128, "of the model's layers"),
    ):
        parser.add_argument(name, type=within(int, 1, most), default=default, help=f"{about} (default {default})")
    add_length(parser, rounds=5, time_limit_s=1800.0)
    add_results(parser)
    given = parser.parse_args(words)
    given.device = "cpu"
    choose_device(parser, given)
    check_results(parser, given)
    ranks = RenewedTeam(on_this_host("measure.balance", given, _TIMEOUT_S))
    size = {name: getattr(given, name) for name in ("samples", "batch_size", "width")}

    def measure(form: str, sampler: str, number: int) -> Mapping[str, Any]:
        for epoch in (0, number + 1) if number == 0 else (number + 1,):  # the first warms up
            events = ranks.ask("epoch", _TIMEOUT_S, sampler=sampler, form=form, epoch=epoch, **size)
        return events[0]

    turns: Turns[Mapping[str, Any]] = Turns()
    with Progress(len(FORMS) * len(SAMPLERS) * given.rounds) as progress, keeping(turns, ranks):
        plan = dict.fromkeys(FORMS, SAMPLERS)
        turns.take(plan, given.rounds, measure, time_limit_s=given.time_limit, progress=progress)
    lengths, rows, found = lengths_of(given.samples), [], []
    for sampler in SAMPLERS:
        for form in FORMS:
            pairs = turns.pairs(form, SAMPLERS[0], sampler)
            if not pairs:
                continue
            ratio = paired_ratio([one["busiest_s"] for one, _ in pairs], [one["busiest_s"] for _, one in pairs])
            imbalance, padding = exact(sampler, form, lengths, given.batch_size, given.ranks)
            busiest, wall = ([one[key] for one in turns.of(form, sampler)] for key in ("busiest_s", "wall_s"))
            rows.append(Row(sampler, form, imbalance, padding, busiest, wall, ratio))
            case = case_of(given.ranks, "cpu", None, sampler=sampler, form=form)
            found += figures(case, {("imbalance", "x"): imbalance, ("padding", "x"): padding})
            found += figures(case, {("busiest_cpu_time", "s"): busiest, ("time", "s"): wall})
            found.append(Figure(case, "speedup", "x", ratio.median, ratio.low, ratio.high, ratio.repetitions))
    return Report(
        title=f"Samplers on {given.ranks} ranks, lengths with a heavy tail",
        heading=ranks_text(given, ranks.facts),
        table=render_rows(rows, COLUMNS),
        figures=found,
        notes=turns.notes,
        errors=turns.errors,
        facts=ranks.facts,
        rows=rows,
    ).publish(given)


if __name__ == "__main__":
    worker = Worker()
    sys.exit(run_rank({"epoch": worker.epoch}, worker.formed))
