"""Keep a model of every contender in the same processes, train them in short turns in random order, and compare.

Tells differences of a percent, where processors whose speed changes from second to second hide them from longer turns.
Contenders share caches and memory with each other: how much memory each takes, compare_core.py tells.

    torchrun --nproc-per-node 2 tools/train/compare_side_by_side.py
    torchrun --nproc-per-node 2 tools/train/compare_side_by_side.py --model mlp --contenders torch-ddp,with-bagua@50

A number after @ is the size of the buckets in MiB. The network is that of the environment (ENABLE_BAGUA_NET=1,
NCCL_P2P_DISABLE=1, ...).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

from aligned_table import Column, render
from core_comparison.catalogue import CONTENDERS, DEFAULT_CONTENDERS, MODELS
from core_comparison.contenders import prepare, wrap
from core_comparison.models import build, usual_size
from torchrun_check import device_of_rank, require_torchrun

from bagua.net.bench.argument_types import within

_WARMUP = 8  # steps of each contender, after it was made


@dataclass(frozen=True)
class Contender:
    """As it was asked for: with the size of its buckets, or with its default."""

    text: str
    name: str
    bucket_mib: int | None


@dataclass(frozen=True)
class Row:
    contender: str
    step_ms: float  # median
    gain: float  # mean of the first contender's time over this one's, within a round
    error: float  # standard error of the gain
    rounds: int


class Entrant:
    """A contender's model, kept between its turns."""

    def __init__(self, contender: Contender, model: str, device: torch.device) -> None:
        self._device = device
        self._workload = build(model, usual_size(model, device), device, seed=1, rank=dist.get_rank())
        self._training = wrap(
            contender.name,
            self._workload.model,
            self._workload.optimizer,
            device,
            warmup=_WARMUP,
            bucket_mib=contender.bucket_mib,
        )
        self._steps = 0
        self._train(_WARMUP)

    def turn(self, steps: int) -> float:
        """Seconds a step, of the slowest rank."""
        self._train(1)  # what the turn before has put into the caches goes, and the ranks meet
        self._wait()
        began = time.perf_counter()
        self._train(steps)
        self._wait()
        seconds = torch.tensor([(time.perf_counter() - began) / steps], device=self._device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def finish(self) -> None:
        """End what communicates by itself. On all ranks."""
        self._training.finish()

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._training.optimizer.zero_grad(set_to_none=True)
            self._workload.loss(self._training.forward, self._steps).backward()
            self._training.optimizer.step()
            self._steps += 1

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def compare(
    contenders: Sequence[Contender], model: str, device: torch.device, *, seconds: float, builds: int, steps: int
) -> list[list[float]]:
    """Rounds of seconds a step, in the order of `contenders`. Models are made anew `builds` times, each time in another
    order: where they lie in memory counts, too."""
    rounds: list[list[float]] = []
    for _ in range(builds):
        entrants: dict[Contender, Entrant] = {}
        for contender in _agreed(random.sample(contenders, len(contenders))):
            entrants[contender] = Entrant(contender, model, device)
        end = time.monotonic() + seconds / builds
        while _agreed(time.monotonic() < end):
            order = _agreed(random.sample(contenders, len(contenders)))
            times = {contender: entrants[contender].turn(steps) for contender in order}
            rounds.append([times[contender] for contender in contenders])
        for entrant in entrants.values():
            entrant.finish()
        entrants.clear()
        gc.collect()  # wrappers hook themselves into the model, and so are cycles
    return rounds


def rows_of(contenders: Sequence[str], rounds: Sequence[Sequence[float]]) -> list[Row]:
    """A row for each contender."""
    rows = []
    for place, contender in enumerate(contenders):
        gains = [one[0] / one[place] for one in rounds]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        step_ms = statistics.median(one[place] for one in rounds) * 1e3
        rows.append(Row(contender, step_ms, statistics.fmean(gains), error, len(rounds)))
    return rows


def _agreed(value: Any) -> Any:
    """What rank 0 says."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _contender(text: str) -> Contender:
    name, at, mib = text.partition("@")
    if name not in CONTENDERS:
        raise argparse.ArgumentTypeError(f"unknown contender {name!r}; choose of {', '.join(CONTENDERS)}")
    if at and not (mib.isdecimal() and int(mib)):
        raise argparse.ArgumentTypeError(f"{text!r}: after @ stands a number of MiB, 1 or more")
    return Contender(text, name, int(mib) if mib else None)


def _contenders(text: str) -> list[Contender]:
    found = [_contender(word) for word in text.split(",")]
    if len(set(found)) < len(found) or len(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: name two contenders or more, each once")
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Keep a model of every contender in the same processes, train them in short turns in random order,"
        " and compare."
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt2", help="that all train (default gpt2)")
    parser.add_argument(
        "--contenders",
        type=_contenders,
        default=_contenders(",".join(DEFAULT_CONTENDERS)),
        metavar="NAME[@MiB],...",
        help=f"the first is what the others are compared with; of {', '.join(CONTENDERS)}"
        f" (default {','.join(DEFAULT_CONTENDERS)})",
    )
    parser.add_argument("--seconds", type=within(int, 1, 3600), default=60, help="of turns in all (default 60)")
    parser.add_argument("--steps", type=within(int, 1, 1000), default=6, help="of a turn (default 6)")
    parser.add_argument("--builds", type=within(int, 1, 100), default=3, help="of all models anew (default 3)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default auto)")
    given = parser.parse_args(words)
    require_torchrun(parser, "compare_side_by_side.py")
    device = device_of_rank(parser, given.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if unavailable := prepare([one.name for one in given.contenders]):
        parser.error("; ".join(f"{name}: {reason}" for name, reason in unavailable.items()))
    rounds = compare(
        given.contenders, given.model, device, seconds=given.seconds, builds=given.builds, steps=given.steps
    )
    if dist.get_rank() == 0:
        rows = rows_of([one.text for one in given.contenders], rounds)
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{given.model}, {dist.get_world_size()} ranks, {what}, {rows[0].rounds} rounds of {given.steps} steps")
        print(render(rows, _COLUMNS, block=lambda _: None, is_loud=lambda row: row.gain + 2 * row.error < 1))
    dist.destroy_process_group()


_COLUMNS: tuple[Column[Row], ...] = (
    Column("contender", "", lambda row: row.contender, left=True),
    Column("step", "ms", lambda row: f"{row.step_ms:.2f}"),
    Column("gain", "x", lambda row: f"{row.gain:.3f}"),
    Column("+-", "x", lambda row: f"{row.error:.3f}"),
)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Not by returning: torch 2.13's gloo can deadlock with Python's lock when the interpreter ends.
    os._exit(0)
