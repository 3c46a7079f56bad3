# ranks: 2
"""Gradients are those of one process with the batches of all ranks."""

import copy

import torch
import torch.distributed as dist
from support.page_programs import run_blocks
from torch import nn
from torch.nn.functional import cross_entropy

import bagua.torch_api as bagua

bagua.init_process_group()
PADDING = 0
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
first = copy.deepcopy(net)
lengths = [[5, 2], [3, 6]]  # of each rank, of two steps
everything = [[torch.randint(1, 7, (1, length)) for length in one] for one in lengths]


def loss_of(tokens, targets):
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def padded(tokens):
    return torch.cat([tokens, torch.full((1, 8 - tokens.numel()), PADDING)], 1)


def check(grads, batches):
    """Of the mean over all tokens of these."""
    alone = copy.deepcopy(first)
    tokens = torch.cat([one.flatten() for one in batches])
    cross_entropy(alone(tokens), tokens).backward()
    for one, other in zip(grads, alone.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


model, optimizer = copy.deepcopy(net), None
optimizer = torch.optim.SGD(model.parameters(), 0.0)
loader = [(padded(tokens), padded(tokens)) for tokens in everything[rank]]
run_blocks("docs/how-to/train/weigh-batches.md", 1)
check([one.grad for one in model.parameters()], [everything[0][1], everything[1][1]])

micro_batches = [(tokens[0], tokens[0]) for tokens in everything[rank]]


def loss_of(tokens, targets):  # noqa: F811
    return cross_entropy(model(tokens), targets)


run_blocks("docs/how-to/train/weigh-batches.md", 4)
check([one.grad for one in model.parameters()], [one for both in everything for one in both])

run_blocks("docs/how-to/train/weigh-batches.md", 2)
optimizer.zero_grad()
loss_of(*micro_batches[0]).backward()
check([one.grad for one in model.parameters()], [everything[0][0], everything[1][0]])

run_blocks("docs/how-to/train/weigh-batches.md", 3)
optimizer.zero_grad()
any_batch = micro_batches[0]
if rank == 0:
    run_blocks("docs/how-to/train/weigh-batches.md", 5)
else:
    model.set_batch_weight(3)
    (3 * loss_of(*any_batch)).backward()
check([one.grad for one in model.parameters()], [everything[1][0]])

dataset = [(torch.full((3,), float(number)), torch.zeros(2)) for number in range(200)]
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
seen = []


def mse_loss(outputs, targets):
    seen.append(len(targets))
    return nn.functional.mse_loss(outputs, targets)


run_blocks("docs/how-to/train/weigh-batches.md", 6)
assert seen == [32, 32, 32, 4] * 2
