# ranks: 2
"""Accelerate's FSDP2 with compressed communication."""

import warnings

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from support.page_programs import run_blocks

from bagua.fsdp import compress_communication

warnings.filterwarnings("ignore")  # Accelerate's
# Accelerate offers FSDP to GPUs only. On CPUs it does the same, once it takes them for another accelerator.
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)

run_blocks("docs/how-to/train/compress-fsdp.md", 6)

for batch in loader:
    accelerator.backward(model(batch).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert handle.statistics["gradients"]["saved"] > 0
