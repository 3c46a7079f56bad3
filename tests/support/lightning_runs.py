"""Small runs of Lightning's Trainer on the ranks of a test."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import Any

import torch
from support.ranks import DEVICE_VARIABLE
from torch import Tensor, nn

DATA = torch.Generator().manual_seed(5)
INPUTS, TARGETS = torch.randn(32, 8, generator=DATA), torch.randn(32, 4, generator=DATA)


def lightning_of(package: str = "lightning.pytorch") -> Any:
    warnings.filterwarnings("ignore")  # Lightning's own, and torch's about what Lightning does
    warnings.filterwarnings("error", module="bagua")
    return importlib.import_module(package)


def module_class(pl: Any) -> Any:
    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, optimizer: str = "adam") -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
            self.optimizer = optimizer
            self.losses: list[Tensor] = []

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers(inputs)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            if self.optimizer == "qadam":
                from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

                return QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=3)
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Net


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, TARGETS), batch_size=4)


@functools.cache
def environment() -> dict[str, str]:
    """Of which Lightning takes a part away when a run ends."""
    return dict(os.environ)


def trainer_of(pl: Any, strategy: Any, folder: str, **options: Any) -> Any:
    os.environ.update(environment())
    is_cuda = os.environ.get(DEVICE_VARIABLE) == "cuda"
    defaults = {
        "accelerator": "gpu" if is_cuda else "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})
