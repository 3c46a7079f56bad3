# ranks: 2
"""The example of the API page about Lightning."""

from lightning.pytorch import Trainer
from support.page_programs import run_blocks

options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
run_blocks("docs/reference/api/lightning.md", 1)
assert type(trainer.strategy) is BaguaStrategy
