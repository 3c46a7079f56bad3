"""What ranks tell each other over several groups, such as those of shards and of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def all_gather_across_groups(
    groups: Iterable[dist.ProcessGroup], told: Any, device: torch.device | None
) -> dict[int, Any]:
    """What each rank tells, by its rank in the job. Check the result only after the last
    group's all-gather: otherwise a rank that raises leaves others waiting.

    Args:
        groups: this rank's, in the same order on all ranks; together they connect all that have to agree.
        told: what this rank tells; pickled.
        device: of the model that it is about: a GPU carries what a group of NCCL alone cannot carry on the CPU.
    """
    known: dict[int, Any] = {dist.get_rank(): told}
    is_on_gpu = device is not None and device.type == "cuda"
    # torch carries objects on the current GPU.
    with torch.cuda.device(device) if is_on_gpu else contextlib.nullcontext():
        for group in groups:
            of_all: list[Any] = [None] * group.size()
            dist.all_gather_object(of_all, known, group=group)
            known = {rank: theirs for one in of_all for rank, theirs in one.items()}
    return known
