# ranks: 2
"""Wrapping in place broadcasts state, and replicas stay equal."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
assert not equal_on_all_ranks(model[0].weight)
model[1].running_mean.fill_(bagua.get_rank())
optimizer.param_groups[0]["lr"] = 0.1 if bagua.get_rank() == 0 else 0.2
assert model.with_bagua([optimizer], GradientAllReduceAlgorithm()) is model
assert equal_on_all_ranks(*model.parameters())
assert not equal_on_all_ranks(model[1].running_mean)
assert optimizer.param_groups[0]["lr"] == 0.1
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()
assert equal_on_all_ranks(*model.parameters())

run_blocks("docs/how-to/train/wrap-a-model.md", 1)

assert model.bagua_ddp is engine
device = torch.device("cpu")
run_blocks("docs/how-to/train/wrap-a-model.md", 3)

assert model.bagua_ddp.communicator.device == device
