# ranks: 2
"""Replicas stay equal with autocast, clipping, checkpointing and compilation."""

import functools
import warnings

from support.page_programs import equal_on_all_ranks, run_blocks

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

warnings.simplefilter("default")  # torch's own, about what it imports to compile
import torch

import bagua.torch_api as bagua

bagua.init_process_group()
device = torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.block = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
        self.last = torch.nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.first(inputs)
        hidden = torch.utils.checkpoint.checkpoint(self.block, hidden, use_reentrant=False)
        return self.last(hidden)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(bagua.get_rank())
loader = torch.randn(3, 4, 8)
before = model.last.weight.detach().clone()

run_blocks("docs/how-to/train/mixed-precision.md", 1)


assert equal_on_all_ranks(*model.parameters())
assert not torch.equal(before, model.last.weight)

whole_compile = torch.compile
torch.compile = functools.partial(
    whole_compile, backend="aot_eager"
)  # what autograd sees of it, without a C++ compiler

run_blocks("docs/how-to/train/mixed-precision.md", 2)

assert equal_on_all_ranks(*model.parameters())
assert model.bagua_train_step_counter == 4
