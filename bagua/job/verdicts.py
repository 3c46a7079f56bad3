"""What ranks have proven of each other. It stands in the job's store, and every rank that waits reads it.

[Note: key] "bagua/waits/verdicts" has lines of JSON, which are only added to:
    {"gone": [rank, host, how], "token": ...}    with the process by its token
    {"deadlocked": [order, rank, since]}         the wait of this rank, which ends it
    {"different": [rank, since, [[what, [[first rank, last rank], ...]], ...]]}
                                                 what ranks wait in that run different code; none ends for that
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bagua.job import places
from bagua.job.gone import LEFT, Gone
from bagua.job.torch_internals import Store, add_line

KEY = "bagua/waits/verdicts"
EMPTY = "\n"


class Deadlocked(NamedTuple):
    """A wait that no patience ends.

    Attributes:
        order: of the operation that is waited for.
        since: when the thread of this rank began to wait.
    """

    order: str
    rank: int
    since: float


class Different(NamedTuple):
    """Ranks run different code.

    Attributes:
        rank, since: of one of the waits, by which this differs from others of the same ranks.
        sides: what is waited in, and by which ranks, as (first, last).
    """

    rank: int
    since: float
    sides: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


def add_gone(client: Store, gone: Gone, token: str) -> None:
    add_line(client, KEY, json.dumps({"gone": gone, "token": token}))


def add_deadlocked(client: Store, deadlocked: Deadlocked) -> None:
    add_line(client, KEY, json.dumps({"deadlocked": deadlocked}))


def add_different(client: Store, different: Different) -> None:
    add_line(client, KEY, json.dumps({"different": different}))


class VerdictReader:
    """Of one process, of one job."""

    def __init__(self) -> None:
        self._before = 0  # lines that are of jobs before this one
        self._lines = 0  # that were read

    def begin(self, store: Store) -> None:
        """The job begins: what is there by now is of others, whose processes may have had the same places. Their times
        would not tell, since clocks of hosts may differ."""
        self._before = self._lines = len(store.compare_set(KEY, "", EMPTY).decode().splitlines())

    def new(self, client: Store, text: str) -> Iterator[Gone | Deadlocked | Different]:
        """What this process does not know yet. Not the ranks that have left: others may still be in what those gave
        them, so no wait ends for them."""
        lines = text.splitlines()
        unread, self._lines = lines[self._lines :], len(lines)
        for verdict in map(json.loads, filter(None, unread)):
            if "deadlocked" in verdict:
                yield Deadlocked(*verdict["deadlocked"])
            elif "different" in verdict:
                rank, since, sides = verdict["different"]
                yield Different(rank, since, tuple((what, tuple(map(tuple, ranges))) for what, ranges in sides))
            elif (gone := Gone(*verdict["gone"])).how != LEFT and self._of_this_job(client, [verdict]):
                yield gone

    def left(self, client: Store, ranks: Sequence[int]) -> set[int]:
        """Those of these ranks that have left in an orderly way."""
        lines = client.compare_set(KEY, "", EMPTY).decode().splitlines()[self._before :]
        said = [verdict for verdict in map(json.loads, filter(None, lines)) if "gone" in verdict]
        return self._of_this_job(client, [one for one in said if one["gone"][0] in ranks and one["gone"][2] == LEFT])

    def _of_this_job(self, client: Store, said: Sequence[dict[str, Any]]) -> set[int]:
        """The ranks that these are about. A store that torch keeps over restarts has verdicts of processes that were
        replaced since."""
        found = places.places_of(client, [one["gone"][0] for one in said]) if said else {}
        return {rank for one in said if (rank := one["gone"][0]) in found and found[rank].door.token == one["token"]}
