"""The end of a process that still averages parameters: the other ranks get a moment to end as well, and after it the
threads are cut off. On the thread that ends the process."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from typing import Protocol

from bagua.job import gloo_exit

EXIT_S = 5.0  # for the other ranks to exit, too
CUT_OFF_S = 1.0

_logger = logging.getLogger("bagua")


class Loop(Protocol):
    """What has a thread. bagua.comm_ops.averaging_loop.AveragingLoop is one."""

    @property
    def is_alive(self) -> bool: ...
    def leave(self) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def cut_off(self) -> None: ...


running: weakref.WeakSet[Loop] = weakref.WeakSet()


@gloo_exit.before_pause
def end_with_the_process() -> None:
    """A thread that is in gloo while the interpreter is taken down can end the process with a signal."""
    deadline = time.monotonic() + (0.0 if gloo_exit.is_failing() else EXIT_S)
    loops = list(running)
    for loop in loops:
        loop.leave()
    for loop in loops:
        loop.wait(max(0.0, deadline - time.monotonic()))
        if loop.is_alive:
            _logger.warning(
                "this process ends while others still average parameters with it; call"
                " model.bagua_algorithm.abort(model) on every rank when training is done"
            )
            with contextlib.suppress(Exception):
                loop.cut_off()
            loop.wait(CUT_OFF_S)
