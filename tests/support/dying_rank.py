"""A job of which one rank dies, for use inside a rank (support.ranks)."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import device_for

import bagua.torch_api as bagua
from bagua.job import failure_report
from bagua.job.torch_internals import default_store

# Of collectives: a rank that has no connection to the one that died notices so, for the others stay until all are done.
TIMEOUT = datetime.timedelta(seconds=6)
ROLL_CALL_S = 3.0
VICTIM = 1


def begin_to_lose_one() -> tuple[int, torch.device]:
    """Joins a job in which nobody waits for long: (rank, device)."""
    rank = int(os.environ["RANK"])
    device = device_for(rank)
    dist.init_process_group(timeout=TIMEOUT)
    bagua.init_process_group()
    # No collective: whoever is done with it first might die while others are not.
    store = default_store()
    store.set(f"joined {rank}", b"")
    store.wait([f"joined {other}" for other in range(dist.get_world_size())])
    failure_report.ROLL_CALL_S = ROLL_CALL_S
    return rank, device


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
