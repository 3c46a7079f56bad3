"""DeepSpeed's ZeRO, which never imports bagua; one variable switches the plugin on:

    ENABLE_BAGUA_NET=1 torchrun --nproc-per-node 2 examples/train_deepspeed.py --stage 3

Needs GPUs and pip install deepspeed. The data are generated.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with DeepSpeed's ZeRO.")
    parser.add_argument("--stage", type=int, default=3, choices=[0, 1, 2, 3], help="of ZeRO (default 3)")
    stage = parser.parse_args().stage
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend="nccl")
    torch.manual_seed(1)
    inputs = torch.randn(1024, 64)
    targets = inputs @ torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = torch.arange(rank, len(inputs), ranks).split(32)
    for _ in range(3):
        for rows in mine:
            outputs = engine(inputs[rows].to(engine.device))
            loss = nn.functional.mse_loss(outputs, targets[rows].to(engine.device))
            engine.backward(loss)
            engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    if rank == 0:
        print(f"loss {float(mean) / ranks:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
