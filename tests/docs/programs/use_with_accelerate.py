# ranks: 2
"""Accelerate prepares optimizer and data, and Bagua averages gradients: replicas stay equal, batches differ."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from support.page_programs import equal_on_all_ranks, run_blocks
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
data = torch.randn(64, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
before = torch.nn.functional.mse_loss(model(data), data.sum(1, keepdim=True)).item()

run_blocks("docs/how-to/use-with-frameworks.md", 1)

assert isinstance(optimizer, AcceleratedOptimizer)
assert type(model.bagua_algorithm).__name__ == "ByteGradAlgorithmImpl"
assert model.bagua_train_step_counter == len(loader) == 4
assert torch.nn.functional.mse_loss(model(data), data.sum(1, keepdim=True)).item() < before
assert equal_on_all_ranks(*model.parameters())
assert not equal_on_all_ranks(inputs)

from bagua.torch_api.contrib import BalancedSampler

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(data, data.sum(1, keepdim=True))
run_blocks("docs/how-to/train/weigh-batches.md", 8)
assert isinstance(optimizer, AcceleratedOptimizer)
assert len(inputs) == 8, "half of the global batch"
assert model.bagua_train_step_counter == 2 * len(loader) == 8
