# ranks: 2
"""All ranks have work of similar size in each step, and an epoch continues where it was interrupted."""

import torch
import torch.distributed as dist
from support.page_programs import run_blocks
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

bagua.init_process_group()
lengths = [int(length) for length in torch.logspace(1, 3, 96)]
dataset = [torch.full((length,), number) for number, length in enumerate(lengths)]
collate = list
seen = []


def train_step(batch):
    seen.append([len(sample) for sample in batch])


def on_all_ranks(values):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, values)
    return everybody


run_blocks("docs/how-to/train/balance-load.md", 1)
assert len(seen) == 3 * 6
first, second = (torch.tensor([sum(batch) for batch in batches]) for batches in on_all_ranks(seen))
assert (first / second).sub(1).abs().max() < 0.06, "neighbours in the order of lengths differ by 5%"

run_blocks("docs/how-to/train/balance-load.md", 2)
batches = list(loader)
assert len(set(on_all_ranks(len(batches)))) == 1
assert all(sum(map(len, batch)) <= 1000 for batch in batches)

sampler = LoadBalancingDistributedSampler(dataset, complexity_fn=len)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate)
sampler.set_epoch(2)
whole = [[len(sample) for sample in batch] for batch in loader]
interrupted = iter(loader)
steps = 2
for _ in range(steps):
    next(interrupted)
seen.clear()
run_blocks("docs/how-to/train/balance-load.md", 5)
assert seen == whole[2:]
run_blocks("docs/how-to/train/balance-load.md", 6)
assert state["position"] == 16
seen.clear()
sampler.load_state_dict(state)
run_blocks("docs/how-to/train/balance-load.md", 5)
assert seen == whole[2:]

expected = list(sampler)
run_blocks("docs/how-to/train/balance-load.md", 3)
sampler.set_epoch(2)
assert list(sampler) == expected

run_blocks("docs/how-to/train/balance-load.md", 4)
batches = [[len(sample) for sample in batch] for batch in loader]
assert len(batches) == 6
for parts in zip(*on_all_ranks(batches), strict=True):
    assert [len(part) for part in parts] == [8, 8], "in equal parts, until speeds are known"
    of_all = sorted(length for part in parts for length in part)
    assert of_all == lengths[lengths.index(of_all[0]) :][:16], "neighbours in the order of lengths"
