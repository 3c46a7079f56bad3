"""Two photographs of 427x640 pixels (sklearn.datasets.load_sample_images), cut into patches of 8x8 grey levels. Noise
is added to them, and the four pixels in the middle of each are to be found.

The photographs are divided into tiles; patches that begin in every fifth tile are for testing, and the others, unless
they overlap with such a tile, for training: no pixel is in both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from measure.convergence.task import Split, Task, dataset_of_sklearn

SIDE = 8
STRIDE = 4
TILE = 64
# Grey levels are scaled to a variance of 1.
NOISE = 0.5


def build() -> Task:
    bunch, source = dataset_of_sklearn("load_sample_images")
    generator = torch.Generator().manual_seed(0)
    parts = [_patches(torch.tensor(picture), generator) for picture in bunch.images]
    inputs, targets, is_test, is_train = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Task(
        name="photographs",
        train=Split(inputs[is_train], targets[is_train]),
        test=Split(inputs[is_test], targets[is_test]),
        build_model=_model,
        classifies=False,
        source=source,
    )


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(SIDE**2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def _patches(picture: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noisy patches [n, 64], clean middles [n, 4], and for each whether it tests, and whether it trains."""
    grey = picture.to(torch.float32).mean(dim=2)
    grey = (grey - grey.mean()) / grey.std()
    noisy = grey + NOISE * torch.randn(grey.shape, generator=generator)
    windows = noisy.unfold(0, SIDE, STRIDE).unfold(1, SIDE, STRIDE)
    middle = slice(SIDE // 2 - 1, SIDE // 2 + 1)
    clean = grey.unfold(0, SIDE, STRIDE).unfold(1, SIDE, STRIDE)[..., middle, middle]
    down, across = (torch.arange(count) * STRIDE for count in windows.shape[:2])
    corners = torch.stack([_is_test_tile(down + y, across + x) for y in (0, SIDE - 1) for x in (0, SIDE - 1)])
    return (
        windows.reshape(-1, SIDE**2),
        clean.reshape(-1, 4),
        corners.all(dim=0).flatten(),
        ~corners.any(dim=0).flatten(),
    )


def _is_test_tile(down: Tensor, across: Tensor) -> Tensor:
    """For each pixel of these rows and columns: [rows, columns]."""
    return ((down // TILE)[:, None] * 3 + (across // TILE)[None, :]) % 5 == 0
