# ranks: 2
"""The block that allows another algorithm, and the wrapper's way."""

import os
import pathlib

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

os.environ["XDG_CACHE_HOME"] = str(pathlib.Path.cwd())
bagua.init_process_group()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

run_blocks("docs/how-to/train/tune.md", 1)

for _ in range(3):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
assert model.bagua_ddp.setup.tuning_space == ("gradient_allreduce", "bytegrad")

wrapped = bagua.data_parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
wrapped.inner.autotune([ByteGradAlgorithm()])
wrapped(torch.randn(8, 64)).sum().backward()
