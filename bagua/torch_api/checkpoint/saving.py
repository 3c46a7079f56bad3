"""save_checkpoint, and the same in the background. Called by all ranks, on the thread that trains."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.job.waiting import called_for
from bagua.torch_api.checkpoint import durable_files
from bagua.torch_api.checkpoint.agreement import Ranks, ranks_of
from bagua.torch_api.checkpoint.contents import complete_exchange, contents_of, subject_of

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
            contents, wait = staged(contents)
        else:
            contents = compact(contents)
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
        folder = durable_files.folder_of(root, iteration, durable_files.PARTIAL)
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


_logger = logging.getLogger("bagua")


class PendingCheckpoint:
    """What `async_save_checkpoint` returns.

    Args:
        job: what saves.
        iteration: of the checkpoint.
    """

    def __init__(self, job: Callable[[], None], iteration: int) -> None:
        self.iteration = iteration
        self._job = job
        self._error: Exception | None = None
        self._is_told = False
        # No daemon: a program that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"bagua-checkpoint-{iteration}")
        self._thread.start()

    def done(self) -> bool:
        """Whether it is saved, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is saved on all ranks.

        Args:
            timeout_s: None: until it is done, which takes the timeout of the process group where ranks are gone.

        Raises:
            RuntimeError: saving has failed, on any rank; names the rank.
            TimeoutError: it is not done in time. It goes on.
        """
        self._thread.join(timeout_s)
        if not self.done():
            raise TimeoutError(
                f"Checkpoint {self.iteration} was not saved within {timeout_s:g} s.\n"
                "It is still being written in the background.\n"
                "Wait longer, or save less often."
            )
        error = self._take_error()
        if error is not None:
            raise error

    def _take_error(self) -> Exception | None:
        """Once: what nobody has been told yet. It must be done."""
        error = None if self._is_told else self._error
        self._is_told = True
        return error

    def _join(self) -> None:
        """Until it is done, saved or not."""
        self._thread.join()

    def _run(self) -> None:
        job, self._job = self._job, _nothing  # and with it the copies
        try:
            job()
        except Exception as error:
            self._error = error
            _logger.error(f"checkpoint {self.iteration} was not saved: {error}")


_last: PendingCheckpoint | None = None


def set_last(pending: PendingCheckpoint) -> None:
    """`finish_last` is about this one."""
    global _last
    _last = pending


def finish_last() -> Exception | None:
    """Wait for the one that was begun last; its error, if nobody was told."""
    global _last
    last, _last = _last, None
    if last is None:
        return None
    last._join()
    return last._take_error()


def compact(state: Any) -> Any:
    """The same tensors, but copies of those that share memory with what is not saved: torch.save writes it all."""
    return _mapped(state, lambda tensor: tensor.detach().clone() if _is_part(tensor) else tensor.detach())


def staged(state: Any) -> tuple[Any, Callable[[], None]]:
    """
    A copy in the host's memory. Copies from a GPU are queued on the current stream, in front of whatever changes the
    tensors next: nobody waits here.

    Returns:
        the copy, and what waits until it is complete.
    """
    devices: set[torch.device] = set()

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        devices.add(tensor.device)
        return tensor.to("cpu", non_blocking=True)  # into pinned memory

    result = _mapped(state, copied)
    events = [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"]

    def wait() -> None:
        for event in events:
            with torch.cuda.device(event.device):  # this thread may use no GPU, and would begin to use the first one
                event.synchronize()

    return result, wait


def _is_part(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize


def _mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Tensors that are the same remain the same: tied weights are written once."""
    known: dict[tuple[object, ...], Tensor] = {}

    def of_tensor(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.data_ptr() == 0:  # empty, or a subclass that wraps others
            return function(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in known:
            known[key] = function(tensor)
        return known[key]

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return of_tensor(value)
        if isinstance(value, dict):
            result = copy.copy(value)
            for key, one in value.items():
                result[key] = walk(one)
            if hasattr(value, "_metadata"):  # versions of layers, which load_state_dict reads
                result._metadata = copy.deepcopy(value._metadata)  # type: ignore[attr-defined]
            return result
        if type(value) in (list, tuple):
            return type(value)(walk(one) for one in value)
        return copy.deepcopy(value)

    return walk(state)
