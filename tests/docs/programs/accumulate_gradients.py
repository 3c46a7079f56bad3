# ranks: 2
"""Accumulated gradients are those of all passes and ranks."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], GradientAllReduceAlgorithm())
everything = torch.randn(2, 3, 4, 8)
batches = everything[bagua.get_rank()]


def loss_of(batch):
    return model(batch).square().mean()


reference = torch.nn.Linear(8, 1)
reference.load_state_dict(model.state_dict())

run_blocks("docs/how-to/train/accumulate-gradients.md", 1)

sum(reference(batch).square().mean() / 2 for batch in everything.flatten(0, 1)).backward()
torch.testing.assert_close(model.weight.grad, reference.weight.grad)
