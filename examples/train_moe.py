"""Train a mixture of experts that is spread over the processes, with checkpoints in the background:

    torchrun --nproc-per-node 2 examples/train_moe.py --checkpoints out
    torchrun --nproc-per-node 4 examples/train_moe.py --checkpoints out --steps 400    # goes on, on more processes

It takes seconds on two CPU cores, and needs no data: tokens of eight kinds have to be transformed, each kind by its own
matrix. Four experts on any number of processes that divides four.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.checkpoint import async_save_checkpoint, load_checkpoint
from bagua.torch_api.model_parallel.moe import MoE

EXPERTS = 4
KINDS = 8
HIDDEN = 16


class Net(nn.Module):
    """One layer of experts with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(HIDDEN, 64), nn.ReLU(), nn.Linear(64, HIDDEN))
        local = EXPERTS // dist.get_world_size()
        self.experts = MoE(HIDDEN, expert, num_local_experts=local, k=2, capacity_factor=1.5)
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, l_aux, exp_counts = self.experts(x)
        return self.last(x + y), l_aux, exp_counts


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of this rank in this step, and what they are to become."""
    world = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(KINDS, HIDDEN, generator=world)
    matrices = torch.randn(KINDS, HIDDEN, HIDDEN, generator=world) / HIDDEN**0.5
    mine = torch.Generator().manual_seed(1 + step * dist.get_world_size() + dist.get_rank())
    kind = torch.randint(KINDS, (128,), generator=mine)
    tokens = centers[kind] + torch.randn(128, HIDDEN, generator=mine)
    targets = torch.einsum("sij,sj->si", matrices[kind], tokens)
    return tokens.to(device), targets.to(device)


def train(steps: int, folder: str | None, device: torch.device, save_every: int = 50) -> float:
    """From the latest checkpoint in `folder`, or from the beginning, to this step. Returns this rank's last loss."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    done = load_checkpoint(folder, model, optimizer) if folder else 0
    pending = None
    loss = torch.zeros(())
    for step in range(done + 1, steps + 1):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # of what the gate draws
        tokens, targets = batch(step, device)
        optimizer.zero_grad()
        output, l_aux, exp_counts = model(tokens)
        loss = functional.mse_loss(output, targets)
        (loss + 0.01 * l_aux).backward()
        optimizer.step()
        if step % save_every == 0 or step == steps:
            if folder:
                pending = async_save_checkpoint(step, folder, model, optimizer, keep_last=2)
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}  tokens by expert {exp_counts.tolist()}", flush=True)
    if pending is not None:
        pending.wait()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts, with checkpoints.")
    parser.add_argument("--steps", type=int, default=200, help="to which it trains (default 200)")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="where it saves, and goes on from")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_moe.py")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    bagua.init_process_group()
    if EXPERTS % dist.get_world_size() != 0:
        parser.error(f"{EXPERTS} experts cannot be divided among {dist.get_world_size()} processes")
    train(given.steps, given.checkpoints, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
