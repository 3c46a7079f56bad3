"""One rank of a job that a launcher has started, on hosts with a network between them, emulated or not. Trains each
algorithm once, and rank 0 prints how long that took:

    PYTHONPATH=tools python -m tools.netlab run --rate 100M -- \\
        python -m measure.convergence.one_rank text-small gradient_allreduce,diloco-started-100
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import bagua.torch_api as bagua
from measure.convergence.catalogue import CASES, TASKS
from measure.convergence.tasks import build_task
from measure.convergence.training import Trained, Training

_SEED = 1


def line_of(case: str, trained: Trained) -> str:
    """The step is that of the algorithm itself, after a start with gradient all-reduce."""
    own_steps = trained.steps - round(CASES[case].start_share * trained.steps)
    step_ms = 1e3 * (trained.seconds - trained.start_seconds) / own_steps
    return (
        f"{case:<34} {trained.steps} steps in {trained.seconds:.1f} s, {step_ms:.1f} ms a step"
        f"{' after the start' if trained.start_seconds else ''}; test loss {trained.test_loss:.4f},"
        f" {trained.curve_bytes[-1] / 1e6:.1f} MB sent"
    )


def main(words: Sequence[str]) -> int:
    if len(words) not in (2, 3) or words[0] not in TASKS or not set(words[1].split(",")) <= set(CASES):
        print(
            "usage: one_rank TASK ALGORITHM,ALGORITHM,... [STEPS]; names as of `measure convergence`", file=sys.stderr
        )
        return 2
    torch.set_num_threads(1)
    bagua.init_process_group()
    task, steps = build_task(words[0]), int(words[2]) if words[2:] else None
    for case in words[1].split(","):
        trained = Training(task, case, _SEED, torch.device("cpu"), steps).run()
        if bagua.get_rank() == 0:
            print(line_of(case, trained), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
