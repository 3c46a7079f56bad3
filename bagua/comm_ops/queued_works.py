"""Collectives that a GPU's stream waits for, as a host thread that waits for the stream sees them.

The kernels of a collective that has lost a peer never end, and the stream never says so: it is torch's watchdog that
learns of it from NCCL, some 0.1 s later. It ends the process, but collects first what it knows, which took more than
half a minute where it was seen. A thread that looks here meanwhile can say which rank is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from bagua.collectives.torch_internals import error_of


@dataclass
class _Queued:
    work: dist.Work
    done: torch.cuda.Event  # of the stream, right behind the work


class QueuedWorks:
    """Of one thread."""

    def __init__(self) -> None:
        self._works: list[_Queued] = []

    def add(self, work: dist.Work, stream: torch.cuda.Stream) -> None:
        """`stream` was just made to wait for `work`, by `work.wait()`."""
        self._works = [one for one in self._works if not one.done.query()]  # type: ignore[no-untyped-call]
        self._works.append(_Queued(work, stream.record_event()))

    def error(self) -> BaseException | None:
        """What one of them failed with. To be asked now and then while something on the streams is awaited."""
        for one in self._works:
            one.work.is_completed()  # looks for an error of the network; what exceeds the timeout, the watchdog finds
            if (error := error_of(one.work)) is not None:
                return error
        return None
