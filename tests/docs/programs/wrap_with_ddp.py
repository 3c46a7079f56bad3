# ranks: 2
"""The wrapper broadcasts buffers, and replicas stay equal."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
model[0].weight.requires_grad_(False)
model[1].running_mean.fill_(bagua.get_rank())
optimizer = torch.optim.Adam(model.parameters())

run_blocks("docs/how-to/train/wrap-a-model.md", 2)

assert model.module[1].running_mean.sum() == 0
assert sorted(model.state_dict())[0] == "module.0.bias"
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
assert equal_on_all_ranks(*model.parameters())
