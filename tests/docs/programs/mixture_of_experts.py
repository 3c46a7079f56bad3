# ranks: 2
"""A mixture of experts trains; what is not an expert stays equal."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
hidden = 8
losses = []

run_blocks("docs/how-to/train/mixture-of-experts.md", 1)

batches = [(x, x.flip(1)) for x in torch.randn(40, 16, hidden)]


def loss_of(y, target):
    losses.append((y - target).square().mean())
    return losses[-1]


run_blocks("docs/how-to/train/mixture-of-experts.md", 2)

assert model.experts.num_experts == 4
assert sum(losses[-5:]) < sum(losses[:5])
for name, parameter in model.named_parameters():
    assert equal_on_all_ranks(parameter) != ("bagua_experts" in name), name

device, max_norm = torch.device("cpu"), 0.1
y, _ = model(torch.randn(16, hidden))
y.square().sum().backward()
run_blocks("docs/how-to/train/mixture-of-experts.md", 3)
assert norm > max_norm
square = square_of(model.parameters())
# Equal gradients stay equal, and all together have the norm that is asked for.
assert equal_on_all_ranks(model.experts.bagua_moe.gate.wg.weight.grad)
rest = square_of(one for one in model.parameters() if not hasattr(one, "expert"))
of_experts = square - rest
bagua.allreduce_inplace(of_experts)
torch.testing.assert_close((of_experts + rest).sqrt(), torch.tensor(max_norm), rtol=1e-3, atol=0)
