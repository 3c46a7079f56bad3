# ranks: 2
"""The page shows the log that wrapping a model writes."""

import logging
import os
import re

import torch
from support.page_programs import REPOSITORY, run_blocks

import bagua.torch_api as bagua

os.environ["BAGUA_LOG_LEVEL"] = "debug"
bagua.init_process_group()
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append("bagua: " + record.getMessage())
logging.getLogger("bagua").addHandler(handler)
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
page = REPOSITORY / "docs" / "how-to" / "train" / "log.md"
shown = re.search("```text\n(.*?)```", page.read_text(), re.DOTALL)[1].splitlines()
assert lines == (shown if bagua.get_rank() == 0 else []), lines

for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()

run_blocks("docs/how-to/train/log.md", 1)

stats = model.bagua_ddp.stats()
assert stats.steps == 4
assert stats.nbytes == sum(one.nbytes for one in stats.buckets) >= 4 * sum(one.numel() for one in model.parameters())
assert 0 <= stats.exposed_s < stats.step_s
assert all(one.communication_s > 0 for one in stats.buckets)
assert len(stats.buckets) == 2

# A hundred steps of a small model.
model = torch.nn.Linear(1024, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
run_blocks("docs/how-to/train/log.md", 2)
lines.clear()
for _ in range(120):
    optimizer.zero_grad()
    model(torch.randn(1, 1024)).square().mean().backward()
    optimizer.step()
logged = [line for line in lines if "step 100: step " in line]
assert len(logged) == len(lines) == (bagua.get_rank() == 0), lines
