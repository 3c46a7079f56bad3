"""One rank: `python -m measure.convergence.worker`, see measure.ranks.rank_process. All trainings run in this process,
in one process group.

    -> {"op": "train", "task": "digits", "case": "bytegrad", "seed": 1, "steps": null}
    <- {"event": "train", "test_loss": ..., ...}        the fields of training.Trained, alike on all ranks
                                                        but seconds and curve_bytes; and the task's sizes and source
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from measure.convergence.task import Task, build_task
from measure.convergence.training import Training, split_sizes
from measure.ranks.rank_process import run_rank


@functools.cache
def _task(name: str) -> Task:
    return build_task(name)


def _train(device: torch.device, command: Mapping[str, Any]) -> dict[str, Any]:
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    task = _task(command["task"])
    trained = Training(task, command["case"], command["seed"], device, command["steps"]).run()
    # Wrappers hook themselves into the model, and so are cycles.
    gc.collect()
    return {**asdict(trained), **split_sizes(task), "source": task.source}


if __name__ == "__main__":
    run_rank({"train": _train})
