"""The verdict of `bagua-net blame` without the command: if a rank waits for long, all ranks report to rank 0, which
logs who holds the job up. They meet in the store of torch.distributed.

A thread of each rank looks at the rank's own statistics page every few seconds, and asks the store only while no
message moves. Of what it leaves in the store:

    asked            how many verdicts were asked for; the keys below begin with its number
    N/host/HOST      counts the ranks of a host: the first one leaves the report of all its processes
    N/report/I       these reports
    N/rank/RANK      host and pid of the rank, the collective that it runs or ran last, as torch's flight recorder has
                     it, and how long its steps compute
    N/answered       counts the ranks
    N/written        counts those that would write the verdict: the first one does
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bagua.net.blame import ras
from bagua.net.blame.collectives import described, last_collective
from bagua.net.blame.verdict import verdict
from bagua.net.stats.errors import StatsError
from bagua.net.stats.layout import Page, messages_of
from bagua.net.stats.rates import oldest_request_s, report
from bagua.net.stats.report_json import report_from_json
from bagua.net.stats.reports import HostReport
from bagua.net.stats.snapshots import own_page, snapshot

_LOOKS = 6  # in the time that is reported
_LONGEST_LOOK_S = 5.0  # between two of them
# After two looks, all that can have answered. Rank 0 writes first, and if it cannot, a rank that waits does.
_PATIENCE_LOOKS = 3
_PATIENCE_FOR_RANK_0_LOOKS = 6

_started: InJobBlame | None = None


def start(stall_s: float) -> None:
    """Once a process."""
    global _started
    if _started is None:
        _started = InJobBlame(stall_s)
        _started.start()


class InJobBlame:
    """What one rank does, in a thread of its own after `start`.

    Args:
        stall_s: shorter waits are normal, in seconds.
        write: takes the verdict.
    """

    def __init__(self, stall_s: float, write: Callable[[str], None] | None = None) -> None:
        self._stall_s = stall_s
        self._write = write or _log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua-net-blame", daemon=True)
        self._messages = 0
        self._due_s = stall_s  # how long this rank waits before it asks
        self._answered = 0  # the last number
        self._looks_left: int | None = None  # until this rank writes the verdict

    def start(self) -> None:
        self._thread.start()
        # Else the interpreter could end under a call of the store.
        atexit.register(self.close)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._closing.wait(min(self._stall_s / _LOOKS, _LONGEST_LOOK_S)):
                self.look()
        except Exception as error:
            # Of the store, whose server may have ended, and whose types of errors torch does not promise; or a report
            # of another version.
            logging.getLogger("bagua.net").debug("no more verdicts: %s", error)

    def look(self) -> None:
        """
        Raises:
            Exception: of the store.
        """
        page = _own_page()
        messages, waited_s = (0, 0.0) if page is None else _traffic_of(page)
        is_quiet = messages == self._messages or waited_s >= self._stall_s
        self._messages = messages
        if waited_s < self._stall_s:
            self._due_s = self._stall_s
        store = _store()
        if store is None or not (is_quiet or self._looks_left):
            return
        asked = int(store.get("asked")) if store.check(["asked"]) else 0
        if asked < self._answered:  # in an earlier process group, with a store of its own
            self._answered, self._looks_left = asked, None
        if waited_s >= self._due_s and asked == self._answered:
            asked = int(store.compare_set("asked", str(asked) if asked else "", str(asked + 1)))
        if asked > self._answered:
            self._answer(store, asked, waited_s, page)
        elif self._looks_left:
            self._gather(store)

    def _answer(self, store: Any, number: int, waited_s: float, page: Page | None) -> None:
        import torch.distributed as dist

        self._answered = number
        self._due_s = max(self._due_s, 2 * waited_s)  # ever more rarely
        here = f"{os.uname().nodename}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getuid()}"
        if store.add(f"{number}/host/{here}", 1) == 1:
            index = store.add(f"{number}/reports", 1)
            store.set(f"{number}/report/{index}", json.dumps(report(None, snapshot()).as_json()))
        process = None if page is None else (page.host, page.pid)
        store.set(f"{number}/rank/{dist.get_rank()}", json.dumps([process, last_collective(), _computing()]))
        store.add(f"{number}/answered", 1)
        is_first = dist.get_rank() == 0
        if is_first or waited_s >= self._stall_s:
            self._looks_left = _PATIENCE_LOOKS if is_first else _PATIENCE_FOR_RANK_0_LOOKS

    def _gather(self, store: Any) -> None:
        import torch.distributed as dist

        assert self._looks_left is not None
        self._looks_left -= 1
        number, ranks = self._answered, dist.get_world_size()
        is_complete = dist.get_rank() == 0 and store.add(f"{number}/answered", 0) == ranks
        if not (is_complete or self._looks_left == 0):
            return
        self._looks_left = None
        if store.add(f"{number}/written", 1) > 1:
            return
        keys = [f"{number}/report/{index}" for index in range(1, store.add(f"{number}/reports", 0) + 1)]
        reports = [report_from_json(store.get(key), "a rank") for key in keys if store.check([key])]
        answers = {
            rank: json.loads(store.get(key)) for rank in range(ranks) if store.check([key := f"{number}/rank/{rank}"])
        }
        self._write(_text(reports, answers, ranks, self._stall_s))


def _text(reports: list[HostReport], answers: dict[int, Any], ranks: int, stall_s: float) -> str:
    seen = {one.rank for found in reports for one in found.processes if one.world_size in (ranks, None)}
    silent = [f"rank {rank}" for rank in range(ranks) if rank not in answers and rank not in seen]
    # Reports have the processes of other jobs, too.
    members = {(process[0], process[1]) for process, *_ in answers.values() if process is not None}
    found = verdict(reports, stall_s, silent, members)
    lines = [f"{one.problem}\n{one.advice}" for one in found.culprits]
    if not lines:
        lines = [f"ranks have waited for {stall_s:g} s, for each other or for what Bagua-Net does not see"]
    if len(answers) < ranks:  # else torch's flight recorder says it of all
        with suppress(OSError, ValueError):  # there is no such service, or an older one
            lines += ras.findings({pid for _, pid in members})
    lines += _slower_ranks({rank: told for rank, (*_, told) in answers.items() if told is not None})
    return "\n".join(lines + described({rank: collective for rank, (_, collective, _) in answers.items()}))


def _computing() -> tuple[int, float] | None:
    """See bagua.job.computing: this process may train without it."""
    job = sys.modules.get("bagua.job.computing")
    return None if job is None else job.own()


def _slower_ranks(told: dict[int, Any]) -> list[str]:
    """Compared with the rank in the middle."""
    job = sys.modules.get("bagua.job.computing")
    if job is None or len(told) < 2:
        return []
    known = {rank: job.Computing(*one) for rank, one in sorted(told.items())}
    middle = sorted(known.values(), key=lambda one: one.step_s)[(len(known) - 1) // 2]
    ratios = {rank: job.slower_by(one, middle) for rank, one in known.items()}
    return [f"rank {rank} is {job.slower_text(ratio)}" for rank, ratio in ratios.items() if ratio is not None]


def _own_page() -> Page | None:
    try:
        return own_page()
    except StatsError:
        return None


def _traffic_of(page: Page) -> tuple[int, float]:
    """Messages sent and received, and for how long the oldest request waits, in seconds."""
    messages = messages_of(page.closed_comms) + sum(messages_of(comm.counters) for comm in page.comms)
    now_ms = int(time.monotonic() * 1000)
    return messages, max((oldest_request_s(comm, now_ms) or 0.0 for comm in page.comms), default=0.0)


def _store() -> Any | None:
    """None: there is no default process group now."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return None
        return c10d.PrefixStore("bagua_net_blame", c10d._get_default_store())
    except (AttributeError, ValueError):  # another torch; or it ends at this moment
        return None


def _log(text: str) -> None:
    logging.getLogger("bagua.net").warning("Bagua-Net: %s", text)
