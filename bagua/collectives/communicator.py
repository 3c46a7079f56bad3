"""One torch.distributed group, seen as Bagua's communicator. Owned by its BaguaProcessGroup; any thread may use it."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from bagua.collectives import torch_internals

_ABORT_CHECK = datetime.timedelta(milliseconds=200)


class TorchGroupReference:
    """
    A torch group that is not kept alive: torch holds it until it is destroyed, and Bagua's map of adopted groups must
    empty then. A second reference from here would be a cycle that nothing can collect.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = weakref.ref(group)
        self._what = what

    @property
    def is_alive(self) -> bool:
        return self._group() is not None

    def get(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(f"the torch process group under {self._what} has been destroyed; make a new Bagua group")
        return group


class BaguaCommunicator:
    """A thin view of one torch group. Ranks are positions in the group, unless named global."""

    def __init__(
        self,
        torch_group: dist.ProcessGroup,
        ranks: Sequence[int],
        group_name: str,
        kind: str,
        stream: Callable[[], torch.cuda.Stream | None],
    ) -> None:
        self.ranks = tuple(ranks)
        self.group_name = group_name
        self.kind = kind
        self._reference = TorchGroupReference(torch_group, f"{kind} communicator of group {group_name}")
        self._rank = torch_group.rank()
        self._stream = stream
        self._is_aborted = False

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """Raises RuntimeError if it has been destroyed."""
        return self._reference.get()

    @property
    def cuda_stream(self) -> torch.cuda.Stream | None:
        """The group's stream for work beside the caller's; None without CUDA."""
        return self._stream()

    def rank(self) -> int:
        """Of this process in the group."""
        return self._rank

    def nranks(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def barrier(self) -> None:
        """Returns when every member has called it."""
        self.raise_if_aborted("barrier")
        group = self.torch_group
        types = torch_internals.device_types(group)
        if "cpu" in types:
            # Not dist.barrier, which takes the group's first backend: NCCL's needs a GPU and blocks a stream only.
            # On the CPU whatever torch.set_default_device says: what runs elsewhere is not waited for here.
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self.finish(dist.all_reduce(token, group=group, async_op=True))
        else:
            dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
            torch.cuda.current_stream().synchronize()

    def finish(self, work: dist.Work | None) -> None:
        """
        Waits on the CPU for a collective that gloo carries out. (Of NCCL's, let a stream wait: `work.wait()`.)

        Raises:
            RuntimeError: `abort` was called, or it failed.
        """
        while work is not None:
            try:
                work.wait(_ABORT_CHECK)
                return
            except RuntimeError:
                # gloo cannot be interrupted, so we look up now and then whether we still want to wait.
                if work.is_completed():
                    work.wait()  # its own error, if that above was the end of our patience just before it was done
                    return
                self.raise_if_aborted("a collective under way")

    def abort(self) -> None:
        """
        Ends what is under way in this process, on the CPU within a fraction of a second (but for `send` and `recv`,
        which end with the group's timeout); later collectives raise. The other members are not told.
        """
        if self._is_aborted:
            return
        self._is_aborted = True
        torch_internals.abort_group(self.torch_group)

    def check_abort(self) -> bool:
        """Whether `abort` was called in this process."""
        return self._is_aborted

    def raise_if_aborted(self, what: str) -> None:
        """
        Args:
            what: would be done, for the message.

        Raises:
            RuntimeError: `abort` was called in this process.
        """
        if self._is_aborted:
            raise RuntimeError(
                f"{what} on the {self.kind} communicator of group {self.group_name}: it was aborted; make a new group"
            )

    def __repr__(self) -> str:
        return f"BaguaCommunicator({self.kind} of group {self.group_name}, rank {self._rank} of {self.ranks})"


class _NonMember(BaguaCommunicator):
    """Has the type of a communicator, so that callers need not tell them apart, and none of its attributes."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this process is no member of the communicator, so there is no {name}; compare it with "
            "CommMember.NON_COMM_MEMBER first"
        )

    def __repr__(self) -> str:
        return "CommMember.NON_COMM_MEMBER"


class CommMember:
    """`NON_COMM_MEMBER` is what a process gets instead of a communicator that it is no member of."""

    NON_COMM_MEMBER: Final[BaguaCommunicator] = _NonMember()
