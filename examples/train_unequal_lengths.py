"""Classify sequences of very different lengths, with samplers that balance the ranks' work and synchronized batch
normalization:

    torchrun --nproc-per-node 2 examples/train_unequal_lengths.py

Takes seconds on CPUs. A sequence is of one of four classes, which have tokens of their own in it among random ones. At
the end, rank 0 prints the accuracy, and how many tokens the busiest rank had per step, compared with the mean.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.contrib import LoadBalancingDistributedSampler, SyncBatchNorm

CLASSES, TOKENS = 4, 400
Sample = tuple[Tensor, int]


def make_samples(count: int, seed: int) -> list[Sample]:
    """Most have some 30 tokens, a few have a thousand."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = min(1000, max(8, round(30 * math.exp(torch.randn((), generator=generator).item()))))
        label = number % CLASSES
        tokens = torch.randint(TOKENS, (length,), generator=generator)
        is_own = torch.rand(length, generator=generator) < 0.3
        tokens[is_own] = tokens[is_own] // CLASSES * CLASSES + label
        samples.append((tokens, label))
    return samples


def pack(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a batch one after the other, without padding; where each sample begins; the labels."""
    lengths = torch.tensor([0] + [len(tokens) for tokens, _ in samples[:-1]])
    return (
        torch.cat([tokens for tokens, _ in samples]),
        lengths.cumsum(0),
        torch.tensor([label for _, label in samples]),
    )


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(TOKENS, 32, mode="mean")
        self.head = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        output: Tensor = self.head(self.embedding(tokens, starts))
        return output


def main() -> None:
    bagua.init_process_group()
    torch.manual_seed(0)
    samples = make_samples(1024, seed=1)
    sampler = LoadBalancingDistributedSampler(samples, complexity_fn=lambda sample: len(sample[0]))
    loader = DataLoader(samples, batch_size=16, sampler=sampler, collate_fn=pack)  # type: ignore[arg-type]
    model = SyncBatchNorm.convert_sync_batchnorm(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]

    sizes = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for tokens, starts, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens, starts), labels).backward()
            optimizer.step()
            sizes.append(len(tokens))

    busiest, total = torch.tensor(sizes), torch.tensor(sizes)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    if bagua.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            tokens, starts, labels = pack(make_samples(512, seed=2))
            accuracy = (model(tokens, starts).argmax(dim=1) == labels).float().mean().item()
        imbalance = bagua.get_world_size() * busiest.sum().item() / total.sum().item()
        print(f"test accuracy {100 * accuracy:.1f}%, busiest rank {imbalance:.3f} x the mean")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
