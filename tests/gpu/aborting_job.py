"""A job that aborts its communicator in the middle of an all-reduce and builds another, again and again. Every rank
says in one JSON line what an abort took and what the process held early and at the end."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

# What CUDA, NCCL and torch keep after their first uses is no growth.
EARLY = 10


def held() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
        "resident_kib": int(status["VmRSS"].split()[0]),
    }


def abort_once(store: dist.Store, rank: int, ranks: int, device: torch.device, late: int) -> tuple[bool, float]:
    """Whether the sums were right, and what the abort took in s. Rank `late` never joins the operation aborted."""
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=limit, device_id=device)
    values = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    right = bool((values == ranks * (ranks + 1) / 2).all())
    if rank != late:
        dist.all_reduce(torch.ones(16 << 20, device=device))
    store.set(f"entered-{rank}", "")
    store.wait([f"entered-{peer}" for peer in range(ranks)], limit)
    began = time.monotonic()
    _abort_process_group()
    return right, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=int)
    times = parser.parse_args().times
    signal.alarm(270)
    rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    store = dist.TCPStore(host, port, ranks, is_master=rank == 0)
    right, took = True, []
    for time_ in range(times):
        # Who is late takes turns; in every third turn the operation moves.
        late = time_ % 3 if time_ % 3 < ranks else -1
        sums, seconds = abort_once(dist.PrefixStore(f"life-{time_}", store), rank, ranks, device, late)
        right &= sums
        took.append(seconds)
        if time_ + 1 == EARLY:
            early = held()
    print(json.dumps({"rank": rank, "right": right, "longest_s": max(took), "early": early, "end": held()}), flush=True)
    store.set(f"done-{rank}", "")
    store.wait([f"done-{peer}" for peer in range(ranks)], datetime.timedelta(seconds=60))


if __name__ == "__main__":
    main()
