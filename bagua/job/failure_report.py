"""Names the ranks that are gone when a collective fails. Functions; any thread that runs collectives.

The report goes to stderr as soon as it is known, and is then raised: a launcher that ends the other ranks when one
dies (torchrun sends SIGTERM) leaves no time for a traceback. A SIGTERM that arrives while the report is being prepared
takes effect when it is printed, unless the program handles SIGTERM itself.

What can be raised depends on the backend. gloo's calls raise where they wait. NCCL's do not: kernels wait on the GPU,
and errors and timeouts are noticed by torch's watchdog thread, which by default ends the process. The ranks that are
gone are printed before that (bagua.job.nccl_watch). Errors that do reach Python are: those of creating a
communicator, which the first collective does (but it waits without a limit for a rank that is gone by then), and, with
TORCH_NCCL_BLOCKING_WAIT=1, timeouts and lost peers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch.distributed as dist

from bagua.error_text import one_line
from bagua.job.gone import advice, of_fewer_batches
from bagua.job.job_thread import current_job_thread, waiting_for
from bagua.job.roll_call import FAILED, Roll
from bagua.job.waiting import Members, Waiting, operations_of
from bagua.rank_list import rank_list

ROLL_CALL_S = 5.0
MAX_ELSEWHERE = 16  # ranks of which is told what they do
MAX_ERROR_LENGTH = 200  # characters; the whole is in the error's cause
_DEADLOCKED = ", which the other ranks do not take part in"

# What gloo says of connections that are lost, cannot be made, or are silent for too long, and of those that it closes
# itself, after a timeout or `abort`. It has no type of its own for these, and its failed assertions ("enforce fail at")
# are about arguments.
_GLOO_FAILURE = re.compile(
    r"timeout caused pair closure|"
    r"gloo.*(time(d )?\s?out|closed|read error|writev|connecti|broken pipe|reset by|unreachable|no route|SSL_)",
    re.IGNORECASE | re.DOTALL,
)


class CollectiveError(RuntimeError):
    """
    A collective failed because of a peer or the network; chained from the backend's error.

    Attributes:
        missing_ranks: global ranks that did not answer; empty also if that cannot be known.
    """

    is_store_reachable = True  # the job's; for those who raise it

    def __init__(self, message: str, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class _Around(threading.local):
    is_named = False  # what fails in this thread is named further out


_around = _Around()


def is_named_around() -> bool:
    """Whether this thread is within `failures_named`."""
    return _around.is_named


def set_named_around(is_named: bool) -> None:
    """For a thread that works for another, which waits and may name what fails: what `is_named_around` was there."""
    _around.is_named = is_named


class failures_named:  # noqa: N801 - a context manager, as contextlib's
    """
    Around collectives of the group: names the ranks that are gone if one fails. Other errors pass as they are. All
    members have to use it, since whoever is inside also answers for this process. The collectives of communicators,
    which name ranks as well, leave it to this where they are within: it knows what they are part of.

    Entered in every step, between kernels whose data has taken the caches: not made of generators. May be entered again
    when it is over, for the next operation of the same kind.

    Args:
        group: those that take part.
        what: is being done, for the message: "the all-reduce of bucket 3".
        ranks: global; None: all of the group. Others are not asked whether they are there.
        can_give_up: an exchange of a few bytes, which is aborted if it is proven that it cannot end, because other
            ranks wait for something else (bagua.job.deadlock).
        in_order: one of the group's operations that all members begin in the same order, under this name. Not: what is
            only begun here, or by some, or by several threads. It counts as begun when this is entered, or from `begin`
            on.
        position: in that order, of an operation that has been begun.
        join_helps: for the message: ranks with fewer batches than others can take part by `join`.

    Raises:
        CollectiveError: instead of an error of communication. The group cannot be used any more.
        RuntimeError: instead, if `abort` was called in this process: nobody needs to be asked then.
    """

    __slots__ = (
        *("_can_give_up", "_group", "_in_order", "_join_helps", "_operations", "_position", "_ranks", "_waiting"),
        *("_was_named", "_what"),
    )

    def __init__(
        self,
        group: Members,
        what: str,
        ranks: Sequence[int] | None = None,
        can_give_up: bool = False,
        in_order: bool = False,
        position: int | None = None,
        join_helps: bool = True,
    ) -> None:
        self._join_helps = join_helps
        self._group, self._what, self._ranks, self._can_give_up = group, what, ranks or group.ranks, can_give_up
        self._waiting: Waiting | None = None
        self._operations = operations_of(group) if in_order or position is not None else None
        self._in_order = in_order
        self._position = position

    def begin(self) -> None:
        """Of an operation in order."""
        if self._in_order and self._operations is not None and self._position is None:
            self._position = self._operations.begin(self._what)

    def __enter__(self) -> None:
        self.begin()
        if self._waiting is not None:
            self._waiting.position = self._position
        elif len(self._ranks) > 1:
            self._waiting = waiting_for(
                self._ranks, self._what, self._group, self._operations, self._position, self._can_give_up
            )
        if self._waiting is not None:
            self._waiting.__enter__()
        self._was_named, _around.is_named = _around.is_named, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _around.is_named = self._was_named
        operations, position = self._operations, self._position
        if error is None and operations is not None and position is not None and position > operations.done:
            operations.done = position
        if self._in_order:
            self._position = None
        try:
            if isinstance(error, Exception):
                waiting = self._waiting
                if waiting is not None and waiting.is_deadlocked:
                    raise self._explained(error, self._what + _DEADLOCKED) from error
                if waiting is not None and waiting.gone is not None:
                    # A communicator that was aborted raises its own error instead of the backend's.
                    inner = error.__context__
                    cause = inner if inner is not None and is_communication_error(inner) else error
                    gone = waiting.gone
                    roll = Roll((gone.rank,), gone.how, hosts={gone.rank: gone.host})
                    report = _report(cause, self._group, self._what, self._ranks, roll, self._join_helps)
                    _print(report)
                    raise report from cause
                if is_communication_error(error):
                    self._group.raise_if_aborted(self._what)
                    raise self._explained(error, self._what) from error
        finally:
            if self._waiting is not None:
                self._waiting.__exit__(None, None, None)

    def _explained(self, error: Exception, what: str) -> CollectiveError:
        report = explain_failure(error, self._group, what, self._ranks, self._join_helps)
        if not report.is_store_reachable:
            # Ranks that wait for this one alone hear of the failure in no other way, and this process may live on.
            with contextlib.suppress(Exception):  # which must not hide the report
                self._group.abort()
        return report


def is_communication_error(error: BaseException) -> bool:
    """Whether a peer or the network is to blame, and not the arguments. Not if that has been found out already."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error)
    return type(error) is RuntimeError and "enforce fail at" not in text and bool(_GLOO_FAILURE.search(text))


def explain_failure(
    error: BaseException,
    group: Members,
    what: str = "a collective",
    ranks: Sequence[int] | None = None,
    join_helps: bool = True,
) -> CollectiveError:
    """
    Finds out which ranks of the group, or of these global ranks of it, are gone, and prints that to stderr. Takes at
    most ROLL_CALL_S or the group's timeout, whichever is shorter, and two seconds; raises nothing.

    Returns:
        the error to raise; `error` is its cause.
    """
    printed: list[str] = []

    def found(roll: Roll) -> CollectiveError:
        report = _report(error, group, what, ranks or group.ranks, roll, join_helps)
        # Those that did not respond may have been ended by what ends this process.
        if str(report) not in printed and (roll.is_explained or not terminated.is_set()):
            printed.append(str(report))
            _print(report)
        return report

    with _sigterm_deferred() as terminated:
        try:
            window_s = min(ROLL_CALL_S, group.timeout.total_seconds())
            call = current_job_thread().roll_call.call
            return found(call(ranks or group.ranks, what, window_s, found, terminated))
        except Exception as problem:  # an explanation that fails must not hide what it explains
            return found(Roll(store_problem=_cause(problem)))


def _report(
    error: BaseException, group: Members, what: str, ranks: Sequence[int], roll: Roll, join_helps: bool
) -> CollectiveError:
    report = CollectiveError(_message(error, group, ranks, what, roll, join_helps), roll.missing)
    report.__cause__ = error
    report.is_store_reachable = roll.store_problem is None
    return report


@contextlib.contextmanager
def _sigterm_deferred() -> Iterator[threading.Event]:
    """SIGTERM sets the event and ends the process at the end of the block. Only on the main thread, which alone may
    set handlers, and only if nobody else handles it."""
    terminated = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield terminated
        return
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if terminated.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def _print(report: CollectiveError) -> None:
    """As one write, so that lines of several ranks do not mix. stderr may be closed."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"bagua: {report}\n")
        sys.stderr.flush()


def _message(
    error: BaseException, group: Members, ranks: Sequence[int], what: str, roll: Roll, join_helps: bool
) -> str:
    me = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    where = f"Operation on {me}: {what} (group {group.group_name}, {rank_list(ranks)})."
    restart = "Then restart all ranks from the last checkpoint."
    if roll.missing:
        lines = [
            f"{rank_list(roll.missing, roll.hosts).capitalize()} {roll.how}.",
            where,
            f"{advice(roll.how, roll.missing[0], join_helps)} {restart}",
        ]
    elif roll.store_problem is None:
        doing = {who: text.removeprefix(FAILED) for who, text in roll.doing.items()}
        elsewhere = [f"Operation on rank {who}: {text}." for who, text in doing.items() if text != what]
        same = "that all ranks run the same operations, " if elsewhere else ""
        lines = [
            "A collective failed although all ranks responded.",
            where,
            *elsewhere[:MAX_ELSEWHERE],
            f"Check {same}the network between the hosts, and whether a rank was late. {restart}",
        ]
    else:
        is_agents = dist.is_torchelastic_launched()
        server = "the torchrun agent of the first host" if is_agents else "rank 0"
        remedy = of_fewer_batches(join_helps)
        early = "" if is_agents else f" If its script ended because it had fewer batches, {remedy}."
        lines = [
            f"A collective failed, and the job's store is unreachable ({roll.store_problem}).",
            where,
            f"Check the end of the log of {server}, which serves the store.{early} {restart}",
        ]
    return "\n".join([*lines, f"Backend error: {_cause(error)}"])


def _cause(error: BaseException) -> str:
    return one_line(error, MAX_ERROR_LENGTH)
