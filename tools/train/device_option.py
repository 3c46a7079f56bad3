"""What `--device auto`, `cuda` or `cpu` comes to with a number of ranks, and whether they share GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from bagua.net.bench.gpu_sharing import GpuSharing, sharing_of


@dataclass(frozen=True)
class ChosenDevice:
    type: str  # "cuda" or "cpu"
    sharing: GpuSharing | None = None  # of GPUs, where there are more ranks


def add_sharing_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="give a GPU to several ranks where there are more ranks than GPUs; NCCL then takes each for a host of its"
        " own",
    )


def chosen_device(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    gpus: Callable[[], int] | None = None,
    *,
    ranks_option: str = "--nproc-per-node",
    auto_is_cuda_with_any: bool = False,
) -> ChosenDevice:
    """
    Ends the program if there are fewer GPUs than ranks that are to have one.

    Args:
        given: with `device`, `share_gpus` and the ranks.
        gpus: counts them; by default `count_gpus`.
        ranks_option: the number of ranks.
        auto_is_cuda_with_any: by default `auto` is CUDA only with a GPU for each rank, or one that they share.
    """
    ranks = getattr(given, ranks_option.removeprefix("--").replace("-", "_"))
    found = (gpus or count_gpus)() if given.device != "cpu" else 0
    auto_needs = 1 if auto_is_cuda_with_any or given.share_gpus else ranks
    is_cuda = given.device == "cuda" or (given.device == "auto" and found >= auto_needs)
    if not is_cuda:
        return ChosenDevice("cpu")
    if found < ranks and not (found and given.share_gpus):
        share = "add --share-gpus to have several ranks on a GPU, " if found else ""
        parser.error(
            f"{ranks_option} {ranks} needs as many GPUs, this machine shows {found}; lower it, {share}or use"
            " --device cpu"
        )
    return ChosenDevice("cuda", sharing_of(ranks, found))


def device_text(name: object, sharing: GpuSharing | None) -> str:
    """What ranks computed on, for a heading."""
    return str(name) if sharing is None else f"{name}, {sharing}"


def count_gpus() -> int:
    """Those that torch would use: a driver without them, or hidden ones, are none."""
    import torch

    return torch.cuda.device_count()
