"""A checkpoint that is being written by a thread. One at a time in a process; made and waited for by the thread that
trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger("bagua")


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
        job, self._job = self._job, _nothing  # and with it the copies
        try:
            job()
        except Exception as error:
            self._error = error
            _logger.error(f"checkpoint {self.iteration} was not saved: {error}")


def _nothing() -> None:
    return None


_last: PendingCheckpoint | None = None


def set_last(pending: PendingCheckpoint) -> None:
    """`finish_last` is about this one."""
    global _last
    _last = pending


def finish_last() -> Exception | None:
    """Wait for the one that was begun last; its error, if nobody was told."""
    global _last
    last, _last = _last, None
    if last is None:
        return None
    last._join()
    return last._take_error()
