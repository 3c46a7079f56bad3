# ranks: 2
"""Used parameters are averaged, unused ones named in an error."""

import pytest
import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

bagua.init_process_group()
rank = bagua.get_rank()


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(3))

    def forward(self, inputs, head):
        return self.heads[head](inputs)


model = Heads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(4, 8)

run_blocks("docs/how-to/train/unused-parameters.md", 1)

heads = model.module.heads
assert torch.equal(heads[0].weight.grad, torch.full((1, 8), 2.0))
assert torch.equal(heads[1].weight.grad, torch.full((1, 8), 2.0))
assert heads[2].weight.grad is None


strict = Heads()
optimizer = torch.optim.SGD(strict.parameters(), lr=0.1)
strict.with_bagua([optimizer], GradientAllReduceAlgorithm())
strict(inputs, 0).sum().backward()
with pytest.raises(RuntimeError, match="4 of 6 parameters got no gradient") as raised:
    optimizer.step()
assert "heads.2.bias" in str(raised.value)
