# ranks: 1
"""A fused optimizer trains as a plain one, with a scaler too."""

import copy

import torch
from support.page_programs import run_blocks

from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse import is_fused_optimizer

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
reference = copy.deepcopy(model)
other = torch.optim.AdamW(reference.parameters())
loader = [torch.randn(4, 8) for _ in range(3)]
batch = loader[0]


def loss_of(batch):
    return model(batch).square().mean()


run_blocks("docs/how-to/train/fuse-the-optimizer.md", 1)

for batch in loader:
    other.zero_grad()
    reference(batch).square().mean().backward()
    other.step()
assert all(map(torch.equal, model.parameters(), reference.parameters()))
assert is_fused_optimizer(optimizer)
assert optimizer._bagua_fused_count == 3

scaler = torch.amp.GradScaler("cpu")
optimizer.zero_grad()
run_blocks("docs/how-to/train/fuse-the-optimizer.md", 2)
assert optimizer._bagua_fused_count == 4
