"""Measure what samplers make of samples with a heavy tail of lengths: the work of the slowest rank, and the time.

    torchrun --nproc-per-node 4 tools/train/measure_load_balance.py --json balance.json

Compared: torch's DistributedSampler; batches of similar lengths as the Transformers library makes them
(group_by_length); LoadBalancingDistributedSampler; and its batch sampler, with a batch_fn that sorts indices window by
window.
A step takes as long as its slowest rank. `imbalance` is that rank's tokens over the mean rank's, over an epoch,
computed exactly from the lengths; `padding` is tokens with padding over tokens without. `busiest rank` is the CPU time
of each step's busiest rank, added up over an epoch of training, and `wall` the time that the epoch takes here: where
each rank has a core, they differ by the communication. Samples are `packed` (no padding) or `padded` to the longest of
the batch; the samplers take turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

import figures
from sampler_orders import SAMPLERS, batches_of

import bagua.torch_api as bagua
from bagua.net.bench.argument_types import within
from bagua.net.bench.export import check_writable
from bagua.net.bench.figures import figures as figures_of
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.result_file import Figure
from bagua.net.bench.verdict import paired_ratio
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def tokens(batch: Sequence[int], lengths: Sequence[int], form: str) -> int:
    found = [lengths[index] for index in batch]
    return sum(found) if form == "packed" else max(found) * len(found)


def exact_figures(name: str, lengths: Sequence[int], size: int, ranks: int) -> dict[tuple[str, str], list[float]]:
    """(metric, form) by epoch."""
    found: dict[tuple[str, str], list[float]] = {}
    for epoch in range(5):
        by_rank = [batches_of(name, lengths, size, ranks, rank, epoch) for rank in range(ranks)]
        for form in ("packed", "padded"):
            steps = [[tokens(batch, lengths, form) for batch in step] for step in zip(*by_rank, strict=True)]
            work = sum(map(sum, steps))
            found.setdefault(("imbalance", form), []).append(ranks * sum(map(max, steps)) / work)
            plain = sum(tokens(batch, lengths, "packed") for batches in by_rank for batch in batches)
            found.setdefault(("padding", form), []).append(work / plain)
    return found


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sequence[int], width: int
) -> tuple[float, float]:
    """(CPU time of each step's busiest rank, wall time), in seconds."""
    spent = []
    dist.barrier()
    started = time.perf_counter()
    for size in sizes:
        before = time.thread_time()  # that of computing; others communicate
        optimizer.zero_grad()
        model(torch.ones(size, width)).square().mean().backward()
        optimizer.step()
        spent.append(time.thread_time() - before)
    dist.barrier()
    wall = time.perf_counter() - started
    busiest = torch.tensor(spent, dtype=torch.float64)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    return float(busiest.sum()), wall


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="measure_load_balance.py",
        description="The work of each step's busiest rank by sampler, exact and measured; start it with torchrun.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--samples", type=within(int, 1, 1_000_000), default=1024, help="of the data set (default 1024)"
    )
    parser.add_argument("--batch-size", type=within(int, 1, 10_000), default=8, help="of each rank (default 8)")
    parser.add_argument("--width", type=within(int, 1, 10_000), default=128, help="of the model's layers (default 128)")
    parser.add_argument("--repetitions", type=within(int, 1, 1000), default=5, help="epochs, and one first (default 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="result file")
    given = parser.parse_args()
    if given.json:
        try:
            check_writable("--json", given.json)
        except ValueError as error:
            parser.error(str(error))
    torch.set_num_threads(1)
    bagua.init_process_group()
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(given.samples, generator=generator)
    lengths = [min(2048, max(8, round(64 * math.exp(value)))) for value in spread.tolist()]  # log-normal
    model = nn.Sequential(nn.Linear(given.width, 4 * given.width), nn.ReLU(), nn.Linear(4 * given.width, given.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for repetition in range(given.repetitions + 1):
        for form in ("packed", "padded"):
            for turn in range(len(SAMPLERS)):
                name = SAMPLERS[(turn + repetition) % len(SAMPLERS)]
                batches = batches_of(name, lengths, given.batch_size, ranks, rank, repetition)
                sizes = [tokens(batch, lengths, form) for batch in batches]
                times = train_epoch(model, optimizer, sizes, given.width)
                if repetition:  # the first warms up
                    taken.setdefault((name, form), []).append(times)
    if rank:
        return
    found: list[Figure] = []
    row = "{:24}{:8}{:>10}{:>9}{:>14}{:>9}  {}".format
    print(row("sampler", "form", "imbalance", "padding", "busiest rank", "wall", "busiest: distributed / this"))
    for name in SAMPLERS:
        exact = exact_figures(name, lengths, given.batch_size, ranks)
        for form in ("packed", "padded"):
            case = {"sampler": name, "form": form, "ranks": ranks, "gpus": 0}
            busiest, wall = ([pair[which] for pair in taken[name, form]] for which in (0, 1))
            ratio = paired_ratio([pair[0] for pair in taken["distributed", form]], busiest)
            values: dict[tuple[str, str], Sequence[float | None]] = {
                ("imbalance", "x"): exact["imbalance", form],
                ("padding", "x"): exact["padding", form],
                ("busiest_cpu_time", "s"): busiest,
                ("time", "s"): wall,
            }
            found += [
                *figures_of(case, values),
                Figure(case, "speedup", "x", ratio.median, ratio.low, ratio.high, ratio.repetitions),
            ]
            print(row(name, form, *(f"{statistics.median(one):.2f}" for one in values.values()), str(ratio)))
    if given.json:
        figures.write(
            given.json,
            f"Samplers on {ranks} ranks, lengths with a heavy tail",
            found,
            machine=describe_machine(),
            ranks={"torch": torch.__version__, "device": "cpu"},
            parameters=vars(given),
        )


if __name__ == "__main__":
    main()
