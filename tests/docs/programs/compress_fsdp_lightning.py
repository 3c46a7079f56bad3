# ranks: 2
"""Lightning's ModelParallelStrategy with compressed communication."""

import logging
import warnings

import torch
from support.page_programs import run_blocks
from torch.distributed.fsdp import fully_shard

from bagua.fsdp import compress_communication

warnings.filterwarnings("ignore")  # Lightning's, about workers of loaders and such
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

from lightning.pytorch import LightningModule

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
        self.layer = torch.nn.Linear(8, 64)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)

run_blocks("docs/how-to/train/compress-fsdp.md", 7)

assert trainer.global_step == 4
assert trainer.lightning_module.compression.statistics["gradients"]["saved"] > 0
