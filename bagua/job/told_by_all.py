"""What ranks tell each other over several groups, such as those of shards and of replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


def told_by_all(groups: Iterable[dist.ProcessGroup], told: Any) -> dict[int, Any]:
    """What each rank tells, by its rank in the job. Whoever judges it does so once all groups have heard it, so that no
    rank waits in one of them for a rank that has raised.

    Args:
        groups: this rank's, in the same order on all ranks; together they connect all that have to agree.
        told: what this rank tells; pickled.
    """
    known: dict[int, Any] = {dist.get_rank(): told}
    for group in groups:
        of_all: list[Any] = [None] * group.size()
        dist.all_gather_object(of_all, known, group=group)
        known = {rank: theirs for one in of_all for rank, theirs in one.items()}
    return known
