"""The ranks that average their parameters in the background, as the thread that does it talks to them.

A torch group of its own: what the thread sends never mixes with what the training thread sends meanwhile. gloo carries
what is agreed upon, also where the parameters are on GPUs: a rank that is late then keeps a thread of the others
waiting, and no kernel on their GPUs. One thread at a time uses it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.object_collectives import all_gather_object
from bagua.collectives.process_group import BaguaProcessGroup, duplicate_group
from bagua.job import torch_internals
from bagua.job.failure_report import explain_failure, failures_named

_SUM = "averaging the parameters"
FIRST_LOOK_S = 0.0005  # at an event of the GPU; doubles each time
LONGEST_LOOK_S = 0.002


class AveragingGroup:
    """
    Args:
        owned: the torch group under it, if it was made for this alone: it is kept alive, and `destroy` destroys it.
        communicator: the group's for the module whose parameters are averaged; None: for none.
    """

    def __init__(
        self,
        group: BaguaProcessGroup,
        owned: dist.ProcessGroup | None = None,
        communicator: BaguaCommunicator | None = None,
    ) -> None:
        self.group = group
        self.ranks = group.size
        self._owned = owned
        self._communicator = communicator or group.get_global_communicator()

    @property
    def name(self) -> str:
        """The same on all ranks, and of no other group."""
        return self._communicator.torch_group.group_name

    @property
    def is_registered(self) -> bool:
        """False after torch.distributed was shut down."""
        try:
            return len(dist.get_process_group_ranks(self._communicator.torch_group)) == self.ranks
        except (KeyError, RuntimeError):
            return False

    def agree(self, values: Sequence[int], what: str = "agreeing on the next average of the parameters") -> list[int]:
        """The minimum over the ranks of each value. Waits for all ranks.

        Args:
            what: it is about, for errors.

        Raises:
            CollectiveError: a rank is gone.
            RuntimeError: `abort` was called.
        """
        flags = torch.tensor(values, dtype=torch.int64, device=self._communicator.device)
        self._all_reduce(flags, dist.ReduceOp.MIN, what)
        return [int(value) for value in flags.tolist()]

    def sum(self, tensor: Tensor) -> None:
        """The sum over the ranks, in place: on CPU on return, with CUDA on the current stream. Raises as `agree`."""
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            self._all_reduce(real, dist.ReduceOp.SUM, _SUM)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        with failures_named(self.group, what, join_helps=False):
            self._communicator.raise_if_aborted(what)
            work = self._communicator.torch_group.allreduce([tensor], options)
            if tensor.device.type == "cpu":
                self._communicator.finish(work)
            else:
                work.wait()

    def finish(self, stream: torch.cuda.Stream) -> None:
        """Waits on the host for all that was queued on `stream`, in a way that `abort` ends.

        Raises:
            CollectiveError: a sum lost a rank. Its kernels still wait on the GPU, and nothing that follows them there
                will run.
            RuntimeError: `abort` was called.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        pause = FIRST_LOOK_S
        with failures_named(self.group, _SUM, join_helps=False):  # so that this rank answers those who ask who is there
            while not event.query():  # type: ignore[no-untyped-call]
                self._communicator.raise_if_aborted(_SUM)
                if (error := torch_internals.backend_error(self._communicator.torch_group)) is not None:
                    raise explain_failure(error, self.group, _SUM, join_helps=False)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK_S)

    def abort(self) -> None:
        """End what is under way in this process, from any thread; the other ranks' next call fails when they notice."""
        self._communicator.abort()

    def destroy(self) -> None:
        """Give connections and threads back. The ranks have agreed that nothing follows, and that all of them call
        this: NCCL ends a communicator together with those of the other ranks on the node, and waits for them."""
        owned, self._owned = self._owned, None
        if owned is not None and self.is_registered:
            dist.destroy_process_group(owned)


# Of owners that are gone on this rank.
_abandoned: list[AveragingGroup] = []


def destroyed_after(owner: object, group: AveragingGroup) -> Callable[[], object]:
    """When `owner` is gone, the group is destroyed: not at once, for garbage is collected anywhere, and not on every
    rank at the same time, but when the ranks make the next one and all of them have lost it. No thread uses it any more
    by then. Returns what takes this back."""
    finalizer = weakref.finalize(owner, _abandoned.append, group)
    finalizer.atexit = False
    return finalizer.detach


def create_averaging_group(group: BaguaProcessGroup, device: torch.device) -> AveragingGroup:
    """
    Every member calls it.

    Raises:
        RuntimeError: torch was built without gloo.
    """
    if not dist.is_gloo_available():
        raise RuntimeError("averaging in the background needs gloo, which this build of torch does not have")
    backend = "gloo"
    if device.type != "cpu":
        theirs = torch_internals.backend_name(group.get_global_communicator().torch_group, device)
        backend = "gloo" if theirs == "gloo" else f"cpu:gloo,{device.type}:{theirs}"
    twin = duplicate_group(group, backend)
    _destroy_what_all_abandoned(twin)
    return AveragingGroup(twin, twin.torch_group)


def _destroy_what_all_abandoned(group: BaguaProcessGroup) -> None:
    """Among the groups of the same ranks as this one, on every one of them in the same order."""
    mine = {}
    for one in list(_abandoned):  # finalizers append to it at any time, on any thread
        if not one.is_registered:
            _abandoned.remove(one)
        elif one.group.ranks == group.ranks:
            mine[one.name] = one
    by_rank = all_gather_object(list(mine), group.get_global_communicator())
    for name in sorted(set.intersection(*map(set, by_rank))):
        _abandoned.remove(mine[name])
        mine[name].destroy()
