# ranks: 2
"""A resumed run is bitwise identical to one that continued."""

from pathlib import Path

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()


def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(model, optimizer, scheduler, seed=1):
    torch.manual_seed(2 * seed + bagua.get_rank())
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    scheduler.step()


def check_equal(one, other):
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


# Save, resume.
model, optimizer, scheduler = make()
model.with_bagua([optimizer], GradientAllReduceAlgorithm())
train(model, optimizer, scheduler)
run_blocks("docs/how-to/train/save-and-load.md", 1)
first = model
train(model, optimizer, scheduler, 2)
run_blocks("docs/how-to/train/save-and-load.md", 2)
assert iteration == 1000
train(model, optimizer, scheduler, 2)
check_equal(first, model)

# In the background.
run_blocks("docs/how-to/train/save-and-load.md", 3)
first = model
model, optimizer, scheduler = make()
model.with_bagua([optimizer], GradientAllReduceAlgorithm())
assert load_checkpoint("checkpoints", model, optimizer, scheduler) == 2000
train(model, optimizer, scheduler)
check_equal(first, model)

# torch.distributed.checkpoint
if bagua.get_rank() == 0:
    run_blocks("docs/how-to/train/save-and-load.md", 5)
bagua.barrier()
loaded = []
for folder in ("checkpoints", "converted"):
    model, optimizer, scheduler = make()
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert load_checkpoint(folder, model, optimizer, scheduler, iteration=1000) == 1000
    train(model, optimizer, scheduler)
    loaded.append(model)
check_equal(*loaded)

# The mean of replicas that differ.
model, optimizer, scheduler = make()
model.with_bagua([optimizer], DecentralizedAlgorithm(communication_interval=5))
train(model, optimizer, scheduler)
train(model, optimizer, scheduler, 2)
save_checkpoint(3000, "checkpoints", model, optimizer, scheduler)
mean = model[0].weight.detach().clone()
bagua.allreduce_inplace(mean, op=bagua.ReduceOp.AVG)
model, optimizer, scheduler = make()
run_blocks("docs/how-to/train/save-and-load.md", 4)
assert iteration == 3000
torch.testing.assert_close(model[0].weight.detach(), mean)

# By hand.
model, optimizer, scheduler = make()
model.with_bagua([optimizer], GradientAllReduceAlgorithm())
train(model, optimizer, scheduler)
run_blocks("docs/how-to/train/save-and-load.md", 6)
first = model
train(model, optimizer, scheduler, 2)
model, optimizer, scheduler = make()
run_blocks("docs/how-to/train/save-and-load.md", 7)
train(model, optimizer, scheduler, 2)
check_equal(first, model)
