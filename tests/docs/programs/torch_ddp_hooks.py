# ranks: 2
"""Replicas stay equal with torch's DDP and the hook."""

import torch
import torch.distributed as dist
from support.page_programs import equal_on_all_ranks, run_blocks

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.randn(4, 2, 16, 8).unbind(1)[rank]

run_blocks("docs/how-to/train/torch-ddp-hooks.md", 1)

weights = torch.cat([one.detach().view(-1) for one in model.parameters()])
assert equal_on_all_ranks(*model.parameters())
