# ranks: 2
"""Replicas are equal after ranks made different numbers of steps."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import DistributedDataParallel

bagua.init_process_group()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = DistributedDataParallel(model, optimizers=[optimizer])
batches = torch.ones(2 + 3 * bagua.get_rank(), 4, 8)
steps = 0

run_blocks("docs/how-to/train/uneven-inputs.md", 1)

assert equal_on_all_ranks(*model.parameters())
