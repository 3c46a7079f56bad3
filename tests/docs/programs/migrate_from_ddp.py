# ranks: 2

import os

import torch
from support.page_programs import run_blocks

rank = int(os.environ["RANK"])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
reference = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
reference.load_state_dict(model.state_dict())
backend = "gloo"

run_blocks("docs/how-to/migrate.md", 1)

theirs = torch.nn.parallel.DistributedDataParallel(reference)
their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
torch.manual_seed(2 + rank)
for _ in range(10):
    batch = torch.randn(4, 8)
    for one, its_optimizer in ((model, optimizer), (theirs, their_optimizer)):
        its_optimizer.zero_grad()
        one(batch).square().mean().backward()
        its_optimizer.step()
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
for one, other in zip(model.buffers(), theirs.buffers(), strict=True):
    assert torch.equal(one, other)
assert list(model.state_dict()) == list(theirs.state_dict())
