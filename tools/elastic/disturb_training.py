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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from disturbed_job import DisturbedJob, Outcome

ALGORITHMS = ("gradient_allreduce", "bytegrad", "qadam", "decentralized", "low_precision_decentralized")


def one_run(options: argparse.Namespace, algorithm: str, training_seed: int, seed: int, disturbances: int) -> Outcome:
    arguments = [f"--algorithm={algorithm}", f"--steps={options.steps}", f"--seed={training_seed}"]
    with tempfile.TemporaryDirectory() as folder:
        return DisturbedJob(Path(folder), seed, arguments, disturbances, options.timeout, options.device).run()


def compare(options: argparse.Namespace, workers: ThreadPoolExecutor) -> bool:
    """Whether all runs ended with a loss such as that of undisturbed ones."""
    algorithms = options.algorithms.split(",")
    seeds = range(1, options.training_seeds + 1)
    plain = {
        (algorithm, seed): workers.submit(one_run, options, algorithm, seed, 0, 0)
        for algorithm in algorithms
        for seed in seeds
    }
    ranges: dict[str, tuple[float, float]] = {}
    for algorithm in algorithms:
        losses = [plain[algorithm, seed].result().loss for seed in seeds]
        ranges[algorithm] = min(losses), max(losses)
        print(f"undisturbed {algorithm}: loss {min(losses):.6f} to {max(losses):.6f}", flush=True)

    runs = range(options.first, options.first + options.runs)
    cases = [(algorithms[(run - 1) % len(algorithms)], seeds[(run - 1) % len(seeds)], run) for run in runs]
    futures = {workers.submit(one_run, options, *case, options.disturbances): case for case in cases}
    wrong = 0
    changes = []
    for future in as_completed(futures):
        algorithm, training_seed, seed = futures[future]
        try:
            outcome = future.result()
        except TimeoutError as error:
            wrong += 1
            print(f"run {seed} {algorithm}: {error}", flush=True)
            continue
        low, high = ranges[algorithm]
        change = outcome.loss / plain[algorithm, training_seed].result().loss - 1
        changes.append(abs(change))
        is_within = low - (high - low) <= outcome.loss <= high + (high - low)
        wrong += not is_within
        print(
            f"run {seed} {algorithm}: loss {outcome.loss:.6f} ({change:+.2%}){'' if is_within else ' OUTSIDE'},"
            f" ranks {outcome.sizes}, {', '.join(outcome.events)}",
            flush=True,
        )
    if changes:
        print(f"change of the loss: median {statistics.median(changes):.2%}, largest {max(changes):.2%}")
    print(f"{options.runs - wrong} of {options.runs} runs ended as undisturbed ones do")
    return wrong == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--disturbances", type=int, default=3, help="per run (default: %(default)s)")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="by turns (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--training-seeds", type=int, default=3, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="seed of the first run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=240, help="seconds per run (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.algorithms.split(",")) - set(ALGORITHMS))
    if unknown:
        parser.error(f"--algorithms names {unknown}; the example has {', '.join(ALGORITHMS)}")
    if min(options.runs, options.training_seeds, options.jobs) < 1:
        parser.error("--runs, --training-seeds and --jobs must be at least 1")
    with ThreadPoolExecutor(options.jobs) as workers:
        return 0 if compare(options, workers) else 1


if __name__ == "__main__":
    sys.exit(main())
