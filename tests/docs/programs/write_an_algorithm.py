# ranks: 2
"""Local SGD of the page computes what plain torch computes."""

import copy

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua

run_blocks("docs/how-to/train/write-an-algorithm.md", 1)


bagua.init_process_group()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
replicas = [copy.deepcopy(model) for _ in range(2)]
batches = torch.randn(6, 2, 4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/how-to/train/write-an-algorithm.md", 2)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
for number, batch in enumerate(batches, start=1):
    step(model, optimizer, batch[bagua.get_rank()])
    for rank in range(2):
        step(replicas[rank], optimizers[rank], batch[rank])
    ours = replicas[bagua.get_rank()]
    if number % 3 == 0:
        with torch.no_grad():
            for pair in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = (pair[0] + pair[1]) / 2
                pair[0].copy_(mean)
                pair[1].copy_(mean)
    for one, other in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other)
assert equal_on_all_ranks(*model.parameters())
assert model.bagua_buckets[0].check_flatten()
