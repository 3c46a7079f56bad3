"""Roll calls between threads that share a store, and with stores that are slow, stopped or gone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.processes import PATIENCE_S, wait_until

from bagua.job import job_thread, places, presence, roll_call, verdicts
from bagua.job.gone import EXITED, LEFT, Gone
from bagua.job.job_thread import JobThread
from bagua.job.roll_call import RollCall
from bagua.job.torch_internals import HashStore
from bagua.job.waiting import Waiting

# Real time: of a rank that never answers, only time tells. A slow machine makes a window longer; who is expected to
# answer in a test has PATIENCE_S, or has a thread that nothing holds up.
WINDOW_S = 0.5


class Ranks:
    """Roll calls of several ranks on one store, in one process."""

    def __init__(self, store: Any, count: int) -> None:
        self.rolls = [JobThread(store, rank) for rank in range(count)]
        self.ranks = tuple(range(count))
        self.pool = ThreadPoolExecutor(count)

    def call(self, *callers: int, window_s: float = WINDOW_S) -> list[roll_call.Roll]:
        """The callers' collective fails in the same moment."""
        rolls = [thread.roll_call for thread in self.rolls]
        return list(self.pool.map(lambda rank: rolls[rank].call(self.ranks, f"work of {rank}", window_s), callers))

    def stop(self) -> None:
        for roll in self.rolls:
            roll.stop()
        self.pool.shutdown()


@pytest.fixture
def store() -> Any:
    return HashStore()


@pytest.fixture
def four(store: Any) -> Iterator[Ranks]:
    ranks = Ranks(store, 4)
    yield ranks
    ranks.stop()


def call_number(store: Any) -> int:
    return roll_call.parse_call(store.get(roll_call.CALL).decode())[0]


def waiting(thread: JobThread, ranks: tuple[int, ...], what: str) -> Waiting:
    return Waiting(thread.waits, ranks, what)


def known(thread: JobThread) -> tuple[int, ...] | None:
    """The missing ranks of the call that this one has seen."""
    return None if (last := thread.roll_call._last) is None else last[2].missing


def test_those_who_fail_together_share_a_call(four: Ranks, store: Any) -> None:
    for roll in four.call(0, 1, 2, 3, window_s=PATIENCE_S):
        assert roll.missing == ()
        assert roll.store_problem is None
        assert roll.doing == {rank: f"failed: work of {rank}" for rank in range(4)}
    assert call_number(store) == 1


def test_who_does_not_answer_is_missing(four: Ranks) -> None:
    for roll in four.call(0, 3, window_s=2.0):
        assert roll.missing == (1, 2)
        assert sorted(roll.doing) == [0, 3]


def test_who_waited_knows_when_the_store_is_gone(four: Ranks) -> None:
    one = four.rolls[1]
    with waiting(one, (0, 1, 2, 3), "a gather"):
        four.call(0, 2, window_s=2.0)
        wait_until(lambda: known(one) == (3,), "the roll")
        one._store._client = GoneStore()
        roll = one.roll_call.call((0, 1, 2, 3), "a gather", WINDOW_S)
    assert roll.missing == (3,)
    assert roll.store_problem == "ConnectionError: the server has left"
    assert re.fullmatch(r"did not respond when asked \d s ago", roll.how)
    assert one.roll_call.call((0, 1), "a gather", WINDOW_S).missing == ()


def test_the_next_failure_is_a_new_call(four: Ranks, store: Any) -> None:
    four.call(0, 1, 2, 3, window_s=PATIENCE_S)
    (roll,) = four.call(0)
    assert roll.missing == (1, 2, 3)
    assert call_number(store) == 2
    (late,) = four.call(1)  # of the second failure; joins
    assert late.missing == (2, 3)
    assert call_number(store) == 2


def test_a_thread_answers_for_those_who_wait_and_clocks_of_hosts_may_differ(
    four: Ranks, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = itertools.count(time.time(), 300.0)
    monkeypatch.setattr(time, "time", lambda: next(clocks))
    with waiting(four.rolls[1], (0, 1, 2, 3), "a gather"), waiting(four.rolls[2], (1, 2), "a scatter"):
        for roll in four.call(0, 3, window_s=PATIENCE_S):
            assert roll.missing == ()
            assert (roll.doing[1], roll.doing[2]) == ("a gather", "a scatter")
    assert call_number(store) == 1
    assert four.call(0)[0].missing == (1, 2, 3)  # they have left


def publish(store: Any, rank: int, token: str) -> None:
    place = dataclasses.replace(places.place_of_this_process(), door=presence.Door((), 0, token))
    store.set(places.PLACE_KEY.format(rank), json.dumps(dataclasses.asdict(place)))


def test_verdicts_count_from_when_the_job_begins(store: Any) -> None:
    """A store may outlast a job, and the place of a rank in it may still be that of a process of the last one."""
    for rank in (1, 2):
        publish(store, rank, "token")

    def say() -> str:
        for rank, how in ((1, EXITED), (2, LEFT)):
            verdicts.add_gone(store, Gone(rank, "b", how), "token")
        text: bytes = store.get(verdicts.KEY)
        return text.decode()

    before = say()
    job = JobThread(store, 0)
    job.stop()
    reader = job._verdicts
    assert list(reader.new(store, before)) == []
    assert reader.left(store, (1, 2)) == set()
    assert list(reader.new(store, say())) == [Gone(1, "b", EXITED)]
    assert reader.left(store, (1, 2)) == {2}


def test_a_call_of_a_process_that_was_replaced_is_neither_joined_nor_answered(four: Ranks, store: Any) -> None:
    """Of a job that has ended, on a store that goes on."""
    publish(store, 1, "token")
    store.set(roll_call.CALL, "5:1:another")
    store.set(roll_call._answers_key(5), "[0, 1, 2]")
    store.set(roll_call._outcome_key(5), "of that job")
    with waiting(four.rolls[2], (0, 1, 2, 3), "a gather"):
        (roll,) = four.call(0, window_s=2.0)
    assert roll.missing == (1, 3)
    assert call_number(store) == 6


def test_a_call_is_over_after_a_while(four: Ranks, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has seen it begin says so, so that others do not take it for one of another failure."""
    four.call(0, 1, window_s=WINDOW_S)
    monkeypatch.setattr(roll_call, "FRESH_S", 0.0)
    wait_until(lambda: store.get(roll_call.CALL) == b"1::", "the end of the call")
    monkeypatch.undo()
    (roll,) = four.call(2)
    assert roll.missing == (0, 1, 3)
    assert call_number(store) == 2


def test_a_process_does_not_join_a_call_that_it_knows_to_be_old(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RollCall, "end_old_call", lambda _: None)  # its thread is held up
    ranks = Ranks(store, 2)
    with waiting(ranks.rolls[1], (0, 1), "a gather"):
        ranks.call(0, window_s=PATIENCE_S)
    monkeypatch.setattr(roll_call, "FRESH_S", 0.0)
    ranks.call(1)
    assert call_number(store) == 2
    ranks.stop()


def test_an_old_call_is_not_joined(four: Ranks, store: Any) -> None:
    """Its answers still count, since each rank answers earlier calls, too."""
    store.set(roll_call.CALL, "5::")
    store.set(roll_call._answers_key(5), '[1, "long ago"]\n')
    (roll,) = four.call(0)
    assert roll.missing == (1, 2, 3)
    assert call_number(store) == 6
    assert 0 in roll_call._read_answers(store.get(roll_call._answers_key(5)))[0]


class GoneStore(HashStore):
    def compare_set(self, *_: Any) -> bytes:
        raise ConnectionError("the server\nhas left")


class StoppedStore(HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def check(self, *_: Any) -> bool:
        self.released.wait(PATIENCE_S)
        return False


def test_a_store_that_is_gone() -> None:
    store = GoneStore()
    roll = JobThread(store, 0)
    result = roll.roll_call.call((0, 1), "work", WINDOW_S)
    assert (result.missing, result.store_problem) == ((), "ConnectionError: the server has left")
    roll.stop()


def test_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "GRACE_S", 0.1)
    monkeypatch.setattr(job_thread, "STOP_S", 0.1)
    store = StoppedStore()
    roll = JobThread(store, 0)
    result = roll.roll_call.call((0, 1), "work", 0.1)
    assert (result.missing, result.store_problem) == ((), "it did not answer within 0.2 s")
    roll.stop()
    store.released.set()


def test_a_store_that_nobody_holds_any_more() -> None:
    roll = JobThread(HashStore(), 0)
    wait_until(lambda: roll._store._client is not None, "the thread's first look at the store")
    roll._store._client = None
    assert "shut down" in (roll.roll_call.call((0, 1), "work", WINDOW_S).store_problem or "")
    roll.stop()
