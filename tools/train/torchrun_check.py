"""Of scripts that are one rank: were they started as one, and on which device is it?"""

from __future__ import annotations

import argparse
import os

import torch

import bagua.torch_api as bagua

# That these scripts read, by themselves or through bagua.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def require_torchrun(parser: argparse.ArgumentParser, script: str) -> None:
    """Ends the program if no launcher said which rank it is: it would measure one process that talks to nobody."""
    if lacking := [name for name in _VARIABLES if not os.environ.get(name)]:
        verb = "is" if len(lacking) == 1 else "are"
        parser.error(
            f"{', '.join(lacking)} {verb} not set; start it with torchrun: torchrun --nproc-per-node 2"
            f" tools/train/{script}"
        )


def device_of_rank(parser: argparse.ArgumentParser, choice: str) -> torch.device:
    """What `--device auto`, `cuda` or `cpu` is for this rank; a GPU is made the current one. Ends the program if there
    is none for it."""
    if choice == "cuda" and torch.cuda.device_count() < bagua.get_local_size():
        parser.error(
            f"--device cuda needs a GPU for each of the {bagua.get_local_size()} ranks of this node, and torch sees"
            f" {torch.cuda.device_count()}; lower --nproc-per-node, or use --device cpu"
        )
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", bagua.get_local_rank())
    torch.cuda.set_device(device)
    return device
