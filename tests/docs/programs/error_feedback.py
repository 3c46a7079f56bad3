# ranks: 2
"""The state of the hook is saved and loaded, and replicas stay equal."""

import torch
import torch.distributed as dist
from support.page_programs import equal_on_all_ranks, run_blocks
from torch.nn.parallel import DistributedDataParallel

import bagua

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.randn(4, 2, 16, 8).unbind(1)[rank]

run_blocks("docs/how-to/train/torch-ddp-hooks.md", 2)

run_blocks("docs/how-to/train/torch-ddp-hooks.md", 3)

for batch in loader:
    optimizer.zero_grad()
    ddp(batch).square().mean().backward()
    optimizer.step()
assert equal_on_all_ranks(*model.parameters())
assert state.state_dict()["buckets"][0]["residual"].abs().max() > 0
