# ranks: 2
"""QAdam trains with the GradScaler that it was given, and refuses another."""

import pytest
import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

bagua.init_process_group()
device = torch.device("cpu")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = QAdamOptimizer(model.parameters(), warmup_steps=4)
loader = torch.randn(12, 2, 16, 8).unbind(1)[bagua.get_rank()]

run_blocks("docs/reference/algorithms/qadam.md", 2)

assert equal_on_all_ranks(*model.parameters())
assert optimizer.state[model[0].weight]["step"] == 12
model.with_bagua([optimizer], QAdamAlgorithm(optimizer))
optimizer.zero_grad()
scaler.scale(model(loader[0]).square().mean()).backward()
with pytest.raises(RuntimeError, match="grad_scaler=scaler") as raised:
    scaler.step(optimizer)
