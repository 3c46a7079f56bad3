"""Hugging Face Accelerate, which never imports bagua; one variable switches the plugin on:

    ENABLE_BAGUA_NET=1 accelerate launch --multi_gpu --num_processes 2 examples/train_accelerate.py

Needs pip install accelerate. The data are generated; on CPUs Accelerate uses gloo, which no NCCL plugin can change.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(1024, 64)
    data = TensorDataset(inputs, inputs @ torch.randn(64, 8))
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=1e-3), DataLoader(data, batch_size=32)
    )
    for _ in range(3):
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"loss {float(mean):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
