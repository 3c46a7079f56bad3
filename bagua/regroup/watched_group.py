"""torch's default group under regroup: what torch.distributed's functions call, whoever has imported them.

A collective that fails because of a peer calls `on_failure`, which raises what the caller gets. torch's own group would
raise gloo's error, and a program could not tell that the job goes on. Collectives go to gloo directly; those that it
has under no name go the way of torch's class. One that other ranks will not call is not begun.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bagua.job.failure_report import is_communication_error
from bagua.job.regrouped import Regrouped

OnFailure = Callable[[Exception], None]
WhyNot = Callable[[], Regrouped | None]

# torch's name of a collective -> gloo's.
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


class WatchedGroup(dist.ProcessGroup):
    """
    Args:
        backend: gloo's, connected.
        on_failure: is told an error of communication, on the thread that waits. It raises something else, or returns:
            then the error is raised as it is.
        why_not: asked before each collective: what it raises instead of being begun.
    """

    def __init__(self, backend: Any, on_failure: OnFailure, why_not: WhyNot) -> None:
        super().__init__(backend.rank(), backend.size())  # type: ignore[call-arg]  # what subclasses in Python call
        self._backend = backend
        self._on_failure, self._why_not = on_failure, why_not

    # Otherwise that of the class in C++, which asks the backend for nothing either.
    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "gloo"


class WatchedWork(dist.Work):
    """A collective under way.

    Args:
        work: gloo's.
        error: it could not even be begun.
        on_failure: as of the group.
    """

    def __init__(self, work: dist.Work | None, error: Exception | None, on_failure: OnFailure) -> None:
        super().__init__()
        self._work, self._error, self._on_failure = work, error, on_failure
        self._raised: Regrouped | None = None  # by a wait before

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """
        Raises:
            Regrouped: a rank was lost.
            RuntimeError: it failed otherwise, or is not done within the timeout.
        """
        if self._raised is not None:
            raise self._raised
        if isinstance(self._error, Regrouped):
            raise self._error
        try:
            if self._error is not None:
                raise self._error
            assert self._work is not None
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            if is_communication_error(error) and (self._work is None or self._work.is_completed()):
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
        assert self._work is not None
        return self._work.get_future()


def _collective(name: str) -> Callable[..., Any]:
    def collective(self: WatchedGroup, *arguments: Any, **named: Any) -> WatchedWork:
        work: dist.Work | None = None
        failure: Exception | None = self._why_not()
        if failure is not None:
            return WatchedWork(None, failure, self._on_failure)
        try:
            work = getattr(self._backend, name)(*arguments, **named)
        except RuntimeError as error:
            if not is_communication_error(error):
                raise
            failure = error  # its caller may not expect an error before it waits
        return WatchedWork(work, failure, self._on_failure)

    return collective


for _name, _of_gloo in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name) and hasattr(getattr(dist, "ProcessGroupGloo", None), _of_gloo):
        setattr(WatchedGroup, _name, _collective(_of_gloo))
