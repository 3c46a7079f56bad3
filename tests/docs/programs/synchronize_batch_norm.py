# ranks: 4
"""Pairs of ranks normalize together."""

import copy

import torch
from support.page_programs import run_blocks
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.contrib import SyncBatchNorm

bagua.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
alone = copy.deepcopy(model)
run_blocks("docs/how-to/train/synchronize-batch-norm.md", 1)
data = torch.randn(4, 2, 3, 5, 5)
first = bagua.get_rank() // 2 * 2
expected = alone(data[first : first + 2].flatten(0, 1))
torch.testing.assert_close(model(data[bagua.get_rank()]), expected.view(2, 2, 4, 5, 5)[bagua.get_rank() - first])
torch.testing.assert_close(model.state_dict(), alone.state_dict())
