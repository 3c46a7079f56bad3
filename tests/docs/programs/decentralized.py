# ranks: 2
"""Steps follow the formula; averaging, saving and loading work as the page says."""

import copy

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(6, 2, 4, 8)

run_blocks("docs/reference/algorithms/decentralized.md", 1)


for _index, batch in enumerate(batches):
    before = copy.deepcopy(model)
    optimizer.zero_grad()
    model(batch[bagua.get_rank()]).square().mean().backward()
    optimizer.step()
    before(batch[bagua.get_rank()]).square().mean().backward()
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        mean = then.detach().clone()
        bagua.allreduce_inplace(mean, op=bagua.ReduceOp.AVG)
        torch.testing.assert_close(now.detach(), mean - 0.1 * then.grad)
flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
every = torch.empty(2 * flat.numel())
bagua.allgather(flat, every)
assert not equal_on_all_ranks(*model.parameters())

run_blocks("docs/reference/algorithms/decentralized.md", 2)

bagua.barrier()
saved = torch.load("model.pt")
for name, value in result.state_dict().items():
    assert torch.equal(value, saved[name])
torch.testing.assert_close(torch.cat([p.detach().view(-1) for p in result.parameters()]), sum(every.chunk(2)) / 2)

run_blocks("docs/reference/algorithms/decentralized.md", 3)


def steps(model, optimizer):
    for batch in batches:
        optimizer.zero_grad()
        model(batch[rank]).square().mean().backward()
        optimizer.step()


steps(model, optimizer)
first = model
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/reference/algorithms/decentralized.md", 4)

steps(model, optimizer)
for one, other in zip(model.parameters(), first.parameters(), strict=True):
    assert torch.equal(one, other)
