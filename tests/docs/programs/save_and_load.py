# ranks: 2
"""A resumed run is bitwise identical to one that continued."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()


def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer


def train(model, optimizer, seed):
    torch.manual_seed(2 * seed + bagua.get_rank())
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


model, optimizer = make()
model.with_bagua([optimizer], GradientAllReduceAlgorithm())
train(model, optimizer, 1)

run_blocks("docs/how-to/train/save-and-load.md", 1)

first = model
train(model, optimizer, 2)
model, optimizer = make()

run_blocks("docs/how-to/train/save-and-load.md", 2)

train(model, optimizer, 2)
assert all(torch.equal(one, other) for one, other in zip(first.parameters(), model.parameters(), strict=True))
