# ranks: 2
"""FSDP2 trains as the page says, alone and as HSDP, and Bagua refuses what it has sharded."""

import os

import torch
import torch.distributed as dist
from support.page_programs import equal_on_all_ranks, run_blocks
from support.training import message_of
from torch.distributed.tensor import DTensor

import bagua.torch_api
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.data_parallel import DistributedDataParallel

torch.manual_seed(1)
nodes = 2
loader = torch.randn(4, 2, 16, 8).unbind(1)[int(os.environ["RANK"])]

run_blocks("docs/how-to/train/use-fsdp.md", 1)

assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
for refused in (
    lambda: model.with_bagua([optimizer], GradientAllReduceAlgorithm()),
    lambda: DistributedDataParallel(model),
    lambda: fuse_optimizer(optimizer),
):
    told = message_of(ValueError, refused)
    assert "is a DTensor" in told
    assert "docs/how-to/train/use-fsdp.md" in told
    assert "docs/how-to/train/compress-fsdp.md" in told

# Beside it, what Bagua has: a part of the same model.
model = torch.nn.Sequential(model, torch.nn.Linear(1, 1))
model._bagua_params_and_buffers_to_ignore = [f"0.{name}" for name, _ in model[0].named_parameters()]
with_both = model.with_bagua([torch.optim.SGD(model[1].parameters(), lr=0.1)], GradientAllReduceAlgorithm())
with_both(loader[0]).sum().backward()

model = torch.nn.Linear(8, 1)
run_blocks("docs/how-to/train/use-fsdp.md", 2)
model(loader[0]).sum().backward()

model = torch.nn.Linear(8, 1)
run_blocks("docs/how-to/train/use-fsdp.md", 3)
for step in range(20):
    model(loader[step % 4]).square().mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(model.weight.full_tensor()) == (step == 19)
assert exchange.rounds == exchange.stats().steps == 1
