"""Which ranks are still there after a collective has failed: they answer a roll call through the job's store.

One `RollCall` per process, owned by the job's thread (bagua.job.job_thread). Any thread may call.

[Note: why a thread answers]
When a rank dies, gloo fails at once only where a connection to it was in use: with a ring, at its two neighbors. The
other survivors wait in their collective until their own neighbors leave, or for the timeout. To answer they cannot
return from it, and if nobody answered for them, every survivor would be taken for dead. So while a collective takes
longer than PATIENCE_S, the job's thread looks whether the roll is being called, and answers. A rank that is alive but
in no collective does not answer: that is what the others wait for, too.

[Note: keys] All below "bagua/roll_call/":
    call              "number:rank:token" of the last call and the process that has raised it, or "number::" if it is
                      over. It is changed by compare_set, so that ranks that fail together join one call.
    <number>          the answers, a line of JSON each: [rank, what it is doing], or {"exited": [ranks]}
    <number>/outcome  a `Roll`, once the rank that has raised the call has all the answers that it waits for, or has
                      waited long enough. The others look for this alone, so that a call takes a few requests of each
                      rank. Those that ask for other ranks read the answers themselves.

[Note: calls that are over] Ranks of one failure need not fail at the same time: who fails later joins the call that
there is, and finds the answers of those that have left since. The call of an earlier failure must not be joined. Clocks
of hosts may differ, so that the age of a call is known only to those that have seen it begin: each process that has
raised, joined or answered a call says after FRESH_S that it is over, unless another one has said so. A store that torch
keeps over restarts may have the call of processes that have all ended before: its caller has been replaced.

[Note: exited ranks] torchrun ends all ranks of a host within 0.1 s of the first that dies, long before the roll is
complete. So the caller first looks whether the process of a rank on its own host has ended, and reports that at once.
Only the first such finding counts: later ones may be ranks that the launcher has ended. Nor does a rank count that
SIGTERM has ended, if another has ended otherwise.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bagua import launch_environment
from bagua.job import places
from bagua.job.gone import EXITED, LEFT, NO_RESPONSE, no_response_within
from bagua.job.store_client import StoreClient
from bagua.job.torch_internals import Store, add_line
from bagua.job.verdicts import VerdictReader
from bagua.job.waiting import TICK_S, Waiting

GRACE_S = 2.0  # added to the time for answers, for a slow store
FRESH_S = 60.0  # an older call was about something else
FIRST_PAUSE_S = 0.02  # between two looks for answers; doubles each time
MAX_OLD_CALLS = 8
MAX_HOSTS = 16
MAX_ALIKE, MAX_DOING = 16, 64  # ranks of which is told what they do

FAILED = "failed: "  # before what a rank was doing, if it has failed in that
_PREFIX = "bagua/roll_call"
CALL, NO_CALL = f"{_PREFIX}/call", "0::"


@dataclass(frozen=True)
class Roll:
    """
    Attributes:
        missing: global ranks that did not answer.
        how: they are gone: EXITED, LEFT, or that they did not respond.
        doing: what those that answered were doing; some of those that do the same.
        hosts: of missing ranks, where known.
        store_problem: why there is no answer at all, or why the roll is an older one; None: there was no problem.
    """

    missing: tuple[int, ...] = ()
    how: str = ""
    doing: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    store_problem: str | None = None

    @property
    def is_explained(self) -> bool:
        """Whether it is known how all missing ranks are gone."""
        return self.how in (EXITED, LEFT)


class RollCall:
    """
    Args:
        stop: set when torch is shut down.
    """

    def __init__(self, store: StoreClient, rank: int, verdicts: VerdictReader, stop: threading.Event) -> None:
        self._store, self._rank, self._verdicts, self._stop = store, rank, verdicts, stop
        self._lock = threading.Lock()  # guards what follows; never held while the store is asked
        self._answered, self._answered_at = 0, 0.0  # the last call, time.monotonic()
        self._is_open = False  # that call; nobody has said that it is over, as far as is known here
        self._joined = 0  # the last call whose outcome this process has reported
        self._last: tuple[int, float, Roll] | None = None  # the last call that was read, when, and its outcome

    def call(
        self,
        ranks: Sequence[int],
        what: str,
        window_s: float,
        on_exited: Callable[[Roll], object] = lambda _: None,
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
        age_s = time.monotonic() - last[1] if last is not None else 0.0
        if last is None or age_s > FRESH_S:
            return None
        roll = last[2]
        how = roll.how if roll.is_explained else f"{NO_RESPONSE} when asked {age_s:.0f} s ago"
        missing = tuple(rank for rank in roll.missing if rank in ranks)
        return replace(roll, missing=missing, how=how, store_problem=store_problem)

    # --- the thread that calls ---------------------------------------------------------------------------------------

    def _call(
        self,
        ranks: tuple[int, ...],
        what: str,
        window_s: float,
        on_exited: Callable[[Roll], object],
        hurry: threading.Event,
    ) -> Roll:
        try:
            client = self._store.get()
            number, is_first = self._join(client)
            is_first |= client.check([_outcome_key(number)])  # whoever has waited so far has not waited for this rank
            near = places.places_of(client, _on_this_node(self._rank, ranks))
            is_told = self._tell_exited(client, number, near, on_exited)
            with self._lock:
                self._joined = max(self._joined, number)
                begin = self._answered_at if self._answered == number else time.monotonic()
            self._answer(client, number, FAILED + what)
            deadline = begin + window_s + (0.0 if is_first else TICK_S)
            pause = FIRST_PAUSE_S
            while True:
                left = deadline - time.monotonic()
                is_over = left <= 0 or hurry.is_set()
                if not is_first and client.check([_outcome_key(number)]):
                    if (roll := _of_json(client.get(_outcome_key(number)), ranks)) is not None:
                        return roll
                    is_first = True
                if is_first or is_over:
                    roll = self._found(client, number, ranks, no_response_within(window_s), hurry.is_set())
                    if is_over or not roll.missing or roll.is_explained:
                        break
                if self._stop.wait(min(pause, left)):
                    raise RuntimeError("torch.distributed has been shut down")
                is_told = is_told or self._tell_exited(client, number, near, on_exited)
                pause = min(2 * pause, TICK_S)
            roll = _with_hosts(client, roll)
            if is_first:
                client.set(_outcome_key(number), _to_json(roll, ranks))
            return roll
        except Exception as error:  # whatever the store raises is the finding
            return Roll(store_problem=" ".join(f"{type(error).__name__}: {error}".split())[:200])

    def _tell_exited(
        self, client: Store, number: int, near: Mapping[int, places.Place], on_exited: Callable[[Roll], object]
    ) -> bool:
        """See [Note: exited ranks]. A rank that has answered has reported a failure itself, and is not its cause."""
        exited = places.exited_ranks(near)
        if exited and client.check([_answers_key(number)]):
            doing, _ = _read_answers(client.get(_answers_key(number)))
            exited = tuple(rank for rank in exited if rank not in doing)
        if not exited:
            return False
        add_line(client, _answers_key(number), json.dumps({"exited": exited}))
        how = LEFT if self._verdicts.left(client, exited) >= set(exited) else EXITED
        on_exited(Roll(exited, how, hosts={rank: near[rank].host for rank in exited}))
        return True

    def _join(self, client: Store) -> tuple[int, bool]:
        """The number of the call under way or, if there is none that is about this failure, of a new one; and whether
        it is new."""
        text = client.compare_set(CALL, "", NO_CALL).decode()
        number, caller = parse_call(text)
        with self._lock:
            is_used = number <= self._joined or (number == self._answered and self._is_old())
        if not is_used and _is_of_this_job(client, caller):
            return number, False
        mine = f"{number + 1}:{self._rank}:{places.place_of_this_process().door.token}"
        text = client.compare_set(CALL, text, mine).decode()
        return parse_call(text)[0], text == mine  # or another rank has raised it in this moment

    def _found(self, client: Store, number: int, ranks: Sequence[int], no_response: str, in_hurry: bool) -> Roll:
        """What the answers say so far.

        Args:
            no_response: how ranks are gone of which nothing is known.
            in_hurry: others have had no time to answer, so that ranks that have exited are named alone.
        """
        doing, exited = _read_answers(client.get(_answers_key(number)))
        missing = [rank for rank in ranks if rank not in doing]
        if in_hurry and exited.intersection(missing):
            missing = [rank for rank in missing if rank in exited]
        how = ""
        if missing:
            left = self._verdicts.left(client, missing)
            how = LEFT if left.issuperset(missing) else EXITED if (left | exited).issuperset(missing) else no_response
        shown: defaultdict[str, int] = defaultdict(int)
        some: dict[int, str] = {}
        for rank in ranks:
            if rank in doing and shown[doing[rank]] < MAX_ALIKE and len(some) < MAX_DOING:
                shown[doing[rank]] += 1
                some[rank] = doing[rank]
        return Roll(tuple(missing), how, some)

    # --- the thread that ends calls ----------------------------------------------------------------------------------

    def end_old_call(self) -> None:
        """See [Note: calls that are over]."""
        with self._lock:
            number = self._answered if self._is_open and self._is_old() else 0
        if not number:
            return
        client = self._store.get()
        text = client.get(CALL).decode()
        if parse_call(text)[0] == number:
            client.compare_set(CALL, text, f"{number}::")
        with self._lock:
            self._is_open = self._answered != number

    def _is_old(self) -> bool:
        """The last call that was answered here. Under the lock."""
        return time.monotonic() - self._answered_at > FRESH_S

    # --- the thread that answers -------------------------------------------------------------------------------------

    def look(self, client: Store, text: str, wait: Waiting) -> None:
        """Answers, if the roll is called.

        Args:
            text: of the call, as it is in the store.
        """
        number, caller = parse_call(text)
        if caller is None or (self._last is not None and self._last[0] == number):
            return
        if number > self._answered and not _is_of_this_job(client, caller):
            return
        self._answer(client, number, wait.what)
        # The store may be gone when our own collective fails: its server can be one that leaves before us.
        if client.check([_outcome_key(number)]):
            roll = _of_json(client.get(_outcome_key(number)), wait.ranks)
            if roll is None:
                roll = _with_hosts(client, self._found(client, number, wait.ranks, NO_RESPONSE, False))
            missing = tuple(rank for rank in roll.missing if rank != self._rank)
            with self._lock:
                self._last = number, time.monotonic(), replace(roll, missing=missing)

    def _answer(self, client: Store, number: int, what: str) -> None:
        """To this call, and to those before that somebody may still wait for."""
        with self._lock:
            unanswered = range(max(self._answered, number - MAX_OLD_CALLS - 1) + 1, number + 1)
            if unanswered:
                self._answered, self._answered_at, self._is_open = number, time.monotonic(), True
        for call in unanswered:
            add_line(client, _answers_key(call), json.dumps([self._rank, what]))


def _on_this_node(rank: int, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that may be on this node: asking for the places of thousands would take too long."""
    first = rank - launch_environment.local_rank()
    return [one for one in ranks if first <= one < first + launch_environment.local_world_size() and one != rank]


def parse_call(text: str) -> tuple[int, tuple[int, str] | None]:
    """The number of a call, and the rank and token of its caller. None: it is over."""
    number, rank, token = text.split(":")
    return int(number), (int(rank), token) if rank else None


def _is_of_this_job(client: Store, caller: tuple[int, str] | None) -> bool:
    """See [Note: calls that are over]."""
    if caller is None:
        return False
    rank, token = caller
    place = places.places_of(client, [rank]).get(rank)
    return place is None or place.door.token == token


def _answers_key(number: int) -> str:
    return f"{_PREFIX}/{number}"


def _outcome_key(number: int) -> str:
    return f"{_PREFIX}/{number}/outcome"


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


def _with_hosts(client: Store, roll: Roll) -> Roll:
    found = places.places_of(client, roll.missing[:MAX_HOSTS])
    return replace(roll, hosts={rank: place.host for rank, place in found.items()})


def _to_json(roll: Roll, asked: Sequence[int]) -> str:
    """With a checksum of the ranks that were asked for, and no dictionaries: JSON has no numbers as keys."""
    return json.dumps([_checksum(asked), roll.missing, roll.how, [*roll.doing.items()], [*roll.hosts.items()]])


def _of_json(text: bytes, asked: Sequence[int]) -> Roll | None:
    """None: it is about other ranks."""
    checksum, missing, how, doing, hosts = json.loads(text)
    return Roll(tuple(missing), how, dict(doing), dict(hosts)) if checksum == _checksum(asked) else None


def _checksum(ranks: Sequence[int]) -> int:
    return zlib.crc32(repr(tuple(ranks)).encode())
