"""Train on JPEG images that are decoded once: the first epoch fills the cache, later ones and later runs read from it.

    python examples/cache_samples.py
    torchrun --nproc-per-node 2 examples/cache_samples.py

It makes its images itself. Each epoch prints its time and how many samples came from the cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.contrib import CachedDataset


class DecodedImages(Dataset):
    """What is in front of the cache: the same in every epoch."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(str(file) for file in folder.glob("*.jpeg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as image:
            pixels = np.array(image.convert("RGB").resize((64, 64)))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), index % 2


class Augmented(Dataset):
    """What is behind it: random, and cheap."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.dataset[index]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image).float() / 255, label


def make_images(folder: Path, count: int) -> None:
    """Bright and dark ones, in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    for number in range(count):
        noise = generator.integers(0, 156, (40, 40, 3)) + 100 * (number % 2)
        image = Image.fromarray(noise.astype(np.uint8)).resize((400, 400))
        image.save(folder / f"{number:05d}.jpeg", quality=90)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on images that are decoded once.")
    parser.add_argument(
        "--folder", type=Path, help="for images and cache; a second run finds them (default: a new one)"
    )
    parser.add_argument("--images", type=int, default=512, help="to make (default 512)")
    parser.add_argument("--epochs", type=int, default=3, help="to train (default 3)")
    given = parser.parse_args(words)
    bagua.init_process_group()
    folder = given.folder
    if folder is None:
        new = tempfile.mkdtemp(prefix="bagua-example-") if bagua.get_rank() == 0 else None
        folder = Path(bagua.communication.broadcast_object(new))
    if bagua.get_rank() == 0 and not (folder / "images").exists():
        make_images(folder / "images", given.images)
    bagua.barrier()

    dataset = CachedDataset(DecodedImages(folder / "images"), path=folder / "cache", capacity_bytes=1 << 30)
    sampler = DistributedSampler(dataset, bagua.get_world_size(), bagua.get_rank())
    loader = DataLoader(Augmented(dataset), batch_size=32, sampler=sampler, num_workers=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 3, 64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        before, began = dataset.statistics(), time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        now, seconds = dataset.statistics(), time.perf_counter() - began
        if bagua.get_rank() == 0:
            hits, misses = now.hits - before.hits, now.misses - before.misses
            print(f"epoch {epoch}: loss {loss:.3f}, {seconds:.2f} s, {hits} hits, {misses} misses")


if __name__ == "__main__":
    main()
