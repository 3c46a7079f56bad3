# ranks: 2
"""The examples of the API pages."""

import torch
from support.page_programs import run_blocks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.torch_api as bagua

bagua.init_process_group()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = [torch.zeros(3), torch.ones(3)]
sentences = ["a" * length for length in range(1, 9)]


run_blocks("docs/reference/api/torch_api.md", 1)
assert isinstance(model, torch.nn.Linear)
run_blocks("docs/reference/api/communication.md", 1)
assert tensor.tolist() == [1.0] * 4
assert everyone.tolist() == [1.0] * 8
run_blocks("docs/reference/api/data_parallel.md", 1)
assert wrapper.module.weight.grad is not None
run_blocks("docs/reference/api/algorithms.md", 1)
assert model.bagua_algorithm.hierarchical is False
run_blocks("docs/reference/api/contrib.md", 1)
assert len(loader) == 2
run_blocks("docs/reference/api/checkpoint.md", 1)
assert iteration == 100
run_blocks("docs/reference/api/moe.md", 1)
assert output.shape == (16, 8)
run_blocks("docs/reference/api/buckets.md", 1)
run_blocks("docs/reference/api/caching.md", 1)
assert sample.tolist() == [0.0] * 3
run_blocks("docs/reference/api/comm_hooks.md", 1)
run_blocks("docs/reference/api/engine.md", 1)
run_blocks("docs/reference/api/kernels.md", 1)
assert (values - received).abs().max() < 0.1
run_blocks("docs/reference/api/legacy.md", 1)
run_blocks("docs/reference/api/net.md", 1)
assert variables["NCCL_NET_PLUGIN"].endswith("libnccl-net.so")

model = fully_shard(torch.nn.Linear(8, 1), mesh=init_device_mesh("cpu", (2,)))
run_blocks("docs/reference/api/fsdp.md", 1)
handle.remove()
