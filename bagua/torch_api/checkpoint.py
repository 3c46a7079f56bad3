"""Checkpoints of training: written so that a crash never damages the latest, read alike by all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.tensor import record_of
from bagua.contrib.checkpoint import saving
from bagua.contrib.checkpoint.contents import Subject
from bagua.contrib.checkpoint.loading import load
from bagua.contrib.checkpoint.saving import PendingCheckpoint
from bagua.contrib.checkpoint.state_names import unwrapped
from bagua.engine.data_parallel import DataParallelEngine, engine_named
from bagua.job.waiting import called_for
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel
from bagua.torch_api.wrap_summary import configure_logging

__all__ = ["PendingCheckpoint", "async_save_checkpoint", "load_checkpoint", "save_checkpoint"]


@called_for("save_checkpoint")
def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    *,
    keep_last: int | None = None,
    per_rank: bool | None = None,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
) -> None:
    """
    Write a checkpoint, and return when it is on the disk and all ranks know that. All ranks call it, between two steps.
    A crash at any moment leaves the latest checkpoint intact.

    Rank 0 writes for all ranks. Where replicas differ (`decentralized`, `low_precision_decentralized`, `async`), every
    rank writes its own states. Experts of a mixture are files of their own, written by the rank that has them.

    Args:
        iteration: 0 or more; an earlier checkpoint of the same iteration is replaced.
        checkpoints_path: a folder on a file system that all ranks see; it is made if it does not exist.
        model: a module, or a DistributedDataParallel; names in the file have no prefix.
        optimizer: whatever has `state_dict`; None: not saved.
        lr_scheduler: likewise.
        keep_last: keep this many checkpoints of iterations up to this one, delete older ones; None: keep all.
        per_rank: every rank writes its own states, or rank 0 for all; None: as the algorithm of `model` needs it.
        process_group: Bagua's or torch's; None: the model's or, if it is not wrapped, the default group. Without any
            group, this process alone.

    Raises:
        RuntimeError: a rank could not write, an earlier save in the background has failed, or torch distributes
            parameters over the ranks (FSDP2, tensor parallelism); on all ranks, and names the rank.
        CollectiveError: a rank is gone; names it.
        TypeError: `iteration` is not an integer.
        ValueError: `iteration` is negative, or `keep_last` is below 1; or the iterations of the ranks differ.
    """
    saving.check_arguments(iteration, keep_last)
    arguments = (iteration, Path(checkpoints_path), optimizer, lr_scheduler, keep_last, per_rank, process_group)
    saving.prepared(_subject_of(model), *arguments, in_background=False)()


@called_for("async_save_checkpoint")
def async_save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    *,
    keep_last: int | None = None,
    per_rank: bool | None = None,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
) -> PendingCheckpoint:
    """
    As `save_checkpoint`, but the caller only copies the states into the host's memory, and a thread writes them while
    training goes on. If the former save is not done yet, it is waited for.

    Returns:
        what waits for it. An error is raised by its `wait` or by the next save, and logged in any case. Wait for the
        last one before `destroy_process_group`.

    Raises:
        RuntimeError: the states cannot be read.
        NotImplementedError: under regroup.
        TypeError: `iteration` is not an integer.
        ValueError: `iteration` is negative, or `keep_last` is below 1.
    """
    saving.check_arguments(iteration, keep_last)
    arguments = (iteration, Path(checkpoints_path), optimizer, lr_scheduler, keep_last, per_rank, process_group)
    return saving.start(saving.prepared(_subject_of(model), *arguments, in_background=True), iteration)


@called_for("load_checkpoint")
def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    strict: bool = True,
    *,
    iteration: int | None = None,
    average_replicas: bool = False,
    weights_only: bool = True,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
) -> int:
    """
    Load what `save_checkpoint` wrote. All ranks call it, and load the same iteration: the one that rank 0 finds.

    Load before or after wrapping; where replicas differ, after wrapping with the same algorithm and on as many ranks.
    Other checkpoints may be loaded on any number of ranks; those of experts on any that divides them equally.

    Args:
        checkpoints_path: a folder that all ranks see.
        model: a module, or a DistributedDataParallel.
        optimizer: whatever has `load_state_dict`; None: not loaded.
        lr_scheduler: likewise.
        strict: names of the model's state must be those of the file, the states that are asked for must be there, and
            the optimizer must be of the class that was saved.
        iteration: of the checkpoint; None: the latest.
        average_replicas: where replicas differ, load the mean of all replicas on every rank, and of the states of
            their optimizers, which allows another number of ranks and another algorithm. Load before wrapping.
        weights_only: refuse files that hold more than tensors and plain values: unpickling others runs code from the
            file.
        process_group: Bagua's or torch's; None: the model's or, if it is not wrapped, the default group. Without any
            group, this process alone.

    Returns:
        the iteration; 0 if nothing was saved.

    Raises:
        RuntimeError: a rank could not load; on all ranks, and names the rank and its reason: no such checkpoint, files
            that are missing or do not fit the model, the algorithm or the number of ranks,
            or torch distributes parameters over the ranks (FSDP2, tensor parallelism).
        CollectiveError: a rank is gone; names it.
    """
    configure_logging()  # before anything is read: what it refuses, one rank alone may have in its environment
    options = (iteration, average_replicas, weights_only, process_group)
    return load(_subject_of(model), Path(checkpoints_path), optimizer, lr_scheduler, strict, *options)


def _subject_of(model: nn.Module) -> Subject:
    """
    Args:
        model: a module, wrapped by with_bagua or not, or a DistributedDataParallel, Bagua's or torch's, each compiled
            or not; what contains such modules, or is a part of one.
    """
    known: dict[str, DataParallelEngine] = {}
    for one in model.modules():
        engine = one.inner if isinstance(one, DistributedDataParallel) else one.__dict__.get("bagua_ddp")
        if engine is not None:
            known.setdefault(engine.bagua_module_name, engine)
    # Parameters know who trains them, whatever their module is in.
    records = filter(None, map(record_of, model.parameters()))
    names = dict.fromkeys(record.module_name for record in records if record.module_name is not None)
    training = [known.get(name) or engine_named(name) for name in names]
    engines = tuple(engine for engine in training if engine is not None)
    # Otherwise the outermost of those that trained it, now detached.
    return Subject(unwrapped(model), engines or tuple(known.values())[:1])
