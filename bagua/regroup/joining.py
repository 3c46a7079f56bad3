"""How a process becomes a member of a job that has begun.

[Note: how a rank joins]
    alone      from `init_process_group` until its model is wrapped it is the only rank of a group of its own
    asks       each member for admission, by a connection that stays open: rank 0 first (`ask`). Members compare the
               models; from their answer on, they look into the store before each step (`Guests`)
    follows    the steps of the members, until it has caught up (bagua.regroup.following)
    admitted   rank 0 writes into the store, before step k, that the epoch ends at step k + 1. All see that before they
               begin that step: none comes to it without what rank 0 gives in step k
    agreed     they report there that they admit it, and make the next epoch. If one of them was told of a loss instead,
               the epoch is one without it, and it asks the members of that one
    fetches    what it lacks, from all members, which wait for it before their step (bagua.regroup.transfer)
    connects   with them. They call what users have asked for, and give it what that may have changed

Nobody waits long for one that joins: see `Patience`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from bagua.job import peer_watch
from bagua.regroup.epochs import CANCELLED, Epoch, EpochStore, Member
from bagua.regroup.following import Followers, Following
from bagua.regroup.transfer import Guest, StateDoor, receive_message, send_message

STALL_S = 20.0  # as for connecting: who is there for it has no reason to be slow
STALL_STEPS = 3
CONFIRM_S = 5.0  # for which all ranks refuse connections, before a process gives up that was to join them
PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
_MORE_MODELS = "more models"


class Guests:
    """Those that have asked this process for admission to the present epoch. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guests: list[Guest] = []

    def __bool__(self) -> bool:
        return bool(self._guests)

    def add(self, guest: Guest) -> None:
        with self._lock:
            self._guests.append(guest)

    def clear(self) -> None:
        """Another epoch has begun."""
        with self._lock:
            self._guests = []

    def admitted(self, store: EpochStore, epoch: Epoch, step: int, decides: bool) -> tuple[str, ...]:
        """
        Before a step, on the training thread.

        Args:
            decides: this is rank 0.

        Returns:
            tokens of those that join now; the same on all ranks.
        """
        tokens = []
        for guest in tuple(self._guests):
            if decides and guest.is_gone:
                store.admit(epoch, guest.name, None)
            elif decides and guest.is_ready:
                store.admit(epoch, guest.name, step + 1)
            said = store.admission(epoch, guest.name)
            if said == CANCELLED:
                with self._lock:
                    self._guests.remove(guest)
            elif said is not None and int(said) == step:
                tokens.append(guest.token)
        return tuple(sorted(tokens))


class Patience:
    """With those that join, of a member that waits for them. None of them may hold up a job that works.

    Args:
        limit_s: after which one that goes on receiving is too slow.
        step_s: how long the last step has taken here. One that joins may be making the last step that it has followed.
    """

    def __init__(self, store: EpochStore, limit_s: float, step_s: float) -> None:
        self._store, self._limit_s = store, limit_s
        self._stall_s = max(STALL_S, STALL_STEPS * step_s)
        self._begin = self._looked = time.monotonic()
        self._seen: dict[str, tuple[str, float]] = {}

    def lost(self, missing: list[Member], newcomers: tuple[str, ...]) -> list[tuple[Member, str]]:
        """Those of the newcomers that are not waited for any more, and why."""
        now = time.monotonic()
        if now - self._looked < 1:
            return []
        self._looked = now
        found = []
        for one in missing:
            if one.token not in newcomers:
                continue
            progress = self._store.progress(one.token)
            if self._seen.get(one.token, ("", 0.0))[0] != progress or one.token not in self._seen:
                self._seen[one.token] = progress, now
            if now - self._seen[one.token][1] > self._stall_s:
                found.append((one, f"has received nothing for {self._stall_s:.0f} s while it joined"))
            elif now - self._begin > self._limit_s:
                found.append((one, f"has not joined within {self._limit_s:g} s, half of the job's timeout"))
        return found


def ask(
    store: EpochStore,
    member: Member,
    description: dict[str, Any],
    followers: Callable[[], Followers],
    pause: Callable[[Epoch, str, float], None],
) -> bool | None:
    """
    Ask the members of the present epoch, and of those after it, until one has this process in it.

    Args:
        description: of its models, for comparison.
        followers: makes what takes the state of the job, while that goes on.
        pause: waits for so long, and raises at the deadline; is told the epoch, and what it is waited for.

    Returns:
        whether this process has followed the others to the present epoch's step; None: they have more models, the first
        of which are like its own.

    Raises:
        RuntimeError: the job has ended, or refuses this process.
    """
    store.add_joiner(member)
    attempt, waited, has_followed = 0, PAUSE_S, False
    gone_since: float | None = None
    while True:
        epoch = store.current()
        if member.token in epoch.tokens:
            return has_followed
        lost = store.lost()
        if all(one.token in lost or _is_gone(one) for one in epoch.members):
            gone_since = gone_since or time.monotonic()
            if all(token in lost for token in epoch.tokens) or time.monotonic() - gone_since > CONFIRM_S:
                raise RuntimeError(
                    f"The job at this store has ended: all ranks of epoch {epoch.number} are gone.\n"
                    "This process was to join it.\n"
                    "To start another job, start its store anew."
                )
            pause(epoch, "its ranks to answer", PAUSE_S)
            continue
        attempt, gone_since = attempt + 1, None
        name = f"{member.token}.{attempt}"
        links: list[socket.socket] = []
        try:
            problem = _ask_members(store, epoch, {**description, "name": name, "token": member.token}, links)
            if problem == _MORE_MODELS:
                return None
            if problem is None:
                has_followed = _follow(store, epoch, name, links, followers(), pause)
                _wait_for_next(store, epoch, name, links, pause)
                waited = PAUSE_S
                continue
        finally:
            for link in links:
                link.close()
        pause(epoch, problem, waited)
        waited = min(2 * waited, MAX_PAUSE_S)


def _is_gone(member: Member) -> bool:
    """Whether its process has ended, or its port refuses connections. Proof if that lasts."""
    if member.place.exit_status() is not None:
        return True
    _, answer = peer_watch.reach_any(member.place.door, peer_watch.ATTEMPT_S)
    if answer.connection is not None:
        answer.connection.close()
    return answer.state in ("refused", "another")


def _ask_members(store: EpochStore, epoch: Epoch, said: dict[str, Any], links: list[socket.socket]) -> str | None:
    """None: all know of this process. Otherwise why they do not yet.

    Raises:
        RuntimeError: they refuse it.
    """
    for rank, text in enumerate(store.doors(epoch.tokens)):
        try:
            links.append(StateDoor.of_json(text).connect({"join": {**said, "epoch": epoch.number}}))
            answer = receive_message(links[-1])
        except OSError as error:
            return f"rank {rank} to answer ({error})"
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        if "more" in answer:
            return _MORE_MODELS
        if "later" in answer:
            return str(answer["later"])
    return None


def _follow(
    store: EpochStore,
    epoch: Epoch,
    name: str,
    links: list[socket.socket],
    followers: Followers,
    pause: Callable[[Epoch, str, float], None],
) -> bool:
    """Whether this process has followed the members, and was admitted. If it cannot follow, it takes all of the state
    then."""
    is_told = False

    def tell() -> None:
        nonlocal is_told
        is_told = True
        send_message(links[0], {"ready": True})

    token = name.partition(".")[0]
    doors = [StateDoor.of_json(text) for text in store.doors(epoch.tokens)]
    with contextlib.ExitStack() as stack:
        result = False
        with contextlib.suppress(OSError):
            connections = []
            for share, door in enumerate(doors):
                request = {"epoch": epoch.number, "share": share, "of": len(doors)}
                connections.append(stack.enter_context(door.connect({"follow": request})))
            following = Following(connections, followers)
            result = following.run(
                tell,
                lambda steps: store.set_progress(token, f"followed {steps} steps"),
                lambda: pause(epoch, "its ranks to begin a step", 0),
            )
        if not is_told:
            with contextlib.suppress(OSError):  # then the epoch is over
                tell()
    return result


def _wait_for_next(
    store: EpochStore,
    epoch: Epoch,
    name: str,
    links: list[socket.socket],
    pause: Callable[[Epoch, str, float], None],
) -> None:
    """Until there is another epoch, or a member is gone."""
    begin = time.monotonic()
    while store.current().number == epoch.number and store.admission(epoch, name) != CANCELLED:
        pause(epoch, "its ranks to begin a step", 0)
        # Members send nothing more: what can be read is the end.
        if select.select(links, [], [], min(max(0.01, 0.05 * (time.monotonic() - begin)), 0.25))[0]:
            return
