# ranks: 2
"""Lightning with Bagua: the strategy, QAdam's, and the collectives."""

import logging
import os
import warnings

import torch
from support.page_programs import run_blocks

warnings.filterwarnings("ignore")  # Lightning's, about workers of loaders and such
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

from lightning.pytorch import LightningModule, Trainer

ENVIRONMENT = dict(os.environ)
options = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


model = Net()
loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)

run_blocks("docs/how-to/train/use-lightning.md", 1)

assert trainer.global_step == 4
assert type(trainer.strategy).__name__ == "BaguaStrategy"
os.environ.update(ENVIRONMENT)  # Lightning takes a part of it away when a run ends

run_blocks("docs/how-to/train/use-lightning.md", 2)

assert trainer.global_step == 4
os.environ.update(ENVIRONMENT)

run_blocks("docs/how-to/train/use-lightning.md", 3)

assert trainer.global_step == 4
assert trainer.strategy._trained.bagua_algorithm.rounds == 1  # of four steps, two of them of the warm-up
os.environ.update(ENVIRONMENT)

run_blocks("docs/how-to/train/use-lightning.md", 4)

assert trainer.callback_metrics["bagua/MiB"] > 0 or torch.distributed.get_rank() > 0
os.environ.update(ENVIRONMENT)

run_blocks("docs/how-to/train/use-lightning.md", 5)

assert not trainer._accelerator_connector.use_distributed_sampler
rank = torch.distributed.get_rank()
embedding = torch.full((3, 2), float(rank), requires_grad=True)
prediction = torch.full((1 + rank,), rank)

run_blocks("docs/how-to/train/use-lightning.md", 6)

assert embeddings.shape == (2, 3, 2)
assert [one.tolist() for one in predictions] == [[0], [1, 1]]
os.environ.update(ENVIRONMENT)

from torch.utils.data import DataLoader

from bagua.torch_api.contrib import BalancedSampler

dataset = torch.randn(64, 8)
run_blocks("docs/how-to/train/weigh-batches.md", 7)
assert trainer.global_step == 4
assert trainer.strategy._trained.setup.counts_batch
