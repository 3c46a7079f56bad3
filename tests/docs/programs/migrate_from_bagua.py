# ranks: 2
"""A script of Bagua 0.9 runs unchanged."""

import torch
from support.page_programs import run_blocks

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(4, 8)

run_blocks("docs/how-to/migrate.md", 1)
