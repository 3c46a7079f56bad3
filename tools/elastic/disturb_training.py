#!/usr/bin/env python3
"""Runs examples/train_elastic.py many times on two nodes of this machine that fail, leave and come back at random
moments, and compares the final losses with those of undisturbed runs:

    PYTHONSAFEPATH=1 .venv/bin/python tools/elastic/disturb_training.py --runs 50

With --device cuda, both nodes share the first GPU, and their NCCL talks through Bagua-Net over loopback.

The exit status is 1 if a run did not end, or if its loss is outside of the range of the undisturbed ones, widened by
its own size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from disturbed_job import DisturbedJob, Outcome

ALGORITHMS = ("gradient_allreduce", "bytegrad", "qadam", "decentralized", "low_precision_decentralized")
_DISTURBANCES = 3


def one_run(given: argparse.Namespace, algorithm: str, training_seed: int, seed: int, disturbances: int) -> Outcome:
    arguments = [f"--algorithm={algorithm}", f"--steps={given.steps}", f"--seed={training_seed}"]
    with tempfile.TemporaryDirectory() as folder:
        return DisturbedJob(Path(folder), seed, arguments, disturbances, device=given.device).run()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="by turns with each algorithm (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--training-seeds", type=int, default=3, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    given = parser.parse_args(words)
    if min(given.runs, given.training_seeds) < 1:
        parser.error("--runs and --training-seeds must be at least 1")
    seeds = range(1, given.training_seeds + 1)
    plain: dict[str, list[float]] = {}
    for algorithm in ALGORITHMS:
        losses = plain[algorithm] = [one_run(given, algorithm, seed, 0, 0).loss for seed in seeds]
        print(f"undisturbed {algorithm}: loss {min(losses):.6f} to {max(losses):.6f}", flush=True)
    wrong, changes = 0, []
    for run in range(given.runs):
        algorithm, place = ALGORITHMS[run % len(ALGORITHMS)], run % len(seeds)
        try:
            outcome = one_run(given, algorithm, seeds[place], run + 1, _DISTURBANCES)
        except TimeoutError as error:
            wrong += 1
            print(f"run {run + 1} {algorithm}: {error}", flush=True)
            continue
        low, high = min(plain[algorithm]), max(plain[algorithm])
        change = outcome.loss / plain[algorithm][place] - 1
        changes.append(abs(change))
        is_within = low - (high - low) <= outcome.loss <= high + (high - low)
        wrong += not is_within
        print(
            f"run {run + 1} {algorithm}: loss {outcome.loss:.6f} ({change:+.2%}){'' if is_within else ' OUTSIDE'},"
            f" ranks {outcome.sizes}, {', '.join(outcome.events)}",
            flush=True,
        )
    if changes:
        print(f"change of the loss: median {statistics.median(changes):.2%}, largest {max(changes):.2%}")
    print(f"{given.runs - wrong} of {given.runs} runs ended as undisturbed ones do")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
