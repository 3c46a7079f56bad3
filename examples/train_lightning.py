"""Train a small network on scikit-learn's handwritten digits with Lightning and Bagua, on two processes:

    python examples/train_lightning.py                          # gradient all-reduce
    python examples/train_lightning.py --strategy ddp           # Lightning's own, for comparison: the same losses
    python examples/train_lightning.py --algorithm bytegrad

Needs Lightning and scikit-learn: pip install '.[lightning,examples]' in the checkout. Lightning starts the second
process itself.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bagua.lightning import BaguaStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Lightning and Bagua.")
    parser.add_argument("--strategy", default="bagua", choices=["bagua", "ddp"], help="default bagua")
    parser.add_argument("--algorithm", default="gradient_allreduce", help="of Bagua (default gradient_allreduce)")
    parser.add_argument("--devices", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--epochs", type=int, default=5, help="default 5")
    arguments = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels))
    strategy = BaguaStrategy(algorithm=arguments.algorithm) if arguments.strategy == "bagua" else "ddp"
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32))
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.6f}")


if __name__ == "__main__":
    main()
