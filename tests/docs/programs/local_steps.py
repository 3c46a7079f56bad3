# ranks: 2
"""The weights are the same on all ranks after a round."""

import torch
from support.page_programs import run_blocks

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run_blocks("docs/reference/algorithms/local_steps.md", 1)

torch.manual_seed(bagua.get_rank())
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
every = torch.empty(2, 8)
bagua.allgather(model.weight.detach().view(-1), every)
assert torch.equal(every[0], every[1])
