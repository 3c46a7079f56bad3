"""What `--device auto`, `cuda` or `cpu` comes to with `--nproc-per-node` ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def chosen_device(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    gpus: Callable[[], int] | None = None,
    *,
    auto_is_cuda_with_any: bool = False,
) -> str:
    """ "cuda" or "cpu". Ends the program if there are fewer GPUs than ranks that are to have one.

    Args:
        gpus: counts them; by default `count_gpus`.
        auto_is_cuda_with_any: by default `auto` is CUDA only with a GPU for each rank.
    """
    ranks = given.nproc_per_node
    found = (gpus or count_gpus)() if given.device != "cpu" else 0
    auto_needs = 1 if auto_is_cuda_with_any else ranks
    is_cuda = given.device == "cuda" or (given.device == "auto" and found >= auto_needs)
    if is_cuda and found < ranks:
        parser.error(
            f"--nproc-per-node {ranks} needs as many GPUs, this machine shows {found}; lower it, or use --device cpu"
        )
    return "cuda" if is_cuda else "cpu"


def count_gpus() -> int:
    """Those that torch would use: a driver without them, or hidden ones, are none."""
    import torch

    return torch.cuda.device_count()
