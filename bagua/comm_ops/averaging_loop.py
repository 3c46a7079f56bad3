"""The thread of a rank that averages parameters with the other ranks, again and again, while the rank trains.

[Note: who owns what]
The parameters x are the training thread's alone. The averages of the buckets (contribution c, difference d) belong to
the loop's thread during an exchange, and otherwise to the training thread, which touches them only at *safe points*:
right after an optimizer has stepped, where no graph of autograd is of any use any more. There it adds d to x and, when
the loop asks for one, makes the copy c = x. So copies are never made in the middle of a step, forward and backward of a
step see the same parameters, and no lock is held while a model computes: `_condition` guards a few flags, and is held
for as long as it takes to queue a copy or, on a CPU, to make it.

[Note: a turn] All ranks' threads make the same turns.
1. COPY      Ask for a copy, and wait for it for at most PATIENCE_S. A rank that does not train now (it evaluates, or
             has finished) does not keep the others: it contributes what it had. Its next turns do not wait at all.
2. agree     All ranks: is anybody there who has not asked for the end? Has anybody a new copy? Have all begun to train?
             Copies that are made while others are waited for replace older ones.
3. EXCHANGE  if anybody has a new copy, and all have begun: the sum over the ranks, and d += mean - c, c = mean.
4. PAUSE     for the interval.

[Note: why nothing is lost]
x only ever changes by steps of the optimizer, which stay, and by adding d. Over the ranks the d of an exchange sum up
to zero but for rounding: an averaging does not move the mean of the replicas. What x is owed stays in d until it is
given, and c has it already: a rank that was not copied again contributes what it had at the copy and was given since.

[Note: why nothing hangs]
The training thread never waits for the loop but in `end`, and the loop never waits for the training thread for longer
than PATIENCE_S. Loops wait for each other, with the timeout of the group. When a rank is gone, the call of the others
fails; `failure` has what happened, and the training thread raises it.
An end needs all ranks: a rank that has asked for it alone goes on taking part. So the thread starts where all ranks are
at the same place, wrapping or the end of a warm-up, before any of them has begun to train: whatever a rank does later,
even nothing, the others find it. The thread is a daemon, and when the process exits without an end, it gets some
seconds to find the others exiting as well, and is cut off after that (`end_with_the_process`).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from bagua.comm_ops.averaging_group import AveragingGroup
from bagua.comm_ops.averaging_memory import AveragingMemory, Part, Scratch
from bagua.job import gloo_exit

# For a copy. Longer than most steps, or ranks that train would contribute old copies; and no longer, because all others
# wait as long once when a rank begins to evaluate or saves a checkpoint. After that its turns do not wait.
PATIENCE_S = 1.0
NAMED_S = 10.0  # of waiting for the end, before a log line
EXIT_S = 5.0  # for the other ranks to exit, too, when the process ends
CUT_OFF_S = 1.0
QUIET_PAUSE_S = 0.05  # at least, after a turn in which no rank had a new copy

_logger = logging.getLogger("bagua")


class Phase(enum.Enum):
    """Of the loop. What the training thread may do at a safe point."""

    PAUSE = enum.auto()  # take what is owed
    COPY = enum.auto()  # that, and copy
    EXCHANGE = enum.auto()  # nothing
    ENDED = enum.auto()  # nothing: the thread has agreed on the end, or has failed


class Request(enum.IntEnum):
    """Of a rank. What the ranks do is the smallest of their requests."""

    RUN = 0
    LEAVE = 1  # end
    END = 2  # end with an exchange: the parameters stay as they were copied last


class AveragingLoop:
    """
    Args:
        parts: with memory that nobody else uses.
    """

    def __init__(self, parts: Sequence[Part], ranks: AveragingGroup, interval_s: float) -> None:
        self.parts = list(parts)
        self._ranks = ranks
        self._interval_s = interval_s
        self._has_begun = False
        # Guards all that follows, and the flags of the parts. Reentrant: a garbage collection may call `leave`.
        self._condition = threading.Condition(threading.RLock())
        self._phase = Phase.PAUSE
        self._request = Request.RUN
        self._memory = AveragingMemory(self.parts)
        self._destroys_group = False
        self.failure: BaseException | None = None
        self.exchanges = 0
        self.exchange_s = 0.0  # of the last one
        self.ended_with_mean = False
        self._thread = threading.Thread(target=self._run, name="bagua-average", daemon=True)

    def start(self) -> None:
        """Let the thread run. Every rank does."""
        running.add(self)
        self._thread.start()

    def begin(self, parameters: Sequence[Sequence[Sequence[Tensor]]], steps: Sequence[int]) -> None:
        """This rank trains from now on. When all do, they average."""
        with self._condition:
            for part, tensors, step in zip(self.parts, parameters, steps, strict=True):
                self._memory.copy(part, tensors, step)
                part.is_copied = part.is_idle = False  # the first step makes the first copy that counts
            self._has_begun = True

    @property
    def is_alive(self) -> bool:
        """Whether the thread is."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """For the end of the thread, for at most so long."""
        self._thread.join(timeout_s)

    def cut_off(self) -> None:
        """End what the thread has under way. What comes next in it fails, here and on the other ranks."""
        self._ranks.abort()

    # --- the training thread -----------------------------------------------------------------------------------------

    def safe_point(self, index: int, parameters: Sequence[Sequence[Tensor]], step: int) -> int | None:
        """Now the parameters of a part may change, and may be copied.

        Returns:
            how many steps were made between the copy and now, if a difference was added; otherwise None.
        """
        part = self.parts[index]
        with self._condition:
            part.is_idle = False
            if self._phase in (Phase.EXCHANGE, Phase.ENDED):
                return None
            staleness = self._memory.give(part, parameters, step)
            if self._phase is Phase.COPY:
                self._memory.copy(part, parameters, step)
                self._condition.notify_all()
            return staleness

    def end(
        self, parameters: Sequence[Sequence[Sequence[Tensor]]], steps: Sequence[int], timeout_s: float
    ) -> list[int]:
        """End the loop together with all other ranks, which have to come here, too. If any has begun, the parameters
        become the mean over the ranks, the same bits on all of them.

        Returns:
            the steps between copy and addition, for each difference that was added.

        Raises:
            RuntimeError: the others did not come, or one of them is gone.
        """
        everything = list(zip(self.parts, parameters, steps, strict=True))
        with self._condition:
            is_done = self._condition.wait_for(lambda: self._phase is not Phase.EXCHANGE, timeout_s)
            if self.failure is None and not is_done:
                self.failure = self._lateness(timeout_s)
            if self.failure is not None:
                raise self.failure
            given = [self._memory.give(*one) for one in everything]
            if self._phase is not Phase.ENDED:
                for one in everything:
                    self._memory.copy(*one)
                self._request = Request.END
                self._condition.notify_all()
        self._join(timeout_s)
        for part, tensors, step in everything:
            if self.ended_with_mean and part.is_owed:
                part.is_owed = False
                for average, bucket in zip(part.averages, tensors, strict=True):
                    average.give_mean(bucket)
            else:
                given.append(self._memory.give(part, tensors, step))
        return [staleness for staleness in given if staleness is not None]

    def leave(self, destroy_group: bool = False) -> None:
        """Ask for the end, without waiting for it and without another exchange. Nobody uses the parameters any more, or
        they were overwritten. From any thread.

        Args:
            destroy_group: the thread does so when it ends.
        """
        with self._condition:
            self._destroys_group |= destroy_group
            if self._request is not Request.LEAVE:
                self._request = Request.LEAVE
                self._condition.notify_all()

    def _join(self, timeout_s: float) -> None:
        self.wait(min(timeout_s, NAMED_S))
        if self.is_alive and timeout_s > NAMED_S:
            _logger.warning(f"waiting for the other ranks to stop averaging, for at most {timeout_s:g} s")
            self.wait(timeout_s - NAMED_S)
        if self.failure is not None:
            raise self.failure
        if self._thread.is_alive():
            self.failure = self._lateness(timeout_s)
            raise self.failure

    def _lateness(self, timeout_s: float) -> RuntimeError:
        return RuntimeError(
            f"not all ranks of {self._ranks.ranks} stopped averaging within {timeout_s:g} s; abort, and another"
            " with_bagua, have to be called on every rank"
        )

    # --- the loop's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._memory.on_own_streams() as streams:
                scratch = self._memory.scratch()
                while self._turn(streams, scratch):
                    pass
                for stream in streams:
                    self._ranks.finish(stream)
                del scratch
            if not self._ranks.is_registered:
                self.failure = _shut_down(None)
        except BaseException as error:  # the training thread raises it
            self.failure = error if self._ranks.is_registered else _shut_down(error)
        finally:
            with self._condition:
                self._phase = Phase.ENDED
                self._condition.notify_all()
            running.discard(self)
        if self._destroys_group and self.failure is None:
            self._ranks.destroy()

    def _turn(self, streams: Sequence[torch.cuda.Stream], scratch: Scratch) -> bool:
        """False: all ranks have agreed on the end."""
        if not self._ranks.is_registered:
            self.leave()  # the connections still work, so that the ranks can agree on the end
        request, has_copy = self._await_copies()
        has_begun = self._has_begun
        # Each is the minimum over the ranks, that is "all"; the opposite of "all are not" is "any is".
        agreed, nothing_new, nobody_has_begun, all_have_begun = self._ranks.agree(
            [request, not has_copy, not has_begun, has_begun]
        )
        if agreed == Request.RUN:
            is_quiet = bool(nothing_new or not all_have_begun)
            if not is_quiet:
                self._exchange(streams, scratch)
            # Who has told END already waits for those who have not, and keeps none of them waiting.
            interval = 0.0 if request is Request.END else self._interval_s
            self._pause(max(interval, QUIET_PAUSE_S if is_quiet else 0.0), request)
            return True
        if agreed == Request.END and not nobody_has_begun:
            self._exchange(streams, scratch)
            self.ended_with_mean = True
        return False

    def _await_copies(self) -> tuple[Request, bool]:
        """(what this rank wants, whether any of its parts has a new copy)."""
        with self._condition:
            self._phase = Phase.COPY
            self._condition.wait_for(
                lambda: self._request is not Request.RUN or all(part.is_copied or part.is_idle for part in self.parts),
                PATIENCE_S,
            )
            for part in self.parts:
                part.is_idle = not part.is_copied
            return self._request, any(part.is_copied for part in self.parts)

    def _exchange(self, streams: Sequence[torch.cuda.Stream], scratch: Scratch) -> None:
        with self._condition:
            self._phase = Phase.EXCHANGE
            queued = self._memory.take_queued()
        start = time.monotonic()
        for stream in streams:
            for event in queued:
                stream.wait_event(event)
        for part in self.parts:
            for average in part.averages:
                memory = scratch.like(average.contribution)
                average.exchange(self._ranks.sum, self._ranks.ranks, part.is_owed, memory)
        for stream in streams:
            self._ranks.finish(stream)
        with self._condition:
            for part in self.parts:
                part.is_copied, part.is_owed = False, True
            self.exchanges += 1
            self.exchange_s = time.monotonic() - start
            self._phase = Phase.PAUSE
            self._condition.notify_all()

    def _pause(self, seconds: float, told: Request) -> None:
        """Ends early when this rank's request is another than it has told."""
        with self._condition:
            self._phase = Phase.PAUSE
            self._condition.wait_for(lambda: self._request is not told, seconds)


def _shut_down(cause: BaseException | None) -> RuntimeError:
    error = RuntimeError(
        "torch.distributed was shut down while parameters were averaged in the background; call"
        " model.bagua_algorithm.abort(model) on every rank before destroy_process_group()"
    )
    error.__cause__ = cause
    return error


running: weakref.WeakSet[AveragingLoop] = weakref.WeakSet()


@gloo_exit.before_pause
def end_with_the_process() -> None:
    """Of threads that still average. One that is in gloo while the interpreter is taken down can end the process with a
    signal. On the thread that ends the process."""
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
