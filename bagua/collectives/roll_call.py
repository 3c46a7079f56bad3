"""Which ranks are still there after a collective has failed: they answer a roll call through the job's store.

One `RollCall` per process, owned by this module, as long as torch's default group lives. Any thread may use it; it has
a daemon thread of its own. That does what ranks that wait for long do together (bagua.collectives.long_waits), too, and
ends waits for ranks that are proven to be gone (bagua.collectives.presence).

[Note: why a thread answers]
When a rank dies, gloo fails at once only where a connection to it was in use: with a ring, at its two neighbors. The
other survivors wait in their collective until their own neighbors leave, or for the timeout. To answer they cannot
return from it, and if nobody answered for them, every survivor would be taken for dead. So while a collective takes
longer than PATIENCE_S, a thread looks whether the roll is being called, and answers. A job that is well never asks the
store anything, and a rank that is alive but in no collective does not answer: that is what the others wait for, too.

[Note: keys] All below "bagua/roll_call/":
    call              "number:time" of the last call, in s of the caller's clock. It is changed by compare_set, so that
                      ranks that fail together join one call.
    <number>          the answers, a line of JSON each: [rank, what it is doing], or {"exited": [ranks]}
    <number>/outcome  an `_Outcome`, once the rank that has raised the call has all the answers that it waits for, or
                      has waited long enough. The others look for this alone, so that a call takes a few requests of
                      each rank. Those that ask for other ranks read the answers themselves.

[Note: exited ranks] torchrun ends all ranks of a host within 0.1 s of the first that dies, long before the roll is
complete. So the caller first looks whether the process of a rank on its own host has ended, and reports that at once.
Only the first such finding counts: later ones may be ranks that the launcher has ended. Nor does a rank count that
SIGTERM has ended, if another has ended otherwise.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from bagua.collectives import gloo_exit, group_topology, launch_environment, presence, torch_internals
from bagua.collectives.long_waits import INQUIRY, NO_INQUIRY, VERDICTS, LongWaits, name_of
from bagua.collectives.waiting import EXITED, Gone, Members, Waiting

# In a collective, before the store is asked: longer than collectives of a step take, so that a job that is well asks
# nothing; short beside the window of a call (failure_report.ROLL_CALL_S), within which this rank has to answer.
PATIENCE_S = 0.5
# Between two looks whether a collective takes long, and whether there is news in the store; there less often after a
# while. Only ranks that wait ask the store, which can answer that for thousands.
TICK_S = 0.25
SLOW_TICK_S = 1.0
SLOW_AFTER_S = 5.0
GRACE_S = 2.0  # added to the time for answers, for a slow store
FRESH_S = 60.0  # an older call was about something else; clocks of hosts may differ by this much
STOP_S = 1.0
FIRST_PAUSE_S = 0.02  # between two looks for answers; doubles each time
MAX_OLD_CALLS = 8
MAX_HOSTS = 16
MAX_ALIKE, MAX_DOING = 16, 64  # ranks of which is told what they do
# From the proof that a process has ended to the end of waits for it: who is connected to it fails earlier, and says so.
END_S = 10.0
MAX_WATCH_PAUSE_S = 30.0  # between two looks for the place of the rank to watch; doubles each time

FAILED = "failed: "  # before what a rank was doing, if it has failed in that
_PREFIX = "bagua/roll_call"
_CALL = f"{_PREFIX}/call"
_NO_CALL = "0:0"

_logger = logging.getLogger("bagua")


@dataclass(frozen=True)
class Roll:
    """
    Attributes:
        missing: global ranks that did not answer.
        exited: those of them whose process has ended, as far as that is known.
        how: what is known of the missing ones besides: "has answered no TCP packet for 30 s".
        doing: what those that answered were doing.
        hosts: of missing ranks, where known.
        store_problem: why there is no answer at all, or why the roll is an older one; None: there was no problem.
        age_s: of this reading.
    """

    missing: tuple[int, ...] = ()
    exited: tuple[int, ...] = ()
    how: str = ""
    doing: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    store_problem: str | None = None
    age_s: float = 0.0


class _Outcome(NamedTuple):
    """
    Attributes:
        asked: checksum of the ranks that were asked for.
        missing: those of them that did not answer.
        exited: those of them whose process has ended.
        doing: what the others do, some of those that do the same. Not a dictionary: JSON has no numbers as keys.
    """

    asked: int
    missing: Sequence[int]
    exited: Sequence[int]
    doing: Sequence[tuple[int, str]]


def _checksum(ranks: Sequence[int]) -> int:
    return zlib.crc32(repr(tuple(ranks)).encode())


def _outcome(ranks: Sequence[int], text: bytes) -> _Outcome:
    doing, exited = _read_answers(text)
    shown: defaultdict[str, int] = defaultdict(int)
    some: list[tuple[int, str]] = []
    for rank in ranks:
        if rank in doing and shown[doing[rank]] < MAX_ALIKE and len(some) < MAX_DOING:
            shown[doing[rank]] += 1
            some.append((rank, doing[rank]))
    missing = [rank for rank in ranks if rank not in doing]
    return _Outcome(_checksum(ranks), missing, [rank for rank in missing if rank in exited], some)


def _read_answers(text: bytes) -> tuple[dict[int, str], set[int]]:
    """(by rank what it does, those that have exited)."""
    doing: dict[int, str] = {}
    exited: set[int] = set()
    for line in map(json.loads, text.splitlines()):
        if isinstance(line, dict):
            exited.update(line["exited"])
        else:
            doing[line[0]] = line[1]
    return doing, exited


class RollCall:
    """
    Args:
        store: of the job.
        rank: this one.
        watched: the rank that this one watches.
    """

    def __init__(self, store: torch_internals.Store, rank: int, watched: int | None = None) -> None:
        self._store = weakref.ref(store)  # a strong reference would keep the server's port after torch is shut down
        self._rank = rank
        self._client: torch_internals.Store | None = None
        self._has_keys = False
        self._lock = threading.Lock()  # guards what follows but for the waits; never held while the store is asked
        self._waits: dict[int, Waiting] = {}
        self._answered: dict[int, float] = {}  # call -> time.monotonic()
        self._joined: set[int] = set()  # calls whose outcome this process has reported
        self._last: tuple[float, Roll] | None = None
        self._read = 0  # the call that it is of
        self._gone: dict[int, tuple[float, Gone]] = {}
        self._untold: list[dict[str, Any]] = []  # verdicts
        self._obeyed = 0  # lines
        self._created = time.time()
        self._watched = watched
        self._next_watch, self._watch_pause = 0.0, TICK_S
        self._peer_watch: presence.PeerWatch | None = None
        self._long_waits = LongWaits(rank)
        self._next_look = 0.0
        self._stop = threading.Event()
        if (own := presence.own_presence()) is not None:
            own.doing = self._doing
        self._thread = threading.Thread(target=self._watch, name="bagua-roll-call", daemon=True)
        self._thread.start()

    def is_of(self, store: torch_internals.Store) -> bool:
        return self._store() is store

    def stop(self) -> None:
        """Ends the thread, unless it hangs in the store."""
        self._stop.set()
        self._thread.join(STOP_S)
        if self._peer_watch is not None:
            self._peer_watch.stop()

    def waiting(
        self,
        ranks: Sequence[int],
        what: str,
        group: Members | None = None,
        position: int | None = None,
        can_give_up: bool = False,
    ) -> Waiting:
        """A context: this thread is in a collective. The arguments are those of `Waiting`."""
        return Waiting(self._waits, ranks, what, group, position, can_give_up)

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
            number, is_first = self._join_call(client)
            is_first |= client.check([_outcome_key(number)])  # whoever has waited so far has not waited for this rank
            places = group_topology.places_of(client, _on_this_node(self._rank, ranks))
            exited = self._tell_exited(client, number, places, on_exited)
            with self._lock:
                self._joined.add(number)
                begin = self._answered.get(number)
            self._answer(client, number, FAILED + what)
            deadline = (time.monotonic() if begin is None else begin) + window_s + (0.0 if is_first else TICK_S)
            pause = FIRST_PAUSE_S
            while True:
                left = deadline - time.monotonic()
                is_over = left <= 0 or hurry.is_set()
                if not is_first and client.check([_outcome_key(number)]):
                    outcome = _Outcome(*json.loads(client.get(_outcome_key(number))))
                    if outcome.asked == _checksum(ranks):
                        break
                    is_first = True
                if is_first or is_over:
                    outcome = _outcome(ranks, client.get(_answers_key(number)))
                    if is_over or set(outcome.missing) <= set(outcome.exited):
                        break
                if self._stop.wait(min(pause, left)):
                    raise RuntimeError("torch.distributed has been shut down")
                exited = exited or self._tell_exited(client, number, places, on_exited)
                pause = min(2 * pause, TICK_S)
            if is_first:
                client.set(_outcome_key(number), json.dumps(outcome))
            return _roll(client, outcome)
        except Exception as error:  # whatever the store raises is the finding
            return Roll(store_problem=" ".join(f"{type(error).__name__}: {error}".split())[:200])

    def _tell_exited(
        self,
        client: torch_internals.Store,
        number: int,
        places: dict[int, group_topology.Place],
        on_exited: Callable[[Roll], None],
    ) -> bool:
        """See [Note: exited ranks]. A rank that has answered has reported a failure itself, and is not its cause."""
        exited = group_topology.exited_ranks(places)
        if exited and client.check([_answers_key(number)]):
            doing, _ = _read_answers(client.get(_answers_key(number)))
            exited = tuple(rank for rank in exited if rank not in doing)
        if not exited:
            return False
        torch_internals.add_line(client, _answers_key(number), json.dumps({"exited": exited}))
        on_exited(Roll(exited, exited, hosts={rank: places[rank].host for rank in exited}))
        return True

    def _join_call(self, client: torch_internals.Store) -> tuple[int, bool]:
        """The number of the call under way or, if there is none that is about this failure, of a new one; and whether
        it is new."""
        text = client.compare_set(_CALL, "", _NO_CALL).decode()
        number, seconds = _parse_call(text)
        with self._lock:
            is_used = number in self._joined
        if not is_used and abs(time.time() - seconds) <= FRESH_S:
            return number, False
        mine = f"{number + 1}:{time.time():.6f}:{self._rank}"
        text = client.compare_set(_CALL, text, mine).decode()
        return _parse_call(text)[0], text == mine  # or another rank has raised it in this moment

    def _connect(self) -> torch_internals.Store:
        """A connection of our own: a client can do one thing at a time, and others wait long in theirs."""
        if self._client is None:
            store = self._store()
            if store is None:
                raise RuntimeError("torch.distributed has been shut down")
            store.check([_CALL])  # fails at once if the server is gone; connecting would try again for long
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
        is_over = False
        while not is_over:
            try:
                self.look()
            except Exception:
                return  # the store is gone, and with it all calls
            is_over = self._stop.wait(TICK_S)

    def look(self) -> None:
        """What the thread does now and then. Asks the store only if a wait takes long."""
        now = time.monotonic()
        if self._watched is not None and now >= self._next_watch:
            self._begin_watch(self._watched, now)
        with self._lock:
            untold, self._untold = self._untold, []
        for verdict in untold:
            torch_internals.add_line(self._connect(), VERDICTS, json.dumps(verdict))
        wait = self._oldest_wait()
        if wait is None or now - wait.since < PATIENCE_S or now < self._next_look:
            return
        self._next_look = now + (SLOW_TICK_S if now - wait.since > SLOW_AFTER_S else TICK_S)
        client = self._connect()
        if not self._has_keys:
            for key, text in ((_CALL, _NO_CALL), (INQUIRY, NO_INQUIRY), (VERDICTS, "\n")):
                client.compare_set(key, "", text)
            self._has_keys = True
        call, inquiry, verdicts = (text.decode() for text in client.multi_get([_CALL, INQUIRY, VERDICTS]))
        self._answer_call(client, *_parse_call(call), wait)
        self._long_waits.look(client, inquiry, list(self._waits.values()), now)
        self._obey(client, verdicts, now)
        self._end_waits(now)

    def _answer_call(self, client: torch_internals.Store, number: int, seconds: float, wait: Waiting) -> None:
        if abs(time.time() - seconds) > FRESH_S or number == self._read:
            return
        self._answer(client, number, wait.what)
        # The store may be gone when our own collective fails: its server can be one that leaves before us.
        if client.check([_outcome_key(number)]):
            self._read = number
            outcome = _Outcome(*json.loads(client.get(_outcome_key(number))))
            if outcome.asked != _checksum(wait.ranks):
                outcome = _outcome(wait.ranks, client.get(_answers_key(number)))
            missing = [rank for rank in outcome.missing if rank != self._rank]
            roll = _roll(client, outcome._replace(missing=missing))
            with self._lock:
                self._last = time.monotonic(), roll

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
            torch_internals.add_line(client, _answers_key(call), json.dumps([self._rank, what]))

    def _doing(self) -> str:
        """For those that ask this process."""
        wait = self._oldest_wait()
        return "" if wait is None else f"it is in {wait.what}"

    # --- the end of waits --------------------------------------------------------------------------------------------

    def _begin_watch(self, rank: int, now: float) -> None:
        place = group_topology.places_of(self._connect(), [rank]).get(rank)
        if place is None:  # it has not come so far
            self._next_watch, self._watch_pause = now + self._watch_pause, min(2 * self._watch_pause, MAX_WATCH_PAUSE_S)
            return
        self._watched = None
        if place.door.port:
            self._peer_watch = presence.PeerWatch(
                place.door,
                name_of(rank, place),
                partial(self._lose, rank, place),
                partial(group_topology.has_failed, place),
                presence.ATTEMPT_S,
                presence.ATTEMPTS,
            )

    def _lose(self, rank: int, place: group_topology.Place, how: str) -> None:
        """It is proven that the rank is gone. On the watching thread: the store may be gone with it."""
        gone = Gone(rank, place.host, how)
        if how != EXITED:
            _logger.warning(f"Rank {rank} (host {place.host}) {how}.")
        with self._lock:
            self._untold.append({"gone": gone, "token": place.door.token, "time": time.time()})
        self._note(gone, time.monotonic())
        while not self._stop.wait(TICK_S):
            self._end_waits(time.monotonic())

    def _note(self, gone: Gone, now: float) -> None:
        with self._lock:
            self._gone.setdefault(gone.rank, (now, gone))

    def _obey(self, client: torch_internals.Store, verdicts: str, now: float) -> None:
        lines = verdicts.splitlines()
        for verdict in map(json.loads, filter(None, lines[self._obeyed :])):
            if "deadlocked" in verdict:
                self._end_deadlocked(*verdict["deadlocked"])
            elif self._is_of_this_job(client, verdict):
                self._note(Gone(*verdict["gone"]), now)
        self._obeyed = len(lines)

    def _is_of_this_job(self, client: torch_internals.Store, verdict: dict[str, Any]) -> bool:
        """A store that torch keeps over restarts has verdicts of processes that were replaced since."""
        rank = verdict["gone"][0]
        place = group_topology.places_of(client, [rank]).get(rank)
        return place is not None and place.door.token == verdict["token"] and verdict["time"] >= self._created

    def _end_deadlocked(self, group: str, rank: int, since: float) -> None:
        for wait in list(self._waits.values()) if rank == self._rank else ():
            if wait.since == since and (post := wait.post()) is not None and post[0] == group:
                wait.end()

    def _end_waits(self, now: float) -> None:
        with self._lock:
            gone = {rank: one for rank, (at, one) in self._gone.items() if one.how != EXITED or now - at >= END_S}
        if not gone:
            return
        for wait in list(self._waits.values()):
            if now - wait.since >= PATIENCE_S and (lost := gone.keys() & set(wait.ranks)):
                wait.end(gone[min(lost)])


def _on_this_node(rank: int, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that may be on this node: asking for the places of thousands would take too long."""
    first = rank - launch_environment.local_rank()
    return [one for one in ranks if first <= one < first + launch_environment.local_world_size() and one != rank]


def watched_by(rank: int, world_size: int, local_world_size: int) -> int | None:
    """See [Note: who watches whom] in bagua.collectives.presence."""
    next_node = (rank + local_world_size) % world_size
    watched = (rank + 1) % world_size if next_node == rank else next_node
    return None if watched == rank else watched


def _parse_call(text: str) -> tuple[int, float]:
    number, seconds = text.split(":")[:2]
    return int(number), float(seconds)


def _answers_key(number: int) -> str:
    return f"{_PREFIX}/{number}"


def _outcome_key(number: int) -> str:
    return f"{_PREFIX}/{number}/outcome"


def _roll(client: torch_internals.Store, outcome: _Outcome) -> Roll:
    places = group_topology.places_of(client, outcome.missing[:MAX_HOSTS])
    hosts = {rank: place.host for rank, place in places.items()}
    return Roll(tuple(outcome.missing), tuple(outcome.exited), doing=dict(outcome.doing), hosts=hosts)


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
            rank = dist.get_rank()
            watched = watched_by(rank, dist.get_world_size(), launch_environment.local_world_size())
            _the_roll_call = RollCall(store, rank, watched)
        return _the_roll_call


def waiting_for(
    ranks: Sequence[int],
    what: str,
    group: Members | None = None,
    position: int | None = None,
    can_give_up: bool = False,
) -> Waiting | None:
    """`RollCall.waiting`; None where there is nobody to wait for, or torch.distributed is not initialized."""
    if len(ranks) > 1 and dist.is_initialized():
        return current_roll_call().waiting(ranks, what, group, position, can_give_up)
    return None


@gloo_exit.before_pause
def stop_roll_call() -> None:
    # A thread that is in the store while the interpreter is taken down can end the process with a signal.
    if _the_roll_call is not None:
        _the_roll_call.stop()
