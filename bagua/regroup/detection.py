"""Finds out which members of an epoch are gone, and tells it to all. Threads: one for each watched member
(bagua.job.peer_watch), and one that waits for what others tell.

[Note: who watches whom] Each member watches the WATCHED that follow it, so that one is left that knows, if some that
follow each other are lost at once, as those of a node are. And those on its host, whose kernel proves more. The first
that knows writes it to the store, and puts a message into the mailbox of each member, for which a thread of theirs
waits there. So all know after two round trips.

[Note: proof] That a process is gone is proven as bagua.job.peer_watch says. In addition, where a refused connection is
the proof, and the kernel of this machine does not know the process: the connection is refused for CONFIRM_S. A firewall
that resets connections for a second ends nothing. Not so where members that are taken for lost come back.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable
from functools import partial

from bagua.job import peer_watch
from bagua.job.gone import EXITED
from bagua.job.places import Place
from bagua.rank_list import rank_list
from bagua.regroup.epochs import Epoch, EpochStore, Member

WATCHED = 16
CONFIRM_S = 1.25
CONFIRM_PAUSE_S = 0.25
MAIL_TIMEOUT = datetime.timedelta(minutes=10)  # then the thread waits anew
STOP_S = 1.0
OVER = "over"  # in this process's own mailbox: it does not wait for that any more

_logger = logging.getLogger("bagua")


class Watch:
    """Of the members that this process watches. Any thread.

    Args:
        on_lost: called with a member, and how it is gone, on the thread that has found out.
        confirms: a refused connection is no proof yet: see [Note: proof].
    """

    def __init__(self, token: str, on_lost: Callable[[Member, str], None], confirms: bool = True) -> None:
        self._token, self._on_lost, self._confirms = token, on_lost, confirms
        self._lock = threading.Lock()  # guards the dict
        self._watches: dict[str, peer_watch.PeerWatch] = {}
        self._is_stopped = threading.Event()

    def follow(self, epoch: Epoch) -> None:
        """Watch those of this epoch from now on."""
        mine = epoch.rank_of(self._token)
        following = epoch.members[mine + 1 :] + epoch.members[:mine]
        own = epoch.members[mine].place
        watched = [
            member
            for distance, member in enumerate(following)
            if distance < WATCHED or (member.place.host, member.place.pid_namespace) == (own.host, own.pid_namespace)
        ]
        tokens = {one.token for one in watched}
        with self._lock:
            ended = [self._watches.pop(token) for token in tuple(self._watches) if token not in tokens]
            for member in watched:
                # Several members may be threads of one process.
                if member.token not in self._watches and member.place.door.port and member.place.door != own.door:
                    self._watches[member.token] = self._watch(member)
        for one in ended:
            one.stop(waits=False)  # it may still look for a proof of what an agent has told

    def stop(self, waits: bool = True) -> None:
        self._is_stopped.set()
        with self._lock:
            watches, self._watches = self._watches, {}
        for one in watches.values():
            one.stop(waits=waits)

    def _watch(self, member: Member) -> peer_watch.PeerWatch:
        return peer_watch.PeerWatch(
            member.place.door,
            rank_list([member.first_rank], {member.first_rank: member.place.host}),
            partial(self._found, member),
            lambda: member.place.exit_status() is not None,
            peer_watch.ATTEMPT_S,
            peer_watch.ATTEMPTS,
        )

    def _found(self, member: Member, how: str) -> None:
        if self._is_stopped.is_set():
            return
        if how == EXITED and self._confirms and not self._is_confirmed(member.place):
            with self._lock:
                if member.token in self._watches:  # it lives, and the watch that has found this has ended
                    self._watches[member.token] = self._watch(member)
            return
        self._on_lost(member, how)

    def _is_confirmed(self, place: Place) -> bool:
        """Whether a process is gone whose port refuses a connection."""
        for _ in range(int(CONFIRM_S / CONFIRM_PAUSE_S)):
            if place.exit_status() is not None:
                return True
            _, answer = peer_watch.reach_any(place.door, peer_watch.ATTEMPT_S)
            if answer.connection is not None:
                answer.connection.close()
            if answer.state in ("here", "mute"):
                return False
            if self._is_stopped.wait(CONFIRM_PAUSE_S):
                return False
        return True


class Mailbox:
    """Waits for what others tell this process. Owns a daemon thread.

    Args:
        store: with a client of its own, which waits most of the time.
        on_mail: called with an epoch, and why it is over.
        unreachable: a sentence for the log, if the store is gone.
    """

    def __init__(
        self,
        store: EpochStore,
        token: str,
        on_mail: Callable[[Epoch, str], None],
        unreachable: str = "This rank goes on, and cannot regroup.",
    ) -> None:
        self._store, self._token, self._on_mail, self._unreachable = store, token, on_mail, unreachable
        self._epoch: Epoch | None = None
        self._done: Epoch | None = None  # over
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="bagua-regroup", daemon=True)
        self._thread.start()

    def follow(self, epoch: Epoch, store: EpochStore) -> None:
        """Wait for messages of this epoch from now on.

        Args:
            store: with another client.
        """
        with self._changed:
            before, self._epoch = self._epoch, epoch
            self._changed.notify()
        if before is not None:
            store.tell(before, OVER, [self._token])

    def stop(self, store: EpochStore) -> None:
        """Ends the thread.

        Args:
            store: with another client.
        """
        with self._changed:
            self._is_stopped = True
            epoch = self._epoch
            self._changed.notify()
        if epoch is not None:
            store.tell(epoch, OVER, [self._token])
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._epoch is not self._done)
                if self._is_stopped:
                    return
                epoch = self._epoch
            assert epoch is not None
            try:
                why = self._store.wait_for_mail(epoch, self._token, MAIL_TIMEOUT)
            except RuntimeError as error:
                if not self._is_stopped:
                    _logger.warning(f"The store of the job is unreachable ({error}). {self._unreachable}")
                return
            if why is not None:
                self._done = epoch
                if why != OVER:
                    self._on_mail(epoch, why)
