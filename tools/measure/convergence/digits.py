"""1,797 handwritten digits of 8x8 pixels in ten classes (sklearn.datasets.load_digits): 1,297 to train with, 500 to
test."""

from __future__ import annotations

import torch
from torch import nn

from measure.convergence.task import Split, Task, dataset_of_sklearn

TEST_SAMPLES = 500
# Without it the training loss goes to zero, and a per cent of nothing says nothing.
PENALTY = 3e-3


def build() -> Task:
    bunch, source = dataset_of_sklearn("load_digits")
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)[order]
    return Task(
        name="digits",
        train=Split(pictures[TEST_SAMPLES:], labels[TEST_SAMPLES:]),
        test=Split(pictures[:TEST_SAMPLES], labels[:TEST_SAMPLES]),
        build_model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        classifies=True,
        source=source,
        penalty=PENALTY,
    )
