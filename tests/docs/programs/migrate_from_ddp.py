# ranks: 2
"""The script after the first diff of the page computes what torch's DDP computes, bitwise."""

import os
import re

import torch
from support.page_programs import REPOSITORY

rank = int(os.environ["RANK"])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
reference = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
reference.load_state_dict(model.state_dict())
backend = "gloo"

page = (REPOSITORY / "docs" / "how-to" / "migrate.md").read_text()
diff = re.search("```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()
exec("\n".join(line[1:] for line in diff if not line.startswith("-")))

assert type(model).__module__.startswith("bagua.")
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
