# ranks: 2
"""After a backward pass, each rank has the mean of both ranks' gradients."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua

bagua.init_process_group()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/reference/algorithms/gradient_allreduce.md", 1)

inputs = torch.arange(16.0).view(2, 8)
model(inputs[bagua.get_rank()]).sum().backward()
assert torch.equal(model.weight.grad, inputs.mean(dim=0, keepdim=True))
