"""Ends waits for ranks that are proven to be gone, on all ranks. Owned by the job's thread (bagua.job.job_thread).

The rank that watches another one (bagua.job.peer_watch) finds out that it is gone, and tells the others by a verdict
(bagua.job.verdicts). It ends its own waits without the store, which may have been on the machine that is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial

from bagua.job import peer_watch, places, verdicts
from bagua.job.gone import EXITED, Gone
from bagua.job.store_client import StoreClient
from bagua.job.waiting import PATIENCE_S, TICK_S, Waiting
from bagua.rank_list import rank_list

# From the proof that a process has ended to the end of waits for it: who is connected to it fails earlier, and says so.
END_S = 10.0
MAX_PAUSE_S = 30.0  # between two looks for the place of the rank to watch; the pause doubles each time

_logger = logging.getLogger("bagua")


class LostRanks:
    """
    Args:
        watched: the rank that this one watches; None: there is none.
        stop: set when torch is shut down.
    """

    def __init__(
        self, store: StoreClient, waits: Mapping[int, Waiting], watched: int | None, stop: threading.Event
    ) -> None:
        self._store, self._waits, self._stop = store, waits, stop
        self._unseen = watched  # until its place is known
        self._next_search, self._pause = 0.0, TICK_S
        self._watch: peer_watch.PeerWatch | None = None
        self._lock = threading.Lock()  # guards what follows; never held while the store is asked
        self._gone: dict[int, tuple[float, Gone]] = {}  # since when it is known
        self._untold: list[tuple[Gone, str]] = []  # with its process

    def look(self, now: float) -> None:
        """Begins to watch, and tells others what was found. Asks nothing of the store once the watch has begun."""
        if self._unseen is not None and now >= self._next_search:
            self._search(self._unseen, now)
        with self._lock:
            untold, self._untold = self._untold, []
        for gone, token in untold:
            verdicts.add_gone(self._store.get(), gone, token)

    def note(self, gone: Gone, now: float) -> None:
        """Waits for it end from now on."""
        with self._lock:
            self._gone.setdefault(gone.rank, (now, gone))

    def end_waits(self, now: float) -> None:
        with self._lock:
            gone = {rank: one for rank, (at, one) in self._gone.items() if one.how != EXITED or now - at >= END_S}
        for wait in list(self._waits.values()) if gone else ():
            if now - wait.since >= PATIENCE_S and (lost := gone.keys() & set(wait.ranks)):
                wait.end(gone[min(lost)])

    def close(self) -> None:
        """Once `stop` is set."""
        if self._watch is not None:
            self._watch.stop()

    def _search(self, rank: int, now: float) -> None:
        place = places.places_of(self._store.get(), [rank]).get(rank)
        if place is None:  # it has not come so far
            self._next_search, self._pause = now + self._pause, min(2 * self._pause, MAX_PAUSE_S)
            return
        self._unseen = None
        if place.door.port:
            self._watch = peer_watch.PeerWatch(
                place.door,
                rank_list([rank], {rank: place.host}),
                partial(self.lose, rank, place),
                lambda: bool(place.exit_status()),
                peer_watch.ATTEMPT_S,
                peer_watch.ATTEMPTS,
            )

    def lose(self, rank: int, place: places.Place, how: str) -> None:
        """It is proven that the rank is gone. On the watching thread, which ends waits from now on: the job's thread
        ends with the store."""
        gone = Gone(rank, place.host, how)
        if how != EXITED:
            _logger.warning(f"{rank_list([rank], {rank: place.host}).capitalize()} {how}.")
        with self._lock:
            self._untold.append((gone, place.door.token))
        self.note(gone, time.monotonic())
        while not self._stop.wait(TICK_S):
            self.end_waits(time.monotonic())
