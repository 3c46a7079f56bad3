# ranks: 2
"""Replicas stay equal, and gradients are of low rank."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run_blocks("docs/reference/algorithms/powersgd.md", 1)

torch.manual_seed(bagua.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
assert torch.linalg.matrix_rank(model.weight.grad, rtol=1e-4) == 4
assert equal_on_all_ranks(model.weight)
