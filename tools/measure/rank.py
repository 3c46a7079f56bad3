"""One rank: `python -m measure.rank`, a program of bagua.net.bench with what a launcher sets and what Bagua
reads. It calls functions of a tool's module, in its main thread, one at a time.

    -> {"op": "join", ..., "tool": "measure.moe", "options": {"hidden": 512}}
    <- {"event": "ready", ...}         with what the module's `prepare(device, **options)` returns, if it has one
    -> {"op": "call", "function": "measure", "fields": {"variant": "dense"}}
    <- {"event": "call", ...}                   what `measure(device, variant="dense")` returns
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from bagua.net.bench.api import run_rank

_tool: Any = None


def _formed(device: torch.device, join: Mapping[str, Any]) -> Mapping[str, Any]:
    global _tool
    # Opens the connections, which is done by the first collective.
    dist.all_reduce(torch.zeros(1, device=device))
    _tool = importlib.import_module(join["tool"])
    prepare = getattr(_tool, "prepare", None)
    return {} if prepare is None else prepare(device, **join["options"]) or {}


def _call(device: torch.device, command: Mapping[str, Any]) -> Mapping[str, Any]:
    return getattr(_tool, command["function"])(device, **command["fields"]) or {}


def _set_launch_environment(arguments: argparse.Namespace, join: Mapping[str, Any]) -> None:
    rank, ranks = arguments.rank, arguments.ranks
    node, local_rank = divmod(rank, join["local_ranks"])
    os.environ.update(MASTER_ADDR=join["host"], MASTER_PORT=str(join["port"]), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(join["local_ranks"]), GROUP_RANK=str(node))
    # Two trainings may not differ in what the search for the fastest kernel happened to find.
    torch.backends.cudnn.benchmark = False


def join_bagua() -> None:
    """For `prepare` of tools that train with Bagua, alike in each run."""
    import bagua.torch_api as bagua  # not above: other tools measure torch in processes that Bagua has not touched

    torch.backends.cudnn.deterministic = True
    bagua.init_process_group()


if __name__ == "__main__":
    run_rank({"call": _call}, _formed, _set_launch_environment)
