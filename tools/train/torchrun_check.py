"""Of scripts that are one rank: were they started as one?"""

from __future__ import annotations

import argparse
import os

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
