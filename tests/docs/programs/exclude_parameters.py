# ranks: 2
"""Excluded parameters are not communicated."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()
model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/how-to/train/exclude-parameters.md", 1)

assert [name for name, _ in model.bagua_build_params()] == ["encoder.weight", "encoder.bias"]
