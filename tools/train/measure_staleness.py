"""Measure asynchronous model averaging: steps per second, how long an average takes, and how stale it is.

    torchrun --nproc-per-node 2 tools/train/measure_staleness.py
    torchrun --nproc-per-node 2 tools/train/measure_staleness.py --model mlp --device cpu --intervals 0 20

For each interval a new replica of the model is trained for --seconds. `alone` is the same training without any
communication, on all ranks at once. Staleness is counted in steps between the copy and the addition of the difference
to the mean; the largest and the mean are those of all ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

from core_comparison.catalogue import MODELS
from core_comparison.models import Workload, build, usual_size
from torchrun_check import device_of_rank, require_torchrun

import bagua.torch_api as bagua
from bagua.net.bench.argument_types import within
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm, Staleness

WARMUP_STEPS = 5
WARMUP_AVERAGES = 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="measure_staleness.py", description="How stale averages are, and what they cost.", allow_abbrev=False
    )
    parser.add_argument("--model", choices=list(MODELS), default="gpt2", help="default gpt2")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA if there is any")
    parser.add_argument(
        "--intervals",
        nargs="+",
        type=within(int, 0, 60_000),
        default=[0, 20, 100, 500],
        metavar="MS",
        help="between averages (default 0 20 100 500)",
    )
    parser.add_argument("--seconds", type=within(int, 1, 600), default=8, help="per interval (default 8)")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(words)
    require_torchrun(parser, parser.prog)
    device = device_of_rank(parser, options.device)
    bagua.init_process_group()
    size = usual_size(options.model, device)
    told = bagua.get_rank() == 0
    if told:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{options.model}, {bagua.get_world_size()} ranks, {name}, torch {torch.__version__}")
        print(f"{'interval ms':>12} {'steps/s':>9} {'averages/s':>11} {'took ms':>8} {'staleness':>10} {'largest':>8}")
    for interval_ms in (None, *options.intervals):
        workload = build(options.model, size, device, seed=1, rank=0)
        row = _measure(workload, device, interval_ms, options.seconds)
        if told:
            print(row, flush=True)
        del workload
    dist.destroy_process_group()
    return 0


def _measure(workload: Workload, device: torch.device, interval_ms: int | None, seconds: float) -> str:
    model, optimizer = workload.model, workload.optimizer
    if interval_ms is not None:
        model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=interval_ms))
    for number in range(WARMUP_STEPS):
        _step(workload, number)
    algorithm = None if interval_ms is None else model.bagua_algorithm
    if algorithm is not None:
        # With the first averages connections are made.
        while algorithm.staleness.count < WARMUP_AVERAGES:
            _step(workload, 0)
            _finish(device)
        algorithm.staleness = Staleness()
    start = time.monotonic()
    steps, took = 0, []
    while time.monotonic() - start < seconds:
        before = algorithm.staleness.count if algorithm is not None else 0
        _step(workload, steps)
        _finish(device)
        steps += 1
        if algorithm is not None and algorithm.staleness.count > before:
            took.append(algorithm.exchange_s)
    elapsed = time.monotonic() - start
    if algorithm is None:
        rate = _sum([steps / elapsed])[0] / bagua.get_world_size()
        return f"{'alone':>12} {rate:9.2f} {'-':>11} {'-':>8} {'-':>10} {'-':>8}"
    staleness = algorithm.staleness
    largest = torch.tensor([staleness.largest])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    rate, count, total, exchange_s, exchanges = _sum(
        [steps / elapsed, staleness.count, staleness.total, sum(took), len(took)]
    )
    ranks = bagua.get_world_size()
    algorithm.abort(model)
    took_ms = 1e3 * exchange_s / max(1, exchanges)
    return (
        f"{interval_ms:>12} {rate / ranks:9.2f} {count / ranks / elapsed:11.2f} {took_ms:8.1f}"
        f" {total / max(1, count):10.2f} {int(largest):8d}"
    )


def _step(workload: Workload, number: int) -> None:
    workload.optimizer.zero_grad()
    workload.loss(workload.model, number).backward()
    workload.optimizer.step()


def _finish(device: torch.device) -> None:
    """Steps count when they are done; the host would run ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sum(values: Sequence[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


if __name__ == "__main__":
    sys.exit(main())
