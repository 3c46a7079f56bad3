# ranks: 2
"""The compressed operation in an algorithm of the page approximates the mean."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua

run_blocks("docs/how-to/train/write-an-algorithm.md", 4)


class Bytes(Algorithm):
    def reify(self, process_group):
        return BytesImpl(process_group)


bagua.init_process_group()
torch.manual_seed(1)
model = torch.nn.Linear(100, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], Bytes())
batches = torch.randn(2, 4, 100)
model(batches[bagua.get_rank()]).sum().backward()
exact = batches.sum(dim=1).mean(dim=0).expand(3, 100)
torch.testing.assert_close(model.weight.grad, exact, rtol=0, atol=0.05)
assert not torch.equal(model.weight.grad, exact)
