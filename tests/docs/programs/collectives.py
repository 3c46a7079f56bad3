# ranks: 2
"""The collectives of the page give the mean and rank 0's object."""

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua

bagua.init_process_group()
loss = torch.tensor(float(bagua.get_rank()))

run_blocks("docs/how-to/train/collectives.md", 1)

assert mean == 0.5
assert settings == {"lr": 0.1}
