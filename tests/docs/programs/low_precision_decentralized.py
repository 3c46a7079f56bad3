# ranks: 3
"""Copies of the neighbors' weights are exact, and a run resumes bitwise identically."""

import torch
from support.page_programs import run_blocks

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(6, 3, 4, 8)

run_blocks("docs/reference/algorithms/low_precision_decentralized.md", 1)

rank = bagua.get_rank()


def steps(model, optimizer):
    for batch in batches:
        optimizer.zero_grad()
        model(batch[rank]).square().mean().backward()
        optimizer.step()


steps(model, optimizer)

for bucket in model.bagua_buckets:
    every = torch.empty(3, bucket._weight.numel())
    bagua.allgather(bucket._weight, every)
    assert torch.equal(bucket._left_peer_weight, every[rank - 1])
    assert torch.equal(bucket._right_peer_weight, every[(rank + 1) % 3])

run_blocks("docs/reference/algorithms/low_precision_decentralized.md", 2)

steps(model, optimizer)
first = model
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/reference/algorithms/low_precision_decentralized.md", 3)

steps(model, optimizer)
for one, other in zip(model.parameters(), first.parameters(), strict=True):
    assert torch.equal(one, other)
