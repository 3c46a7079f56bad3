"""save_checkpoint, and the same in the background. Called by all ranks, on the thread that trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.job.waiting import called_for
from bagua.torch_api.checkpoint import durable_files, layout, staging
from bagua.torch_api.checkpoint.agreement import Ranks, ranks_of
from bagua.torch_api.checkpoint.contents import complete_exchange, contents_of, subject_of
from bagua.torch_api.checkpoint.pending import PendingCheckpoint, finish_last, set_last

_UNCHANGED = (
    "Nothing was published: the latest checkpoint in {root} is the former one.\n"
    "Correct the cause on that rank, and save again. All ranks need the same file system at this path."
)


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
    save = _prepared(
        iteration, checkpoints_path, model, optimizer, lr_scheduler, keep_last, per_rank, process_group, False
    )
    save()


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
        TypeError: `iteration` is not an integer.
        ValueError: `iteration` is negative, or `keep_last` is below 1.
    """
    save = _prepared(
        iteration, checkpoints_path, model, optimizer, lr_scheduler, keep_last, per_rank, process_group, True
    )
    pending = PendingCheckpoint(save, iteration)
    set_last(pending)
    return pending


def _prepared(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    lr_scheduler: Any,
    keep_last: int | None,
    per_rank: bool | None,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None,
    in_background: bool,
) -> Callable[[], None]:
    """What saves. An error of this rank alone is raised by that: the other ranks would wait."""
    _check(iteration, keep_last)
    subject = subject_of(model)
    complete_exchange(subject)
    error = finish_last()
    ranks = ranks_of(process_group, subject.process_group)
    each_writes = not subject.keeps_replicas_equal if per_rank is None else per_rank
    contents: dict[str, Any] = {}
    wait: Callable[[], None] = _nothing
    try:
        contents = contents_of(subject, optimizer, lr_scheduler, iteration, ranks.rank, ranks.size, each_writes)
        if in_background:
            contents, wait = staging.staged(contents)
        else:
            contents = staging.compact(contents)
    except Exception as problem:
        error = error or problem
    return lambda: _save(ranks, Path(checkpoints_path), iteration, contents, wait, keep_last, error)


def _save(
    ranks: Ranks,
    root: Path,
    iteration: int,
    contents: dict[str, Any],
    wait: Callable[[], None],
    keep_last: int | None,
    error: Exception | None,
) -> None:
    unchanged = _UNCHANGED.format(root=root)
    ranks.agree(f"prepare checkpoint {iteration}", error, unchanged)
    asked = ranks.gather(iteration, f"comparing the iterations of checkpoint {iteration}")
    if len(set(asked)) > 1:
        raise ValueError(
            f"The ranks save different iterations: {asked}, by rank.\n"
            f"Nothing was written to {root}.\n"
            "Call save_checkpoint() on all ranks with the same iteration."
        )
    ranks.by_first(f"prepare checkpoint {iteration}", lambda: durable_files.begin(root, iteration), unchanged)
    try:
        wait()
        folder = layout.folder_of(root, iteration, layout.PARTIAL)
        for name, content in contents.items():
            durable_files.write_state(folder / name, content)
    except Exception as problem:
        error = problem
    try:
        ranks.agree(f"write checkpoint {iteration}", error, unchanged)
    except Exception:
        if ranks.rank == 0:
            durable_files.give_up(root, iteration)
        raise
    ranks.by_first(
        f"publish checkpoint {iteration}",
        lambda: durable_files.publish(root, iteration, keep_last),
        f"The latest checkpoint in {root} is this one or the former one; both are complete, if they are there.\n"
        "Check the permissions of the folder, and save again.",
    )


def _check(iteration: int, keep_last: int | None) -> None:
    if isinstance(iteration, bool) or not isinstance(iteration, int):
        raise TypeError(f"iteration is {iteration!r}, must be an integer, such as 1000")
    if iteration < 0:
        raise ValueError(f"iteration={iteration}: must be at least 0")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: must be at least 1; None keeps all checkpoints")


def _nothing() -> None:
    return None
