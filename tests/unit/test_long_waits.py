"""Ranks that wait for long, a thousand of them on one store: what they ask it, and what they find out."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import wait_until

from bagua.job import job_thread, long_waits, lost_ranks, places, roll_call, verdicts, waiting
from bagua.job.deadlock import OperationOrder
from bagua.job.gone import EXITED, LEFT, Gone
from bagua.job.job_thread import JobThread
from bagua.job.torch_internals import HashStore

STEP_S = 0.25
SIZE = 200


class CountingStore(HashStore):
    """Counts keys, and bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = self.bytes = 0

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = super().multi_get(keys)
        self.keys += len(keys)
        self.bytes += sum(map(len, values))
        return values

    def check(self, keys: list[str]) -> bool:
        self.keys += len(keys)
        return super().check(keys)

    def append(self, key: str, value: str) -> None:
        self.keys += 1
        super().append(key, value)

    def compare_set(self, *arguments: str) -> bytes:
        self.keys += 1
        return super().compare_set(*arguments)


class Group:
    """Of all ranks, as one of them sees it."""

    group_name = "0"
    torch_group: Any = SimpleNamespace(group_name="0")
    timeout = SimpleNamespace(total_seconds=lambda: 1800.0)

    def __init__(self, size: int) -> None:
        self.ranks = range(size)
        self.operations = OperationOrder("0")
        self.is_aborted = False

    def raise_if_aborted(self, what: str) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        self.is_aborted = True


class Ranks:
    """Each looks when it is told to, and has no thread."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        for module in (job_thread, lost_ranks, roll_call, waiting):
            monkeypatch.setattr(module, "time", clock)
        # A thousand threads are more than some releases of glibc wake reliably (its bug 25847).
        asleep = SimpleNamespace(start=lambda: None, join=lambda _: None)
        monkeypatch.setattr(
            job_thread, "threading", SimpleNamespace(**{**vars(threading), "Thread": lambda **_: asleep})
        )
        self.store = CountingStore()
        self.rolls = [JobThread(self.store, rank) for rank in range(size)]
        self.groups = [Group(size) for _ in range(size)]
        self.others = [OperationOrder("1") for _ in range(size)]
        for roll, group, other in zip(self.rolls, self.groups, self.others, strict=True):
            roll.count(group.operations)
            roll.count(other)
            roll.look()
        self.store.keys = self.store.bytes = 0
        monkeypatch.setattr(job_thread, "TICK_S", STEP_S)

    def wait(self, rank: int, what: str, in_other_order: bool = False) -> None:
        group = self.groups[rank]
        order = self.others[rank] if in_other_order else group.operations
        position = order.begin(what)
        waits = self.rolls[rank].waits
        waiting.Waiting(waits, group.ranks, what, group, order, position, what == "ask").__enter__()

    def pass_time(self, seconds: float, absent: tuple[int, ...] = ()) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.now += STEP_S
            for rank, roll in enumerate(self.rolls):
                if rank not in absent:
                    roll.look()

    def aborted(self) -> list[int]:
        return [rank for rank, group in enumerate(self.groups) if group.is_aborted]

    def stop(self) -> None:
        for roll in self.rolls:
            roll.stop()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    started: list[Ranks] = []

    def start(size: int) -> Ranks:
        started.append(Ranks(size, monkeypatch))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()


def test_a_thousand_ranks_ask_the_store_ten_times_as_much_as_a_hundred(start: Any) -> None:
    """While all but the last wait for it."""
    asked = []
    for size in (100, 1000):
        ranks = start(size)
        for rank in range(size - 1):
            ranks.wait(rank, "sum")
        ranks.pass_time(waiting.PATIENCE_S - STEP_S)
        assert ranks.store.keys == 0, "short waits are nobody's business"
        ranks.pass_time(12.0)
        assert int(ranks.store.get(long_waits.INQUIRY).partition(b":")[0]) == 2
        asked.append((ranks.store.keys / size, ranks.store.bytes / size))
        ranks.stop()
    (few_keys, few_bytes), (keys, size_bytes) = asked
    assert keys < 1.05 * few_keys
    assert size_bytes < 1.05 * few_bytes


def test_a_failure_of_many_ranks_asks_as_little_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They call the roll in the same moment, and look again with growing pauses until all have come."""
    monkeypatch.setattr(job_thread, "TICK_S", 1e6)
    store = CountingStore()
    rolls = [JobThread(store, rank) for rank in range(SIZE)]
    store.keys = store.bytes = 0
    monkeypatch.setattr(job_thread, "TICK_S", STEP_S)
    ranks = tuple(range(SIZE))
    with ThreadPoolExecutor(SIZE) as pool:
        calls = [
            pool.submit(roll.roll_call._call, ranks, "sum", 60.0, lambda _: None, threading.Event()) for roll in rolls
        ]
        found = [call.result() for call in calls]
    assert {roll.missing for roll in found} == {()}
    assert store.keys < 100 * len(rolls)
    assert store.bytes < SIZE * 10_000, "all answers have 5 KB, and one rank reads them again and again"
    for roll in rolls:
        roll.stop()


@pytest.mark.parametrize("answers", [False, True])
def test_who_is_not_there_is_named_and_nothing_ends(
    start: Any, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """Also if its GPU may wait for others: it says that it has not begun this."""
    ranks = start(4)
    for rank in (0, 1, 3):
        ranks.wait(rank, "sum")
    if answers:
        waiting.Waiting(ranks.rolls[2].waits, range(4), "communicating on GPUs").__enter__()
    with caplog.at_level(logging.WARNING, "bagua"):
        ranks.pass_time(600.0)
        wait_until(lambda: bool(caplog.records), "the log line")
    (record,) = caplog.records
    assert "(sum). Not in it: rank 2: it has made no Bagua group.\nThe job goes on" in record.getMessage()
    assert ranks.aborted() == []


def test_a_deadlock_is_proven_and_ended(start: Any) -> None:
    ranks = start(3)
    for rank, what in enumerate(("ask", "sum", "sum")):
        ranks.wait(rank, what)
    ranks.pass_time(long_waits.ASK_S + long_waits.ANSWER_S + 1.0)
    assert ranks.aborted() == [], "seen once"
    ranks.pass_time(long_waits.REPEAT_S)
    assert ranks.aborted() == [0]


@pytest.mark.parametrize("in_other_order", [True, False])
def test_ranks_that_run_different_code_are_told_on_each_of_them(
    start: Any, caplog: pytest.LogCaptureFixture, in_other_order: bool
) -> None:
    """Within 15 s, once, whoever asks; who comes later, too; and again of another wait."""
    ranks = start(4)

    def told() -> list[str]:
        """The first lines, since the last call."""
        lines = [record.getMessage().splitlines()[0] for record in caplog.records]
        caplog.clear()
        return [line for line in lines if "different" in line]

    def proven() -> int:
        return ranks.store.get(verdicts.KEY).count(b"different")

    for rank in range(3):
        ranks.wait(rank, "sum" if rank else "save", in_other_order=in_other_order and rank == 0)
    with caplog.at_level(logging.WARNING, "bagua"):
        ranks.pass_time(long_waits.ASK_S + long_waits.ANSWER_S + 1.0)
        assert proven() == 0, "seen once"
        ranks.pass_time(15.0 - long_waits.ASK_S - long_waits.ANSWER_S - 1.0)
        assert told() == ["Rank 0 waits in save, ranks 1 and 2 in sum: the ranks run different code."] * 3
        ranks.pass_time(600.0)
        ranks.wait(3, "sum")
        ranks.pass_time(600.0)
        assert told() == ["Rank 0 waits in save, ranks 1 to 3 in sum: the ranks run different code."]
        assert proven() == 2
        assert ranks.aborted() == []
        if not in_other_order:
            return
        # A late partner has come; and all do it again.
        for roll, group, other in zip(ranks.rolls, ranks.groups, ranks.others, strict=True):
            roll.waits.clear()
            for order, what in ((group.operations, "sum"), (other, "save")):
                order.done = order.begun or order.begin(what)
        ranks.pass_time(30.0)
        for rank in range(3):
            ranks.wait(rank, "sum" if rank else "save", in_other_order=rank == 0)
        ranks.pass_time(15.0)
        assert told() == ["Rank 0 waits in save, ranks 1 and 2 in sum: the ranks run different code."] * 3


def test_a_rank_that_waits_in_another_place_by_now_is_named_there(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its first wait has been seen, and has ended since. Those that wait for it are no side by themselves."""
    ranks = start(3)
    for rank in range(3):
        ranks.wait(rank, "sum" if rank else "save", in_other_order=rank == 0)
    with caplog.at_level(logging.WARNING, "bagua"):
        ranks.pass_time(long_waits.ASK_S + long_waits.ANSWER_S + 1.0)
        ranks.rolls[0].waits.clear()
        ranks.wait(0, "load", in_other_order=True)
        ranks.pass_time(15.0)
    assert {record.getMessage().splitlines()[0] for record in caplog.records} == {
        "Rank 0 waits in load, ranks 1 and 2 in sum: the ranks run different code."
    }


def test_a_rank_that_is_late_in_the_same_operation_is_accused_of_nothing(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And neither are two that wait in different groups for a third one, nor one that waits for those."""
    ranks = start(4)
    for rank in range(3):
        ranks.groups[rank].ranks = (rank, 3)
        ranks.wait(rank, "sum" if rank else "save", in_other_order=rank == 0)
    ranks.groups[2].ranks = (0, 1, 2)
    with caplog.at_level(logging.WARNING, "bagua"):
        ranks.pass_time(600.0)
    assert [record for record in caplog.records if "different" in record.getMessage()] == []
    assert ranks.aborted() == []


@pytest.mark.parametrize("why", ["its threads stand still", "it is in no operation", "it has left its wait since"])
def test_a_rank_that_does_not_answer_again_is_not_deadlocked(start: Any, why: str) -> None:
    """Even if it was seen in a wait that cannot end."""
    ranks = start(2)
    ranks.wait(0, "ask")
    if why != "it is in no operation":
        ranks.wait(1, "sum")
    ranks.pass_time(long_waits.ASK_S + long_waits.ANSWER_S + 1.0)
    if why == "it has left its wait since":
        ranks.rolls[1].waits.clear()
    ranks.pass_time(600.0, absent=(1,) if why == "its threads stand still" else ())
    assert ranks.aborted() == []


@pytest.mark.parametrize(
    "verdict_is", ["of this job", "of a process that was replaced", "older", "of a rank that has left"]
)
def test_waits_for_a_rank_that_is_gone_end_on_all(start: Any, verdict_is: str) -> None:
    """One of them has found out. Others wait for other ranks, and go on."""
    ranks = start(4)
    for rank in (0, 1):
        ranks.wait(rank, "sum")
    ranks.groups[2].ranks = (1, 2)
    ranks.wait(2, "sum of some")
    place = places.place_of_this_process()
    ranks.store.set(places.PLACE_KEY.format(3), json.dumps(dataclasses.asdict(place)))
    token = "another" if verdict_is == "of a process that was replaced" else place.door.token
    how = LEFT if verdict_is == "of a rank that has left" else EXITED
    ranks.rolls[3]._lost._untold.append((Gone(3, "b", how), token))
    ranks.rolls[3].look()
    if verdict_is == "older":  # their job begins now, as their threads would say
        for roll in ranks.rolls[:3]:
            roll._verdicts.begin(ranks.store)
    ranks.pass_time(lost_ranks.END_S + 2.0)
    assert ranks.aborted() == ([0, 1] if verdict_is == "of this job" else [])
