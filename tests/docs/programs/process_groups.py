# ranks: 3
"""A model trains on a group of two of three ranks, and hierarchically."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/how-to/train/process-groups.md", 1)

model(torch.randn(4, 8)).sum().backward()
optimizer.step()
everywhere = torch.empty(3 * 8)
bagua.allgather(model.weight.detach().view(-1), everywhere)
assert torch.equal(everywhere[:8], everywhere[8:16])
assert not torch.equal(everywhere[:8], everywhere[16:])
hierarchical = GradientAllReduceAlgorithm(hierarchical=True)
model.with_bagua([optimizer], hierarchical)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
