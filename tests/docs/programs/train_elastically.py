# ranks: 2
"""A run that is interrupted and started again ends with the weights of one that was not."""

import os
from pathlib import Path

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

steps = []


def make():
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(step):
    if step == fails_at:
        raise InterruptedError
    steps.append(step)
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model, samples):
    return (model(samples) - samples.sum(dim=1, keepdim=True)).square().mean()


fails_at = 57
model, optimizer = make()
try:
    run_blocks("docs/how-to/train/train-elastically.md", 1)
except InterruptedError:
    assert steps == list(range(57))

steps.clear()
fails_at = None
model, optimizer = make()
bagua.init_process_group = lambda: None  # it is set up already
run_blocks("docs/how-to/train/train-elastically.md", 1)
assert steps == list(range(50, 100))
assert model.bagua_ddp.bagua_train_step_counter == 100

alone, optimizer = make()
for step in range(100):
    optimizer.zero_grad()
    loss_of(alone, batch_of(step)).backward()
    optimizer.step()
torch.testing.assert_close(model.state_dict(), alone.state_dict())
