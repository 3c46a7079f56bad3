"""One torch.distributed group, seen as Bagua's communicator. Owned by its BaguaProcessGroup; any thread may use it."""

from __future__ import annotations

import contextlib
import copy
import datetime
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from bagua.collectives.carrier_device import carrier, gpu_for
from bagua.job import torch_internals
from bagua.job.deadlock import Operation, OperationOrder, told
from bagua.job.failure_report import failures_named, is_communication_error, is_named_around
from bagua.job.job_thread import waiting_for
from bagua.rank_list import rank_list

_ABORT_CHECK = datetime.timedelta(milliseconds=200)
COMPARED = 16  # collectives of a communicator, before a program does the same again and again
TEXT_BYTES, MAX_SIDES = 96, 8


class TorchGroupReference:
    """
    A torch group that is not kept alive: torch holds it until it is destroyed, and Bagua's map of adopted groups must
    empty then. A second reference from here would be a cycle that nothing can collect.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = weakref.ref(group)
        self._what = what
        self._size = group.size()

    @property
    def is_alive(self) -> bool:
        return self._group() is not None

    def get(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"The torch process group under {self._what} has been destroyed.\n"
                "Call bagua.torch_api.init_process_group() again, make new groups, and wrap modules again."
            )
        if group.size() != self._size:  # torch's own groups change it from 2.14 on
            raise RuntimeError(
                f"The torch process group under {self._what} has {group.size()} ranks now. It had {self._size} when"
                " Bagua took it, and Bagua does not follow ProcessGroup.reconfigure.\n"
                "To go on without lost ranks, use init_process_group(regroup=Regroup()) of bagua.torch_api. Or destroy"
                " the group, begin anew with other ranks, and wrap modules again."
            )
        return group


class BaguaCommunicator:
    """
    A thin view of one torch group. Ranks are positions in the group, unless named global.

    Attributes:
        ranks: global ranks, by rank of the communicator.
        group_name: of the Bagua group that it belongs to.
        kind: "global", "intra-node", "inter-node" or "background".
        timeout: of a collective on the CPU.
        operations: its collectives, which all members begin in the same order.
    """

    def __init__(
        self,
        torch_group: dist.ProcessGroup,
        ranks: Sequence[int],
        group_name: str,
        kind: str,
        stream: Callable[[torch.device | None], torch.cuda.Stream | None],
        timeout: datetime.timedelta,
        bound: torch.device | None = None,
        operations: OperationOrder | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.group_name = group_name
        self.kind = kind
        self.timeout = timeout
        self._reference = TorchGroupReference(torch_group, f"{kind} communicator of group {group_name}")
        self._rank = torch_group.rank()
        self._stream = stream
        self._bound = bound
        self._gpu: torch.device | None = None
        # Shared by all that `on` returns.
        self.operations = operations or OperationOrder(f"{group_name}/{kind}")
        self._aborted = threading.Event()
        self._followers: weakref.WeakSet[BaguaCommunicator] = weakref.WeakSet()
        self._by_gpu: weakref.WeakValueDictionary[torch.device, BaguaCommunicator] = weakref.WeakValueDictionary()
        self._compared = 0

    def follow(self, torch_group: dist.ProcessGroup, ranks: Sequence[int], operations: OperationOrder) -> None:
        """Be of these ranks from now on, see `BaguaProcessGroup.follow`. So are those that `on` has returned."""
        reference = TorchGroupReference(torch_group, f"{self.kind} communicator of group {self.group_name}")
        for one in (self, *self._by_gpu.values()):
            one.ranks, one.operations = tuple(ranks), operations
            one._reference, one._rank = reference, torch_group.rank()
            one._compared = 0
        self._aborted.clear()

    def on(self, gpu: torch.device | None) -> BaguaCommunicator:
        """The same communicator, for a module on this GPU: `device` and `cuda_stream` are the module's. It is aborted
        when this one is. None: this one."""
        if gpu is None:
            return self
        found = self._by_gpu.get(gpu)
        if found is None:
            found = copy.copy(self)
            found._gpu = gpu
            found = self._by_gpu.setdefault(gpu, found)
        return found

    @property
    def device(self) -> torch.device:
        """Where what has no tensor of the caller's is carried: [Note: the device of a communicator]."""
        return carrier(torch_internals.device_types(self.torch_group), self._gpu, self._bound)

    @property
    def gpu(self) -> torch.device:
        """Likewise, where it must be a GPU."""
        return gpu_for(self._gpu, self._bound)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """Raises RuntimeError if it has been destroyed."""
        return self._reference.get()

    @property
    def cuda_stream(self) -> torch.cuda.Stream | None:
        """The group's stream, for work in parallel with the caller's; None without CUDA."""
        return self._stream(self._gpu)

    def rank(self) -> int:
        """Of this process in the group."""
        return self._rank

    def nranks(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def peers(self) -> list[int]:
        """The other members, from the next one on: nobody is everybody's first."""
        ranks = self.nranks()
        return [(self._rank + distance) % ranks for distance in range(1, ranks)]

    def barrier(self) -> None:
        """
        Returns when every member has called it.

        Raises:
            CollectiveError: a member is gone, or the network failed.
            RuntimeError: `abort` was called in this process.
        """
        self.raise_if_aborted("barrier")
        group = self.torch_group
        types = torch_internals.device_types(group)
        if "cpu" in types:
            # Not dist.barrier, which takes the group's first backend: NCCL's needs a GPU and blocks a stream only.
            # On the CPU whatever torch.set_default_device says: what runs elsewhere is not waited for here.
            self.compare_first("barrier")
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self.perform("barrier", token.device, dist.all_reduce, token)
        else:
            with under_way(self, "barrier", position=self.operations.begin("barrier")):
                device = self.device
                dist.barrier(group=group, device_ids=[device.index])
                torch.cuda.current_stream(device).synchronize()

    def compare_first(self, what: str, like: torch.Tensor | None = None, has_size: bool = True) -> None:
        """
        Whether all ranks call the same: in the first COMPARED collectives of the communicator that users call, on CPUs.
        gloo ends a process to which more is sent than it expects, and mixes up what has the same number of bytes.

        Args:
            what: is called. On CPUs, if no tensor says otherwise.
            like: a tensor of the same dtype on all ranks.
            has_size: it has the same size, too.

        Raises:
            ValueError: they do not, on all ranks. Nothing else was sent.
        """
        if self._compared == COMPARED:
            return
        if len(self.ranks) == 1 or (like is not None and like.device.type != "cpu"):
            return
        self._compared += 1
        mine = what if like is None else told((what, like.numel() if has_size else None, like.dtype))
        digest = zlib.crc32(mine.encode())
        extremes = torch.tensor([digest, -digest], device="cpu")
        self.perform(mine, extremes.device, dist.all_reduce, extremes, op=dist.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            return
        text = torch.tensor([*mine.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)], dtype=torch.uint8, device="cpu")
        texts = text.new_empty(len(self.ranks), TEXT_BYTES)
        self.perform(mine, extremes.device, torch_internals.all_gather_flat, texts.view(-1), text)
        ranks_of: defaultdict[str, list[int]] = defaultdict(list)
        for rank, one in zip(self.ranks, texts.tolist(), strict=True):
            ranks_of[bytes(one).decode(errors="replace").rstrip()].append(rank)
        sides = ", ".join(f"{rank_list(ranks)} {text}" for text, ranks in list(ranks_of.items())[:MAX_SIDES])
        raise ValueError(
            f"The ranks call different collectives: {sides}.\n"
            f"Group {self.group_name}, {rank_list(self.ranks)}, collective {self._compared} of its {self.kind}"
            " communicator.\n"
            "Make the same calls on all ranks, with tensors of the same dtype and size. (The first"
            f" {COMPARED} collectives are compared.)"
        )

    def perform(
        self,
        what: str,
        like: torch.Tensor | torch.device,
        operation: Callable[..., dist.Work | None],
        *arguments: Any,
        **named: Any,
    ) -> None:
        """
        A collective of torch.distributed; it is done on return on the CPU, on a GPU the current stream waits for it.

        Args:
            what: is done, for errors: "all_reduce".
            like: a tensor whose dtype and size are the same on all ranks; or where its tensors are, if there is none.
            operation: of torch.distributed; is given the other arguments, and the group.

        Raises:
            CollectiveError: a member is gone, or the network failed.
            RuntimeError: `abort` was called in this process.
        """
        name: Operation = what
        device = like
        if isinstance(like, torch.Tensor):
            name, device = (what, like.numel(), like.dtype), like.device
        if device.type == "cpu":
            try:
                work = operation(*arguments, **named, group=self.torch_group, async_op=True)
                position = self.operations.begin(name)
                self.finish(work, name, position)
                self.operations.done = position
            except Exception as error:
                self.name_failure(error, told(name))
                raise
        else:
            # With TORCH_NCCL_BLOCKING_WAIT, errors are raised by waits, which synchronous calls leave out.
            is_waited_for = torch_internals.is_nccl_waited_for()
            position = self.operations.begin(name)
            with under_way(self, what, position=position):
                work = operation(*arguments, **named, group=self.torch_group, async_op=is_waited_for)
                if is_waited_for and work is not None:
                    work.wait()
            self.operations.done = position

    def finish(
        self, work: dist.Work | None, what: Operation = "a collective under way", position: int | None = None
    ) -> None:
        """
        Waits on the CPU for a collective that gloo carries out. (Of NCCL's, let a stream wait: `work.wait()`.)

        Args:
            what: is done, for errors.
            position: of it in `operations`; None: it is not counted there.

        Raises:
            RuntimeError: `abort` was called, or it failed: the backend's error, or a CollectiveError if it took long.
        """
        if work is not None and not self._is_done(work, what):
            # Others may have lost a rank by now, and ask. Most collectives are over before, and need not say so.
            with under_way(self, told(what), position=position):
                while not self._is_done(work, what):
                    pass

    def _is_done(self, work: dist.Work, what: Operation) -> bool:
        """Waits for a while: `abort` may come before gloo has begun, and then ends nothing that we wait for."""
        try:
            work.wait(_ABORT_CHECK)
        except RuntimeError:
            self.raise_if_aborted(told(what))
            if not work.is_completed():
                return False
            work.wait()  # its own error, if that above was the end of our patience just before it was done
        return True

    def name_failure(
        self, error: Exception, what: str, ranks: Sequence[int] | None = None, join_helps: bool = True
    ) -> None:
        """
        Of a collective that has failed. Returns if there is nothing to say: the error is not of communication, or this
        thread is within `failures_named`, which knows what the collective is part of.

        Args:
            what: was done: "all_reduce".
            ranks: the global ranks that took part; None: all of the communicator.
            join_helps: as of `failures_named`.

        Raises:
            CollectiveError: names the ranks that are gone; chained from `error`.
            RuntimeError: instead, if `abort` was called in this process.
        """
        if is_communication_error(error):
            self.raise_if_aborted(what)
            if not is_named_around():
                with failures_named(self, what, ranks, join_helps=join_helps):
                    raise error

    def abort(self) -> None:
        """
        Ends what is under way in this process, within a fraction of a second, whether the backend is gloo or NCCL;
        later collectives raise. So does what `add_follower` was told: with the global communicator of a group, all its
        communicators. The connections are closed, so that calls of the other members fail, too.
        """
        if self._aborted.is_set():
            return
        self._aborted.set()
        if self._reference.is_alive:
            torch_internals.abort_group(self.torch_group)
        for follower in list(self._followers):
            follower.abort()

    def add_follower(self, follower: BaguaCommunicator) -> None:
        """`abort` reaches this one, too: it carries a part of what is done for this communicator's users."""
        self._followers.add(follower)
        if self._aborted.is_set():
            follower.abort()

    def check_abort(self) -> bool:
        """Whether `abort` was called in this process."""
        return self._aborted.is_set()

    def raise_if_aborted(self, what: str) -> None:
        """
        Args:
            what: would be done, for the message.

        Raises:
            RuntimeError: `abort` was called in this process.
        """
        if self._aborted.is_set():
            raise RuntimeError(
                f"{what} on the {self.kind} communicator of group {self.group_name}: it was aborted; make a new group"
            )

    def __repr__(self) -> str:
        return f"BaguaCommunicator({self.kind} of group {self.group_name}, rank {self._rank} of {self.ranks})"


def under_way(
    comm: BaguaCommunicator, what: str, ranks: Sequence[int] | None = None, position: int | None = None
) -> contextlib.AbstractContextManager[object]:
    """
    Around what keeps this thread within torch.distributed until it is done, or for as long as NCCL takes to connect:
    `failures_named`, unless this thread is within it already. What NCCL says later, on the GPU, is not for Python.

    Args:
        what: is being done, for messages: "recv from rank 1".
        ranks: the global ranks that take part; None: all of the communicator.
        position: of it in the communicator's `operations`; None: it is not counted there.

    Raises:
        CollectiveError, RuntimeError: as `BaguaCommunicator.name_failure`.
    """
    if not is_named_around():
        return failures_named(comm, what, ranks, position=position)
    waiting = None
    if position is not None:
        # Which collective it is that the thread waits for. What it is part of names failures, and can be ended.
        waiting = waiting_for(comm.ranks, what, comm, comm.operations, position, is_ended_by_abort=False)
    return waiting or contextlib.nullcontext()


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
    """
    Attributes:
        WORLD: stands for the global communicator of the default group where a collective takes a communicator.
        NON_COMM_MEMBER: what a process gets instead of a communicator that it is no member of.
    """

    WORLD: Final[Any] = object()
    NON_COMM_MEMBER: Final[BaguaCommunicator] = _NonMember()
