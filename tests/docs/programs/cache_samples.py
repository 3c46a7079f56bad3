# ranks: 1
"""The second epoch comes from the cache."""

import tempfile

import torch
from support.page_programs import run_blocks
from torch.utils.data import DataLoader, Dataset

folder = tempfile.TemporaryDirectory()
cache_folder = folder.name


class DecodedImages(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index


class Augmented(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        return image.flip(-1), label


seen = []


def train(batch):
    images, labels = batch
    assert torch.equal(images, labels.to(torch.uint8)[:, None, None, None].expand_as(images))
    seen.extend(labels.tolist())


run_blocks("docs/how-to/train/cache-samples.md", 1, 2)

assert sorted(seen) == sorted([*range(40)] * 2)
assert (dataset.statistics().hits, dataset.statistics().misses) == (40, 40)

run_blocks("docs/how-to/train/cache-samples.md", 4, 5)

assert dataset.statistics().misses == 40
assert dataset.cache_loader.num_keys() == 80

secret = "secret"
run_blocks("docs/how-to/train/cache-samples.md", 3)  # nobody is asked before the first sample

assert len(dataset.cache_loader.store.hosts) == 2

run_blocks("docs/how-to/train/cache-samples.md", 6)

assert [loader.get(number, str) for number in (1, 2, 1)] == ["1", "2", "1"]
assert len(loader.store.values) == 2
