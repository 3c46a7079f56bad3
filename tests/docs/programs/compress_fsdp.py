# ranks: 2
"""FSDP2 with compressed communication: training, what it waits for, checkpoints, and replicas."""

import os
import warnings

import torch
import torch.distributed as dist
from support.page_programs import run_blocks

torch.manual_seed(1)
loader = torch.randn(4, 2, 16, 8).unbind(1)[int(os.environ["RANK"])]

run_blocks("docs/how-to/train/compress-fsdp.md", 1)

assert handle.statistics["gradients"]["saved"] > 0
handle.remove()
loader = [*loader] * 3

run_blocks("docs/how-to/train/compress-fsdp.md", 2)

assert meter.stats().exposed_s > 0
meter.remove()
handle = compress_communication(model, error_feedback=True)
model(loader[0]).square().mean().backward()
warnings.filterwarnings("ignore")  # of torch's checkpoints
files = [f"compression-{rank}.pt" for rank in range(2)]

run_blocks("docs/how-to/train/compress-fsdp.md", 3, 4)

dist.barrier()
assert all(torch.load(file)["residuals"] for file in files)

model = torch.nn.Linear(8, 1)
run_blocks("docs/how-to/train/compress-fsdp.md", 5)
model(loader[dist.get_rank()]).sum().backward()
assert handle.statistics["gradients"]["sent"] > 0
