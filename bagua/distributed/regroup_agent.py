"""The agent of a node, in a job that goes on without ranks that it loses: starts the ranks of its node, tells all
others at once when one of them has ended, and starts that one again.

[Note: how a process is known] By a token, which the agent gives it in its environment, and by which the others know it
(bagua.job.presence). So what the agent knows by waitpid() is said of the same process as what others find out.

[Note: threads] The main thread decides, starts and ends. A thread per process waits for its end, and one for what the
store answers. Ranks are started by the main thread, because the kernel kills them when the thread ends that has started
them: with this process.

[Note: a rank that dies over and over] It has `restarts` attempts to make a step; then it is given up, and the others
go on without it. One that has made a step has all attempts again, however often it is killed. How long a process lives
does not matter: imports and compilation may take long.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

from bagua.command_exit import EXIT_FAILURE, EXIT_OF_SIGNAL, CommandError, die_with_parent
from bagua.distributed.regroup_nodes import Meeting, Position
from bagua.job.peer_watch import ATTEMPT_S, ATTEMPTS, reach_any
from bagua.job.torch_internals import PrefixStore, Store
from bagua.rank_list import rank_list
from bagua.regroup.epochs import LEFT, PREFIX, Epoch, EpochStore, Member

ANSWER_S = 30.0  # of the store, from a host that may be gone. torch's client waits without end
LOOK_S = 1.0  # between two looks at the store, while ranks of this node have not joined, or others have not ended
END_S = 30.0  # as torchrun: for ranks that are asked to end
_Answer = TypeVar("_Answer")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobState(NamedTuple):
    """What the store says.

    Attributes:
        epoch: None: the job has not begun.
        lost: how processes are gone, by token.
    """

    epoch: Epoch | None
    lost: Mapping[str, str]

    @property
    def left(self) -> list[Member]:
        """Members that are there."""
        return [] if self.epoch is None else [one for one in self.epoch.members if one.token not in self.lost]

    @property
    def is_over(self) -> bool:
        return self.epoch is not None and not self.left

    @property
    def is_completed(self) -> bool:
        """Over, and a rank has ended by itself."""
        return self.is_over and self.epoch is not None and any(self.lost[one] == LEFT for one in self.epoch.tokens)


class Job:
    """What an agent asks and tells in the store. On one thread."""

    def __init__(self, store: Store) -> None:
        self._epochs = EpochStore(PrefixStore(PREFIX, store))

    def state(self) -> JobState:
        """Raises RuntimeError: the store is unreachable."""
        return JobState(self._epochs.current() if self._epochs.has_begun() else None, self._epochs.lost())

    def has_trained(self, token: str) -> bool:
        """Whether this process has made a step."""
        return self._epochs.has_trained(token)

    def tell_lost(self, token: str, host: str, how: str) -> None:
        """A process has ended.

        Args:
            how: LEFT: others may still receive what it gave them. If collectives fail, they go on without it. Otherwise
                all members are told.
        """
        self._epochs.add_lost(token, how)
        epoch = self._epochs.current() if how != LEFT and self._epochs.has_begun() else None
        # Of an epoch that is made at this moment, the members look for who is lost before they connect.
        if epoch is not None and token in epoch.tokens:
            rank = epoch.rank_of(token)
            others = [one for one in epoch.tokens if one != token]
            self._epochs.tell(epoch, f"{rank_list([rank], {rank: host})} {how}", others)


@dataclass
class _Rank:
    """Of this node.

    Attributes:
        token: of the present process, or the last one.
        process: None: there is none, and will be none.
        attempts: to make a step, since it has made one.
        starts: of all processes.
        has_joined: the process has been a member.
        is_dismissed: the process was asked to end, because there is no job any more.
        status: of the last process, unless it was dismissed; negative: the signal.
    """

    number: int
    local: int
    token: str = ""
    process: subprocess.Popen[bytes] | None = None
    attempts: int = 0
    starts: int = 0
    has_joined: bool = False
    is_dismissed: bool = False
    status: int | None = None


@dataclass
class Agent:
    """
    Args:
        command: of a rank, for its local number.
        is_server: this process serves the store.
        restarts: see [Note: a rank that dies over and over].
        logdir: for files with what ranks print. None: it goes where ours goes.
    """

    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]
    position: Position
    processes: int
    job: Job
    meeting: Meeting
    is_server: bool
    restarts: int
    logdir: Path | None
    host: str
    say: Callable[[str], None]
    _ranks: list[_Rank] = field(default_factory=list, init=False)
    _events: queue.SimpleQueue[tuple[_Rank, int] | signal.Signals] = field(
        default_factory=queue.SimpleQueue, init=False
    )
    _is_completed: bool = field(default=False, init=False)  # the job, and this process has seen it
    _asking: threading.Thread | None = field(default=None, init=False)
    _looks_from: float = field(default=0.0, init=False)  # on: the store did not answer

    def run(self) -> int:
        """
        Until the ranks of this node have ended, and, if this process serves the store, those of others. In the main
        thread.

        Returns:
            0: the job was completed, and no rank of this node has failed at last. 1: otherwise; or 128 plus the number
            of a signal by which this process was asked to end.
        """
        first = self.position.first_rank
        self._ranks = [_Rank(first + local, local) for local in range(self.processes)]
        with self._signals():
            try:
                for rank in self._ranks:
                    self._start(rank)
                ended_by = self._watch()
                if ended_by is None and self.is_server:
                    ended_by = self._serve_others()
            finally:
                self._kill()
            if self.is_server:
                self.meeting.wait_for_readers()
        return self._status() if ended_by is None else EXIT_OF_SIGNAL + ended_by

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._events.put(signal.Signals(number))

        # nohup's choice is respected.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _status(self) -> int:
        statuses = [one.status for one in self._ranks]
        has_failed = any(one is not None and one > 0 for one in statuses)
        return EXIT_FAILURE if has_failed or not (0 in statuses or self._is_completed) else 0

    def _ask(self, request: Callable[[], _Answer]) -> _Answer:
        """What the store answers, on another thread, so that this one can be asked to end meanwhile.

        Raises:
            RuntimeError: it is unreachable, or has not answered within ANSWER_S.
        """
        if self._asking is not None:  # one request at a time
            self._asking.join(ANSWER_S)
            if self._asking.is_alive():
                raise RuntimeError("it does not answer")
        answer: Future[_Answer] = Future()

        def ask() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        self._asking = threading.Thread(target=ask, name="bagua-ask", daemon=True)
        self._asking.start()
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            raise RuntimeError(f"it has not answered within {ANSWER_S:g} s") from None

    # --- processes ---------------------------------------------------------------------------------------------------

    def _start(self, rank: _Rank) -> None:
        rank.token, rank.has_joined = secrets.token_hex(8), False
        environment = {
            **self.environment,
            "RANK": str(rank.number),
            "LOCAL_RANK": str(rank.local),
            "WORLD_SIZE": str(self.position.world_size),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(self.position.node),
            "NODE_RANK": str(self.position.node),
            "RANK_TOKEN": rank.token,
        }
        command = self.command(rank.local)
        with contextlib.ExitStack() as stack:
            output, errors = None, None
            if self.logdir is not None:
                folder = self.logdir / f"attempt_{rank.starts}" / str(rank.number)
                folder.mkdir(parents=True, exist_ok=True)
                output, errors = (
                    stack.enter_context((folder / name).open("wb")) for name in ("stdout.log", "stderr.log")
                )
            try:
                rank.process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    process_group=0,  # Ctrl-C reaches this process alone; what the rank has started ends with it
                    preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - our threads wait in the kernel
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise CommandError(f"rank {rank.number} cannot be started: {command[0]}: {error}") from error
        rank.starts += 1
        threading.Thread(target=self._wait_for, args=(rank, rank.process), name="bagua-rank", daemon=True).start()

    def _wait_for(self, rank: _Rank, process: subprocess.Popen[bytes]) -> None:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_status:
            # Its workers would keep its connections open. While it is not reaped, no other group has its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._events.put((rank, process.wait()))

    def _running(self) -> list[_Rank]:
        return [one for one in self._ranks if one.process is not None]

    def _watch(self) -> int | None:
        """Until no process is left. Returns the signal that has ended them, or None."""
        while running := self._running():
            looks = not all(one.has_joined or one.is_dismissed for one in running)
            try:
                event = self._events.get(timeout=LOOK_S if looks else None)
            except queue.Empty:
                self._look()
                continue
            if isinstance(event, signal.Signals):
                self._end(event)
                return event
            self._note_end(*event)
        return None

    def _note_end(self, rank: _Rank, status: int) -> None:
        """What follows from the end of a process."""
        rank.process = None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        state, has_trained = None, False

        def tell() -> tuple[JobState, bool]:
            self.job.tell_lost(rank.token, self.host, how if status else LEFT)
            return self.job.state(), self.job.has_trained(rank.token)

        try:
            state, has_trained = self._ask(tell)
        except RuntimeError as error:
            if status and not rank.is_dismissed:
                self.say(f"the job's store is unreachable ({str(error).splitlines()[0]})")
        if rank.is_dismissed:
            return
        if state is not None and state.is_over and state.epoch is not None and rank.token not in state.epoch.tokens:
            self._is_completed |= state.is_completed
            self.say(f"rank {rank.number} {how}. The job is over, and it had not joined it.")
            return
        rank.status = status
        if status == 0:
            return
        if state is None or state.is_over:
            self.say(f"rank {rank.number} {how}. It is not started again: the job cannot go on.")
            return
        if has_trained:
            rank.attempts = 0
        if rank.attempts < self.restarts:
            rank.attempts += 1
            self.say(
                f"rank {rank.number} {how}. Starting it again (attempt {rank.attempts} of {self.restarts} to make a"
                " step)."
            )
            try:
                self._start(rank)
            except CommandError as error:  # this host may have too many processes; its other ranks run
                self.say(f"{error}. It is given up; the others go on without it.")
        elif state.epoch is None:
            self._dismiss(f"rank {rank.number} {how}, and the job has not begun. It cannot begin without it.")
        else:
            self.say(
                f"rank {rank.number} {how}. It is given up: --rank-restarts={self.restarts} allows no more attempts to"
                " make a step. The others go on without it."
            )

    def _dismiss(self, problem: str) -> None:
        """The job cannot begin, on any node."""
        with contextlib.suppress(RuntimeError):
            self._ask(lambda: self.meeting.set_problem(f"{problem} (host {self.host})"))
        self.say(f"{problem}\nSee the log of that rank. All ranks are ended.")
        for one in self._running():
            self._ask_to_end(one)

    def _ask_to_end(self, rank: _Rank) -> None:
        rank.is_dismissed = True
        assert rank.process is not None
        rank.process.terminate()

    def _look(self) -> None:
        """After processes that have not joined the job."""
        if time.monotonic() < self._looks_from:
            return
        try:
            state, problem = self._ask(lambda: (self.job.state(), self.meeting.problem()))
        except RuntimeError as error:  # ranks find out themselves; torch's client writes a stack for each request
            if self._looks_from == 0.0:
                self.say(
                    f"the job's store is unreachable ({str(error).splitlines()[0]}). Ranks that train go on until"
                    " another one is lost; none can join. Check the agent of the first node."
                )
            self._looks_from = time.monotonic() + ANSWER_S
            return
        for rank in self._running():
            rank.has_joined |= state.epoch is not None and rank.token in state.epoch.tokens
        waiting = [one for one in self._running() if not one.has_joined and not one.is_dismissed]
        if state.epoch is None and problem is not None:
            self.say(f"{problem} All ranks are ended.")
        elif state.is_over and waiting:
            self._is_completed |= state.is_completed
            self.say(f"the job is over. {rank_list([one.number for one in waiting]).capitalize()} had not joined it.")
        else:
            return
        for rank in waiting:
            self._ask_to_end(rank)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, number: signal.Signals) -> None:
        """All ranks get the signal, and are killed if they have not ended after END_S, or at another signal. The others
        are told of each."""
        if self.is_server:
            self.say("this agent ends, and the job's store with it: ranks of other nodes cannot regroup any more")
        for rank in self._running():
            rank.is_dismissed = True
            assert rank.process is not None
            rank.process.send_signal(number)
        deadline = time.monotonic() + END_S
        while self._running():
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(event, signal.Signals):
                return
            self._note_end(*event)

    def _kill(self) -> None:
        """What is left."""
        for rank in self._running():
            rank.is_dismissed = True
            assert rank.process is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        while self._running():
            event = self._events.get()
            if not isinstance(event, signal.Signals):
                self._note_end(*event)

    def _serve_others(self) -> int | None:
        """Until no member of the job is left: they need the store. Returns the signal that has ended this.

        The last ones may be on a host that is gone, with nobody else to find that out. Those are not waited for of whom
        nothing answers, ATTEMPTS times in a row. A firewall may close their ports as well: then they have no store any
        more, which they need only if another rank is lost.
        """
        is_told, silent = False, dict[str, int]()
        while left := self.job.state().left:
            if not is_told:
                is_told = True
                self.say("the ranks of this node have ended. Serving the job's store until those of other nodes have.")
            for member in left:
                _, answer = reach_any(member.place.door, ATTEMPT_S)
                if answer.connection is not None:
                    answer.connection.close()
                is_silent = answer.state in ("silent", "refused", "another")
                silent[member.token] = silent.get(member.token, 0) + 1 if is_silent else 0
            if all(silent[one.token] >= ATTEMPTS for one in left):
                self.say(f"of the last {len(left)} ranks nothing answers. The job's store ends.")
                return None
            try:
                event = self._events.get(timeout=LOOK_S if min(silent.values()) == 0 else float(ATTEMPT_S))
            except queue.Empty:
                continue
            if isinstance(event, signal.Signals):
                return event
        return None
