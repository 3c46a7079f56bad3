# ranks: 2
"""Replicas are equal after the warm-up, while gradients are local."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua

bagua.init_process_group()
device = torch.device("cpu")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
loader = torch.randn(12, 2, 16, 8).unbind(1)[bagua.get_rank()]

run_blocks("docs/reference/algorithms/qadam.md", 1)

assert equal_on_all_ranks(*model.parameters())
(bucket,) = model.bagua_buckets
assert not bucket.holds_gradients
assert not equal_on_all_ranks(model[0].weight.grad)
