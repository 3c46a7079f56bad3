"""A rank that trains: bagua.net.bench.rank_process, with what a launcher sets and Bagua reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from bagua.net.bench import api

Formed = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def join_bagua(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """For ranks that train with Bagua, alike in each run."""
    import bagua.torch_api as bagua  # not above: another tool measures torch in processes that Bagua has not touched

    torch.backends.cudnn.deterministic = True
    bagua.init_process_group()
    return {}


def run_rank(operations: Mapping[str, api.Operation], formed: Formed = join_bagua) -> None:
    """The whole of a rank's program; does not return. See api.run_rank."""

    def connected(device: torch.device, join: Mapping[str, Any]) -> Mapping[str, Any]:
        # Opens the connections, which is done by the first collective.
        dist.all_reduce(torch.zeros(1, device=device))
        return formed(join)

    api.run_rank(operations, connected, _set_launch_environment)


def _set_launch_environment(arguments: argparse.Namespace, join: Mapping[str, Any]) -> None:
    rank, ranks, alone = arguments.rank, arguments.ranks, join["alone_on_node"]
    os.environ.update(MASTER_ADDR=join["host"], MASTER_PORT=str(join["port"]), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(arguments.local_rank), LOCAL_WORLD_SIZE=str(1 if alone else ranks))
    os.environ.update(GROUP_RANK=str(rank if alone else 0))
    # Two trainings may not differ in what the search for the fastest kernel happened to find.
    torch.backends.cudnn.benchmark = False
