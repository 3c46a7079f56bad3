# ranks: 2
"""Replicas stay equal, also with a GradScaler, and an overflow is seen on all ranks."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

bagua.init_process_group()
device = torch.device("cpu")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.randn(4, 2, 16, 8).unbind(1)[bagua.get_rank()]

run_blocks("docs/reference/algorithms/bytegrad.md", 1)

scaler = torch.amp.GradScaler(device.type)
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()

assert equal_on_all_ranks(*model.parameters())

model[0].weight.grad = None
for one in model.parameters():
    one.grad = None
loss = model(loader[0]).square().mean()
(loss * (float("inf") if bagua.get_rank() == 1 else 1.0)).backward()
assert model[0].weight.grad.isnan().any()


assert Algorithm.init("bytegrad").hierarchical
bucket = model.bagua_buckets[0]
assert bucket.flattened_tensor().numel() % 64 == 0
