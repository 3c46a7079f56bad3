"""Finds out that Accelerate is about to split what a sampler gives, which is the share of one rank already. A function;
the thread that iterates.

Lightning asks whether a sampler is a DistributedSampler. Accelerate asks nothing: who iterates is the only sign of it,
and is looked at once an epoch.
"""

from __future__ import annotations

import sys
from types import FrameType

_MODULE = "accelerate.data_loader"
_SPLITTERS = ("BatchSamplerShard.", "DataLoaderDispatcher.")


def refuse_second_split(rank: int, num_replicas: int) -> None:
    """
    Args:
        rank: whose share the caller is about to give.
        num_replicas: how many shares there are. With one, which is all samples, Accelerate may split them.

    Raises:
        RuntimeError: Accelerate asks for the share, to give this process a part of it.
    """
    frame: FrameType | None = sys._getframe(1) if num_replicas > 1 and _MODULE in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_qualname.startswith(_SPLITTERS):
            raise RuntimeError(
                f"Accelerate splits the samples of rank {rank} once more, by {num_replicas} ranks: only a part of the"
                " dataset would be seen.\n"
                "accelerator.prepare() was given a DataLoader whose sampler has split the dataset already.\n"
                "Leave the DataLoader out of prepare(), and use accelerate.data_loader.prepare_data_loader(loader,"
                " accelerator.device, num_processes=1, process_index=0, put_on_device=True) instead."
            )
        frame = frame.f_back
