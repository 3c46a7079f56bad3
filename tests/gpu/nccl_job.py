"""A job like a user's, started by torchrun: it never imports bagua. Every rank checks its sums; rank 0 prints one JSON
line. `--again` destroys everything and starts over in the same processes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal

import torch
import torch.distributed as dist


def sums_are_right(elements: int, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    ranks = dist.get_world_size(group)
    position = torch.arange(elements, device=device) % 1009
    values = (position + dist.get_rank(group) * 7).to(torch.float32)
    dist.all_reduce(values, group=group)
    expected = (position * ranks + 7 * ranks * (ranks - 1) // 2).to(torch.float32)
    return bool(torch.equal(values, expected))


def one_life(device: torch.device) -> bool:
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=40), device_id=device)
    right = all(sums_are_right(elements, device) for elements in (1, 1000, 1 << 18, (8 << 20) + 3))
    # A second communicator beside the first, both used in turn.
    second = dist.new_group(list(range(dist.get_world_size())))
    for _ in range(3):
        right &= sums_are_right(70_001, device, second) and sums_are_right(70_001, device)
    verdict = torch.tensor(int(right), device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    everywhere = bool(verdict.item())
    dist.destroy_process_group()
    return everywhere


def main() -> None:
    # The tests' last resort: torchrun puts its workers out of reach of whoever kills it.
    signal.alarm(100)
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus)
    if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        # NCCL refuses a GPU to two ranks of one host.
        os.environ["NCCL_HOSTID"] = f"rank-{local_rank}"
    torch.cuda.set_device(device)
    right = one_life(device)
    if arguments.again:
        # The store of the first life has the same keys.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        right &= one_life(device)
    if os.environ["RANK"] == "0":
        print(json.dumps({"right": right, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}), flush=True)


if __name__ == "__main__":
    main()
