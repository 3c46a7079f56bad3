"""BaguaStrategy in real runs of Lightning's Trainer with two ranks, compared with Lightning's own DDPStrategy."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import DEVICE_VARIABLE, run_ranks
from torch import Tensor, nn

pytest.importorskip("lightning", reason="needs lightning: pip install 'bagua[lightning]'")

DATA = torch.Generator().manual_seed(5)
INPUTS, TARGETS = torch.randn(32, 8, generator=DATA), torch.randn(32, 4, generator=DATA)


def lightning_of(package: str = "lightning.pytorch") -> Any:
    import importlib

    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch.utils.data|torch.jit")
    warnings.filterwarnings("ignore", message=".*(num_workers|LeafSpec|GPU available|sync_dist).*")
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


def _trained(package: str, folder: str, strategies: list[Callable[[Any], Any]], **options: Any) -> list[Any]:
    pl = lightning_of(package)
    results = []
    for make in strategies:
        pl.seed_everything(3, verbose=False)
        net = module_class(pl)()
        trainer = trainer_of(pl, make(pl), folder, **options)
        trainer.fit(net, loader(), loader())
        results.append((net.state_dict(), {name: float(one) for name, one in trainer.callback_metrics.items()}))
    return results


def _as_ddp(folder: str, options: dict[str, Any]) -> None:
    def ours(pl: Any) -> Any:
        import bagua.lightning

        return bagua.lightning.strategy_for(pl.__name__)()

    def by_name(_: Any) -> str:
        return "bagua"

    for package in ("lightning.pytorch", "pytorch_lightning"):
        made = [lambda pl: pl.strategies.DDPStrategy(), ours, by_name]
        theirs, *others = _trained(package, folder, made, **options)
        for one in others:
            assert one[1] == theirs[1]
            assert all(torch.equal(one[0][name], value) for name, value in theirs[0].items())


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}])
def test_gradient_all_reduce_is_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    run_ranks(2, _as_ddp, str(tmp_path), options)
