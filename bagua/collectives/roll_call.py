"""Which ranks are still there after a collective has failed: they answer a roll call through the job's store.

One `RollCall` per process, owned by this module, as long as torch's default group lives. Any thread may use it; it has
a daemon thread of its own.

[Note: why a thread answers]
When a rank dies, gloo fails at once only where a connection to it was in use: with a ring, at its two neighbors. The
other survivors wait in their collective until their own neighbors leave, or for the timeout. To answer they cannot
return from it, and if nobody answered for them, every survivor would be taken for dead. So while a collective takes
longer than PATIENCE_S, a thread looks whether the roll is being called, and answers. A job that is well never asks the
store anything, and a rank that is alive but in no collective does not answer: that is what the others wait for, too.

[Note: keys] All below "bagua/roll_call/":
    call              "number:time" of the last call, in s of the caller's clock. It is changed by compare_set, so that
                      ranks that fail together join one call.
    <number>/<rank>   what the rank is doing; its presence is the answer

[Note: exited ranks] torchrun ends all ranks of a host within 0.1 s of the first that dies, long before the roll is
complete. So the caller first looks whether the process of a rank on its own host has ended, and reports that at once.
Only the first such finding counts: later ones may be ranks that the launcher has ended. Nor does a rank count that
SIGTERM has ended, if another has ended otherwise.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from bagua.collectives import gloo_exit, group_topology, launch_environment, torch_internals
from bagua.collectives.deadlock import DeadlockDetector
from bagua.collectives.waiting import Group, Waiting

# In a collective, before the store is asked: longer than collectives of a step take, so that a job that is well asks
# nothing; short beside the window of a call (failure_report.ROLL_CALL_S), within which this rank has to answer.
PATIENCE_S = 0.5
# Between two looks whether a collective takes long, and whether the roll is called. Only ranks that wait ask the store,
# four times a second each, which it can answer for a thousand ranks.
TICK_S = 0.25
GRACE_S = 2.0  # added to the time for answers, for a slow store
FRESH_S = 60.0  # an older call was about something else; clocks of hosts may differ by this much
STOP_S = 1.0
FIRST_PAUSE_S = 0.02  # between two looks for answers; doubles each time
MAX_OLD_CALLS = 8
MAX_HOSTS = 16

FAILED = "failed: "  # before what a rank was doing, if it has failed in that
_PREFIX = "bagua/roll_call"
_NO_CALL = "0:0"


@dataclass(frozen=True)
class Roll:
    """
    Attributes:
        missing: global ranks that did not answer.
        exited: those of them whose process has ended; only ranks on this host can be in it.
        doing: what those that answered were doing.
        hosts: of missing ranks, where known.
        store_problem: why there is no answer at all, or why the roll is an older one; None: there was no problem.
        age_s: of this reading.
    """

    missing: tuple[int, ...] = ()
    exited: tuple[int, ...] = ()
    doing: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    store_problem: str | None = None
    age_s: float = 0.0


class RollCall:
    def __init__(self, store: torch_internals.Store, rank: int) -> None:
        self._store = weakref.ref(store)  # a strong reference would keep the server's port after torch is shut down
        self._rank = rank
        self._client: torch_internals.Store | None = None
        self._lock = threading.Lock()  # guards what follows but for the waits; never held while the store is asked
        self._waits: dict[int, Waiting] = {}
        self._answered: dict[int, float] = {}  # call -> time.monotonic()
        self._joined: set[int] = set()  # calls whose outcome this process has reported
        self._last: tuple[float, Roll] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bagua-roll-call", daemon=True)
        self._thread.start()

    def is_of(self, store: torch_internals.Store) -> bool:
        return self._store() is store

    def stop(self) -> None:
        """Ends the thread, unless it hangs in the store."""
        self._stop.set()
        self._thread.join(STOP_S)

    def waiting(
        self,
        ranks: Sequence[int],
        what: str,
        group: Group | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> Waiting:
        """A context: this thread is in a collective of these global ranks.

        Args:
            group: which carries it, so that deadlocks are found.
            give_up: ends it then, called on another thread.
        """
        return Waiting(self._waits, ranks, what, group, give_up)

    def call(
        self,
        ranks: Sequence[int],
        what: str,
        window_s: float,
        on_exited: Callable[[Roll], None] = lambda _: None,
        hurry: threading.Event | None = None,
    ) -> Roll:
        """Waits for answers of these global ranks for at most `window_s`, and returns in any case soon after.

        Args:
            on_exited: called, on another thread, as soon as it is found that processes of ranks have ended.
            hurry: once it is set, nobody waits for further answers.
        """
        hurry = hurry or threading.Event()
        rolls: list[Roll] = []
        # The store's client may be taken by a thread that waits in it, and its server may have been stopped.
        thread = threading.Thread(
            target=lambda: rolls.append(self._call(tuple(ranks), what, window_s, on_exited, hurry)),
            name="bagua-roll-call",
            daemon=True,
        )
        thread.start()
        thread.join(window_s + GRACE_S)
        roll = rolls[0] if rolls else Roll(store_problem=f"it did not answer within {window_s + GRACE_S:g} s")
        if roll.store_problem is not None:
            return self._last_roll(ranks, roll.store_problem) or roll
        return roll

    def _last_roll(self, ranks: Sequence[int], store_problem: str) -> Roll | None:
        """What the answering thread saw before the store was lost."""
        with self._lock:
            last = self._last
        if last is None or time.monotonic() - last[0] > FRESH_S:
            return None
        missing = tuple(rank for rank in last[1].missing if rank in ranks)
        return replace(last[1], missing=missing, store_problem=store_problem, age_s=time.monotonic() - last[0])

    # --- the thread that calls ---------------------------------------------------------------------------------------

    def _call(
        self,
        ranks: tuple[int, ...],
        what: str,
        window_s: float,
        on_exited: Callable[[Roll], None],
        hurry: threading.Event,
    ) -> Roll:
        try:
            client = self._connect()
            number = self._join_call(client)
            exited = self._report_exited(client, number, ranks, on_exited)
            with self._lock:
                self._joined.add(number)
                begin = self._answered.get(number)
            self._answer(client, number, FAILED + what)
            deadline = (time.monotonic() if begin is None else begin) + window_s
            pause = FIRST_PAUSE_S
            while not (is_complete := client.check(_answer_keys(number, ranks))):
                left = deadline - time.monotonic()
                if exited and client.check(_answer_keys(number, [rank for rank in ranks if rank not in exited])):
                    break
                if left <= 0 or hurry.is_set() or self._stop.wait(min(pause, left)):
                    break
                exited = exited or self._report_exited(client, number, ranks, on_exited)
                pause = min(2 * pause, TICK_S)
            return _read_roll(client, number, ranks, is_complete, exited)
        except Exception as error:  # whatever the store raises is the finding
            return Roll(store_problem=" ".join(f"{type(error).__name__}: {error}".split())[:200])

    def _report_exited(
        self,
        client: torch_internals.Store,
        number: int,
        ranks: tuple[int, ...],
        on_exited: Callable[[Roll], None],
    ) -> tuple[int, ...]:
        """See [Note: exited ranks]. A rank that has answered has reported a failure itself, and is not its cause."""
        exited = tuple(
            rank
            for rank in group_topology.exited_ranks(_on_this_node(self._rank, ranks), client)
            if not client.check(_answer_keys(number, [rank]))
        )
        if exited:
            on_exited(Roll(exited, exited, hosts=_hosts(client, exited)))
        return exited

    def _join_call(self, client: torch_internals.Store) -> int:
        """The number of the call under way or, if there is none that is about this failure, of a new one."""
        text = client.compare_set(f"{_PREFIX}/call", "", _NO_CALL).decode()
        number, seconds = _parse_call(text)
        with self._lock:
            is_used = number in self._joined
        if is_used or abs(time.time() - seconds) > FRESH_S:
            text = client.compare_set(f"{_PREFIX}/call", text, f"{number + 1}:{time.time():.3f}").decode()
            number, _ = _parse_call(text)  # ours, or one that another rank has raised in this moment
        return number

    def _connect(self) -> torch_internals.Store:
        """A connection of our own: a client can do one thing at a time, and others wait long in theirs."""
        if self._client is None:
            store = self._store()
            if store is None:
                raise RuntimeError("torch.distributed has been shut down")
            store.check([f"{_PREFIX}/call"])  # fails at once if the server is gone; connecting would try again for long
            if not hasattr(store, "clone"):  # torch before 2.8
                return store
            self._client = store.clone()
        return self._client

    # --- the thread that answers -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._connect()
        except Exception:
            pass  # whoever calls the roll finds out, and says so
        next_reading = 0.0
        detector = DeadlockDetector(self._rank)
        while not self._stop.wait(TICK_S):
            wait = self._oldest_wait()
            now = time.monotonic()
            if wait is None or now - wait.since < PATIENCE_S:
                continue
            try:
                client = self._connect()
                for deadlocked in detector.find(client, [one for one in list(self._waits.values()) if one.group]):
                    deadlocked.give_up()
                number, seconds = _parse_call(client.compare_set(f"{_PREFIX}/call", "", _NO_CALL).decode())
                if abs(time.time() - seconds) > FRESH_S:
                    continue
                self._answer(client, number, wait.what)
                if now >= next_reading:
                    # The store may be gone when our own collective fails: its server can be one that leaves before us.
                    next_reading = now + 1.0
                    roll = _read_roll(client, number, wait.ranks, client.check(_answer_keys(number, wait.ranks)))
                    with self._lock:
                        self._last = time.monotonic(), roll
            except Exception:
                return  # the store is gone, and with it all calls

    def _oldest_wait(self) -> Waiting | None:
        return min(list(self._waits.values()), key=lambda wait: wait.since, default=None)

    def _answer(self, client: torch_internals.Store, number: int, what: str) -> None:
        """To this call, and to those before that somebody may still wait for."""
        with self._lock:
            unanswered = [
                call for call in range(max(1, number - MAX_OLD_CALLS), number + 1) if call not in self._answered
            ]
            self._answered.update(dict.fromkeys(unanswered, time.monotonic()))
        for call in unanswered:
            client.set(f"{_PREFIX}/{call}/{self._rank}", what)


def _on_this_node(rank: int, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that may be on this node: asking for the places of thousands would take too long."""
    first = rank - launch_environment.local_rank()
    return [one for one in ranks if first <= one < first + launch_environment.local_world_size() and one != rank]


def _parse_call(text: str) -> tuple[int, float]:
    number, seconds = text.split(":")
    return int(number), float(seconds)


def _answer_keys(number: int, ranks: Sequence[int]) -> list[str]:
    return [f"{_PREFIX}/{number}/{rank}" for rank in ranks]


def _read_roll(
    client: torch_internals.Store,
    number: int,
    ranks: tuple[int, ...],
    is_complete: bool,
    exited: tuple[int, ...] = (),
) -> Roll:
    missing = () if is_complete else _absent(client, number, ranks)
    present = [rank for rank in ranks if rank not in missing]
    doing = [text.decode(errors="replace") for text in client.multi_get(_answer_keys(number, present))]
    exited = tuple(rank for rank in exited if rank in missing)
    return Roll(missing, exited, dict(zip(present, doing, strict=True)), _hosts(client, missing[:MAX_HOSTS]))


def _absent(client: torch_internals.Store, number: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Few are, as a rule: halving asks less often than asking for each."""
    if client.check(_answer_keys(number, ranks)):
        return ()
    if len(ranks) == 1:
        return ranks
    middle = len(ranks) // 2
    return _absent(client, number, ranks[:middle]) + _absent(client, number, ranks[middle:])


def _hosts(client: torch_internals.Store, ranks: Sequence[int]) -> dict[int, str]:
    hosts = {}
    for rank in ranks:
        key = group_topology.PLACE_KEY.format(rank)
        if client.check([key]):
            hosts[rank] = str(json.loads(client.get(key))["host"])
    return hosts


_the_roll_call: RollCall | None = None
_creation = threading.Lock()


def current_roll_call() -> RollCall:
    """Raises ValueError if torch.distributed is not initialized."""
    global _the_roll_call
    store = torch_internals.default_store()
    roll_call = _the_roll_call
    if roll_call is not None and roll_call.is_of(store):
        return roll_call
    with _creation:
        if _the_roll_call is None or not _the_roll_call.is_of(store):
            stop_roll_call()
            _the_roll_call = RollCall(store, dist.get_rank())
        return _the_roll_call


def waiting_for(
    ranks: Sequence[int],
    what: str,
    group: Group | None = None,
    give_up: Callable[[], None] | None = None,
) -> Waiting | None:
    """`RollCall.waiting`; None where there is nobody to wait for, or torch.distributed is not initialized."""
    if len(ranks) > 1 and dist.is_initialized():
        return current_roll_call().waiting(ranks, what, group, give_up)
    return None


@gloo_exit.before_pause
def stop_roll_call() -> None:
    # A thread that is in the store while the interpreter is taken down can end the process with a signal.
    if _the_roll_call is not None:
        _the_roll_call.stop()
