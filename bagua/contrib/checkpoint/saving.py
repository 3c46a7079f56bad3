"""Saves a checkpoint, or a thread does while training goes on. Called by all ranks, on the thread that trains.

One thread at a time in a process writes copies of the states. Without a thread, the tensors at work are written.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.contrib.checkpoint import durable_files
from bagua.contrib.checkpoint.agreement import Ranks, ranks_of
from bagua.contrib.checkpoint.contents import Subject, complete_exchange, contents_of

_logger = logging.getLogger("bagua")
_UNCHANGED = (
    "Nothing was published: the latest checkpoint in {root} is the former one.\n"
    "Correct the cause on that rank, and save again. All ranks need the same file system at this path."
)


def prepared(
    subject: Subject,
    iteration: int,
    root: Path,
    optimizer: Any,
    lr_scheduler: Any,
    keep_last: int | None,
    per_rank: bool | None,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None,
    in_background: bool,
) -> Callable[[], None]:
    """What saves. An error of this rank alone is raised by that: the other ranks would wait.

    Args:
        subject: what is saved; the others are those of `bagua.torch_api.checkpoint.save_checkpoint`.
        in_background: the tensors at work may change before they are written.

    Raises:
        CollectiveError: a rank is gone; names it.
        NotImplementedError: a thread cannot communicate with these ranks.
    """
    complete_exchange(subject)
    error = finish_last()
    ranks = ranks_of(process_group, subject.process_group)
    if in_background and ranks.follows:
        raise NotImplementedError(
            "regroup: async_save_checkpoint() is not supported under regroup: its thread could not follow when a rank"
            " is lost.\n"
            "Call save_checkpoint(), or leave regroup out of init_process_group()."
        )
    each_writes = not subject.keeps_replicas_equal if per_rank is None else per_rank
    contents: dict[str, Any] = {}
    wait: Callable[[], None] | None = None
    try:
        contents = contents_of(subject, optimizer, lr_scheduler, iteration, ranks.rank, ranks.size, each_writes)
        if in_background:
            contents, wait = staged(contents)
        else:
            contents = compact(contents)
    except Exception as problem:
        error = error or problem
    return lambda: _save(ranks, root, iteration, contents, wait, keep_last, error)


def _save(
    ranks: Ranks,
    root: Path,
    iteration: int,
    contents: dict[str, Any],
    wait: Callable[[], None] | None,
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
        if wait is not None:
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


def check_arguments(iteration: int, keep_last: int | None) -> None:
    """
    Raises:
        TypeError: `iteration` is not an integer.
        ValueError: a number is too small.
    """
    if isinstance(iteration, bool) or not isinstance(iteration, int):
        raise TypeError(f"iteration is {iteration!r}, must be an integer, such as 1000")
    if iteration < 0:
        raise ValueError(f"iteration={iteration}: must be at least 0")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: must be at least 1; None keeps all checkpoints")


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
        job = self._job
        del self._job  # with the copies, when it is done
        try:
            job()
        except Exception as error:
            self._error = error
            _logger.error(f"checkpoint {self.iteration} was not saved: {error}")


_last: PendingCheckpoint | None = None


def start(save: Callable[[], None], iteration: int) -> PendingCheckpoint:
    """Begin to save; `finish_last` is about this one."""
    global _last
    _last = PendingCheckpoint(save, iteration)
    return _last


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
