"""Ranks that save or load together: all succeed, or all raise the same error. Owned by one save or load.

Small messages in a gloo group of their own, so that a thread can save while training communicates. Under regroup, in
the default group, as other collectives of a program: so they raise Regrouped, and no thread can save.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bagua.collectives.object_collectives import all_gather_object, broadcast_object
from bagua.collectives.process_group import BaguaProcessGroup, group_for, is_initialized, to_bagua_process_group
from bagua.job.failure_report import failures_named

_Value = TypeVar("_Value")


class Ranks:
    """
    Args:
        group: those that act together; None: this process alone.

    Attributes:
        rank: of this process, in the group.
        size: of the group.
        follows: these ranks change when some are lost, and a thread cannot communicate between them.
    """

    def __init__(self, group: BaguaProcessGroup | None) -> None:
        self.follows = group is not None and group.follows
        if group is not None and group.size > 1 and not self.follows:
            group = group_for("checkpoints", group, "gloo")
        self._group = None if group is None or group.size == 1 else group
        self._comm = None if self._group is None else self._group.get_global_communicator()
        self.rank = 0 if self._comm is None else self._comm.rank()
        self.size = 1 if self._comm is None else self._comm.nranks()

    def agree(self, what: str, error: Exception | None, consequence: str) -> None:
        """All ranks call it.

        Args:
            what: was done, for the message: "write its part of checkpoint 20".
            error: of this rank.
            consequence: what is true if a rank has failed, and what to do: the last lines of the message.

        Raises:
            RuntimeError: a rank has failed; names the first.
            CollectiveError: a rank is gone.
        """
        told = None if error is None else (socket.gethostname(), f"{type(error).__name__}: {error}")
        if self._comm is None:
            results = [told]
        else:
            with failures_named(self._comm, f"waiting until every rank could {what}"):
                results = all_gather_object(told, self._comm)
        failed = [(rank, one) for rank, one in enumerate(results) if one is not None]
        if not failed:
            return
        rank, (host, text) = failed[0]
        who = "This process" if self._comm is None else f"Rank {self._comm.ranks[rank]} (host {host})"
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RuntimeError(f"{who}{more} could not {what}: {text.rstrip('.')}.\n{consequence}") from error

    def by_first(self, what: str, function: Callable[[], _Value], consequence: str) -> _Value:
        """Rank 0 calls the function. All ranks call this.

        Returns:
            what it returned, on all ranks.

        Raises:
            RuntimeError: rank 0 has failed.
            CollectiveError: a rank is gone.
        """
        value: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                value = function()
            except Exception as problem:
                error = problem
        self.agree(what, error, consequence)
        if self._comm is not None:
            with failures_named(self._comm, f"waiting until rank 0 could {what}"):
                value = broadcast_object(value, 0, self._comm)
        result: _Value = value
        return result

    def gather(self, value: _Value, what: str) -> list[_Value]:
        """The values of all ranks, which call it together.

        Raises:
            CollectiveError: a rank is gone.
        """
        if self._comm is None:
            return [value]
        with failures_named(self._comm, what):
            return all_gather_object(value, self._comm)


def ranks_of(group: BaguaProcessGroup | dist.ProcessGroup | None, engine_group: BaguaProcessGroup | None) -> Ranks:
    """
    Args:
        group: the caller's; None: that of the engine or, without one, the default group, or this process alone.

    Raises:
        TypeError: `group` is not a process group.
    """
    if group is None:
        group = engine_group
    if group is None and not is_initialized() and not dist.is_initialized():
        return Ranks(None)
    return Ranks(to_bagua_process_group(group))
