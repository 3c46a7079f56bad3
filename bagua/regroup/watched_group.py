"""torch's default group under regroup: what torch.distributed's functions call, whoever has imported them. And what
torchft calls within a quorum (bagua.torchft).

A collective that fails because of a peer calls `on_failure`, which raises what the caller gets. torch's own group would
raise gloo's error, and a program could not tell that the job goes on. Collectives go to gloo or NCCL directly, or, if
these have them under no name, by a plain group of torch's. One that other ranks will not call is not begun.

Collectives on GPUs raise nothing where they are queued, and torch's own Work lets a stream wait alone. Here the host
waits as well, but for those of a backward pass (bagua.regroup.nccl_group): a program is told of a loss by the
collective that it has lost.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua.job import torch_internals
from bagua.job.failure_report import is_communication_error
from bagua.job.regrouped import Regrouped
from bagua.regroup.nccl_group import NcclGroup, is_waited_for

OnFailure = Callable[[Exception], None]
WhyNot = Callable[[], RuntimeError | None]

# torch's name of a collective -> gloo's and NCCL's.
_COLLECTIVES = {
    **{
        name: name
        for name in (
            *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base", "alltoall"),
            *("alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource"),
            *("reduce", "reduce_scatter", "_reduce_scatter_base", "scatter", "send"),
        )
    },
    # From torch 2.13 on.
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
# Backends have them in C++ alone. The last two from torch 2.13 on.
_BY_TORCH = (
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
)
# Between two ranks, for which torch makes a communicator of their own on the way, and waits for the other one.
_MESSAGES = ("recv", "recv_anysource", "send")


class WatchedGroup(dist.ProcessGroup):
    """
    Args:
        gloo: its backend for CPUs, connected.
        nccl: what it has for GPUs, connected.
        on_failure: is told an error of communication, on the thread that waits. It raises something else, or returns:
            then the error is raised as it is.
        why_not: asked before each collective: what it raises instead of being begun.
    """

    # Of torch 2.14 on, which would look for them at backends that it knows. Who regroups is Regroup.
    supports_reconfigure = supports_window = False

    def __init__(self, gloo: Any, nccl: NcclGroup | None, on_failure: OnFailure, why_not: WhyNot) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # what subclasses in Python call
        self.gloo, self.nccl = gloo, nccl
        self._on_failure, self._why_not = on_failure, why_not

    @functools.cached_property
    def _plain(self) -> dist.ProcessGroup:
        return torch_internals.plain_group(self.gloo, None if self.nccl is None else self.nccl.backend)

    def _operation(self, name: str, backend: Any) -> Callable[..., dist.Work]:
        operation: Callable[..., dist.Work] = getattr(self._plain if name in _BY_TORCH else backend, name)
        return operation

    # Otherwise that of the class in C++, which asks the backend for nothing either.
    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "gloo" if self.nccl is None else "nccl"

    def abort(self, why: str = "abort() was called") -> None:
        """Ends what is under way in this process. Any thread."""
        if self.nccl is not None:
            self.nccl.leave(why)
        torch_internals.abort_backend(self.gloo)

    def shutdown(self) -> None:
        """By torch, when it is destroyed."""
        if self.nccl is not None and not self.nccl.is_left:
            super().shutdown()


class WatchedWork(dist.Work):
    """A collective under way.

    Args:
        work: gloo's or NCCL's.
        error: it could not even be begun.
        on_failure: as of the group.
        nccl: of the group, if the collective is on a GPU.
    """

    def __init__(
        self,
        work: dist.Work | None,
        error: Exception | None,
        on_failure: OnFailure,
        nccl: NcclGroup | None = None,
    ) -> None:
        super().__init__()
        self._work, self._error, self._on_failure, self._nccl = work, error, on_failure, nccl
        self._raised: Regrouped | None = None  # by a wait before

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """
        Raises:
            Regrouped: a rank was lost.
            RuntimeError: it failed otherwise, or is not done within the timeout.
        """
        if self._raised is not None:
            raise self._raised
        try:
            if self._error is not None:
                raise self._error
            assert self._work is not None
            if self._nccl is None:
                return self._work.wait(timeout) if timeout else self._work.wait()
            self._work.wait()  # a stream does
            if is_waited_for():
                self._nccl.wait()
            return True
        except RuntimeError as error:
            is_over = self._work is None or self._nccl is not None or self._work.is_completed()
            if is_over and is_communication_error(error):
                try:
                    self._on_failure(error)
                except Regrouped as regrouped:
                    self._raised = regrouped
                    raise
            raise

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self._work is not None and self._work.is_success()

    def exception(self) -> Any:
        return self._error if self._work is None else self._work.exception()

    def source_rank(self) -> int:
        return -1 if self._work is None else self._work._source_rank()

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        assert self._work is not None
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Of a collective that has none, as gloo's reduce-scatters, one that is done: this waits."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):
                return self._work.get_future()
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            self.wait()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)
        return future


def _collective(name: str) -> Callable[..., Any]:
    def collective(self: WatchedGroup, *arguments: Any, **named: Any) -> WatchedWork:
        work: dist.Work | None = None
        failure: Exception | None = self._why_not()
        if failure is not None:
            return WatchedWork(None, failure, self._on_failure)
        nccl = self.nccl if self.nccl is not None and _is_on_gpu((*arguments, *named.values())) else None
        try:
            if nccl is None:
                work = self._operation(name, self.gloo)(*arguments, **named)
            else:
                work = _queued(nccl, name, self._operation(name, nccl.backend), arguments, named)
        except RuntimeError as error:
            if not is_communication_error(error):
                raise
            failure = error  # its caller may not expect an error before it waits
        return WatchedWork(work, failure, self._on_failure, nccl)

    return collective


def _is_on_gpu(arguments: Sequence[Any]) -> bool:
    """Of the first tensor that is found. Options of a barrier say it themselves."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            return one.device.type == "cuda"
        if isinstance(one, (list, tuple)) and one:
            return _is_on_gpu(one)
    device = getattr(arguments[-1], "device", None) if arguments else None
    return isinstance(device, torch.device) and device.type == "cuda"


def _queued(
    nccl: NcclGroup, name: str, operation: Callable[..., dist.Work], arguments: Sequence[Any], named: dict[str, Any]
) -> dist.Work:
    if name in _MESSAGES:
        raise NotImplementedError(
            f"regroup: {name} of a tensor on a GPU is not supported under regroup: a lost rank would not end it.\n"
            "Send a copy on the CPU, or use a collective of all ranks."
        )
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "regroup: a collective is captured in a CUDA graph, which is not supported under regroup: the graph"
            " would go on with the communicator of an epoch that is over.\n"
            "Capture no collectives, or leave regroup out of init_process_group()."
        )
    for one in (*arguments, *named.values()):
        if hasattr(one, "asyncOp"):
            one.asyncOp = True  # otherwise NCCL's gives no Work
    return nccl.queue(operation, *arguments, **named)


for _name, _of_gloo in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name) and hasattr(getattr(dist, "ProcessGroupGloo", None), _of_gloo):
        setattr(WatchedGroup, _name, _collective(_of_gloo))
for _name in _BY_TORCH:
    if hasattr(dist.ProcessGroup, _name):
        setattr(WatchedGroup, _name, _collective(_name))
