"""Lets gloo's threads finish before the interpreter is taken down. Owned by `bagua.collectives.process_group`.

torch's gloo threads drop the tensors of a collective after those who wait for it have been told. For tensors that
Python has seen they take the GIL. If the program has reached its end meanwhile, CPython ends the thread that asks for
it, by unwinding its stack, and the C++ runtime answers with `terminate called without an active exception` and SIGABRT
(ProcessGroupGloo::runLoop, ~AsyncWork, TensorImpl::decref_pyobject, take_gil, pthread_exit; torch 2.13). All the work
of the program is done by then, but its exit status says otherwise.

Nothing tells when such a thread is through. It needs the GIL for microseconds, so a process that ends leaves it to them
for PAUSE_S: thousands of times what they need on an idle machine, and some turns of the scheduler on a busy one.
"""

from __future__ import annotations

import atexit
import sys
import time
import traceback
from collections.abc import Callable

PAUSE_S = 0.05

_has_groups = False
_enders: list[Callable[[], None]] = []


def expect_groups() -> None:
    """This process has a torch group now."""
    global _has_groups
    _has_groups = True


def before_pause(end: Callable[[], None]) -> Callable[[], None]:
    """A decorator: at the end of the process `end`, which ends threads that may be in gloo, is called before the pause.
    Not atexit.register: its order is that of imports, which the program chooses."""
    _enders.append(end)
    return end


def is_failing() -> bool:
    """Whether this process ends with an exception that nobody has caught: others shall notice soon that it is gone."""
    return getattr(sys, "last_value", None) is not None


@atexit.register
def _end_threads_and_pause() -> None:
    for end in reversed(_enders):
        try:
            end()
        except Exception:
            traceback.print_exc()  # as atexit does; the others have their turn
    if _has_groups:
        time.sleep(PAUSE_S)
