"""Train on nodes that leave and join: save often, and continue from the last checkpoint with the ranks that are there.

    python -m bagua.distributed.run --nnodes 1:2 --max-restarts 100 --rdzv-backend c10d --rdzv-id job1 \
        --rdzv-endpoint localhost:29500 examples/train_elastic.py checkpoints

Run the command in two terminals; end one of them, and start it again. It takes seconds and needs neither GPU nor data.
See docs/how-to/train/train-elastically.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.communication import broadcast_object

BATCH = 48  # of all ranks together, so that the learning rate suits any number of ranks
# Their ranks have weights of their own.
DECENTRALIZED = ("decentralized", "low_precision_decentralized")
ALGORITHMS = ("gradient_allreduce", "bytegrad", "qadam", *DECENTRALIZED)


def samples() -> tuple[Tensor, Tensor]:
    """Those of a random network, with noise; the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, 16, generator=generator)
    hidden = torch.tanh(inputs @ torch.randn(16, 8, generator=generator) / 4)
    targets = hidden @ torch.randn(8, 1, generator=generator)
    return inputs, targets + 0.1 * torch.randn(2048, 1, generator=generator)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, algorithm: str) -> None:
    options: dict[str, Any] = {"q_adam_optimizer": optimizer} if algorithm == "qadam" else {}
    model.with_bagua([optimizer], Algorithm.init(algorithm, **options))


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One file per rank. The checkpoint counts once all are written: then `latest.json` names it."""
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "bagua": model.bagua_ddp.state_dict(),
    }
    new = folder / f"rank-{rank}.new"
    torch.save(state, new)
    new.replace(folder / f"step-{step}-rank-{rank}-of-{ranks}.pt")
    bagua.barrier()
    if rank == 0:
        new = folder / "latest.new"
        new.write_text(json.dumps({"step": step, "ranks": ranks}))
        new.replace(folder / "latest.json")
        for file in folder.glob("step-*.pt"):
            if not file.name.startswith(f"step-{step}-"):
                file.unlink()


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, algorithm: str) -> int:
    """Wraps the model, and loads the last checkpoint if there is one. Returns the number of steps made."""
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    device = next(model.parameters()).device
    latest = None
    if rank == 0 and (folder / "latest.json").exists():
        latest = json.loads((folder / "latest.json").read_text())
    latest = broadcast_object(latest)  # all ranks load the same
    if latest is None:
        wrap(model, optimizer, algorithm)
        return 0
    parts = [folder / f"step-{latest['step']}-rank-{one}-of-{latest['ranks']}.pt" for one in range(latest["ranks"])]
    if latest["ranks"] == ranks:
        # Each rank has its own state again. After wrapping, which broadcasts rank 0's.
        state = torch.load(parts[rank], device, weights_only=True)
        wrap(model, optimizer, algorithm)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        model.bagua_ddp.load_state_dict(state["bagua"])
    else:
        # Other ranks than before start from the mean.
        states = [torch.load(part, device, weights_only=True) for part in parts]
        models = [state["model"] for state in states]
        model.load_state_dict({name: sum(one[name] for one in models) / len(models) for name in models[0]})
        optimizer.load_state_dict(states[0]["optimizer"])
        wrap(model, optimizer, algorithm)
        if algorithm not in DECENTRALIZED:  # whose state is that of a rank and its neighbors
            model.bagua_ddp.load_state_dict(states[0]["bagua"])
    return int(latest["step"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on nodes that leave and join.")
    parser.add_argument("folder", type=Path, help="of the checkpoints; all nodes must share it")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="gradient_allreduce", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", bagua.get_local_rank())
        torch.cuda.set_device(device)
    bagua.init_process_group(timeout=60)
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    if arguments.algorithm == "qadam":
        optimizer: torch.optim.Optimizer = QAdamOptimizer(model.parameters(), lr=0.002, warmup_steps=100)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    begin = resume(arguments.folder, model, optimizer, arguments.algorithm)
    if rank == 0:
        print(f"step {begin}: {ranks} ranks", flush=True)

    inputs, targets = (part.to(device) for part in samples())
    for step in range(begin + 1, arguments.steps + 1):
        # The batch depends on the step alone: no rank trains on samples twice, or leaves some out, after a restart.
        generator = torch.Generator().manual_seed(1_000_000 * arguments.seed + step)
        batch = torch.randint(len(inputs), (BATCH,), generator=generator)[rank::ranks].to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        if step % arguments.save_every == 0 or step == arguments.steps:
            save(arguments.folder, step, model, optimizer)

    # The mean of all ranks, which differ with decentralized algorithms.
    for parameter in model.state_dict().values():
        bagua.allreduce_inplace(parameter, op=bagua.ReduceOp.AVG)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs), targets)
    if rank == 0:
        print(f"step {arguments.steps}: loss {loss:.6f}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # some versions of torch with gloo abort while Python shuts down


if __name__ == "__main__":
    main()
