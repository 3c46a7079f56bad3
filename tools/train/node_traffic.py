"""How many bytes of gradients leave each node, with and without a hierarchy. Run it under torchrun on nodes of which
each has network interfaces of its own: real ones, or the namespaces of tools/netlab (docs/benchmarks.md has the
command). It counts what the interfaces sent, so nothing else may use them.

    torchrun --nnodes 2 --nproc-per-node 2 --node-rank K --master-addr HOST tools/train/node_traffic.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

from torchrun_check import device_of_rank, require_torchrun

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

_MIB = 1 << 20


def sent_bytes() -> int:
    """By all interfaces of this node but loopback, frames included."""
    return sum(
        int((interface / "statistics" / "tx_bytes").read_text())
        for interface in Path("/sys/class/net").iterdir()
        if interface.name != "lo"
    )


def bytes_of_steps(hierarchical: bool, layers: int, steps: int, device: torch.device) -> tuple[float, float, float]:
    """(MiB that this node sent per step, MiB of gradients, a number that depends on every parameter)."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm(hierarchical=hierarchical))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 1024, generator=generator).to(device)).square().mean().backward()
        optimizer.step()

    step()  # connects
    bagua.barrier()
    began = sent_bytes()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    bagua.barrier()
    sent = sent_bytes() - began
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    fingerprint = sum(parameter.double().sum().item() for parameter in model.parameters())
    return sent / steps / _MIB, gradients / _MIB, fingerprint


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="How many bytes of gradients leave each node, with and without a hierarchy."
    )
    parser.add_argument("--layers", type=int, default=16, help="of 4 MiB each (default 16)")
    parser.add_argument("--steps", type=int, default=5, help="that are counted (default 5)")
    arguments = parser.parse_args(words)
    require_torchrun(parser, "node_traffic.py")
    device = device_of_rank(parser, "auto")
    bagua.init_process_group()
    rows = []
    for hierarchical in (False, True):
        mine = bytes_of_steps(hierarchical, arguments.layers, arguments.steps, device)
        everyone: list[tuple[float, float, float]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        rows.append((hierarchical, everyone))
    if dist.get_rank() == 0:
        per_node = bagua.get_local_size()
        print(f"{dist.get_world_size()} ranks, {per_node} per node, {dist.get_backend()}, {arguments.steps} steps")
        print(f"{'':14}  gradients     sent by each node, MiB a step")
        for hierarchical, everyone in rows:
            sent = "  ".join(f"{row[0]:8.1f}" for row in everyone[::per_node])
            name = "hierarchical" if hierarchical else "flat"
            print(f"{name:14} {everyone[0][1]:6.1f} MiB   {sent}")
        agree = all(len({row[2] for row in everyone}) == 1 for _, everyone in rows)
        print(f"replicas {'agree' if agree else 'DIFFER'}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    # Not by returning: torch 2.13's gloo can deadlock with Python's lock when the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
