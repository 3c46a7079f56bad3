"""The loop that averages parameters: its turns, what is owed to whom, its ends and errors. Ranks are threads of this
process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.averaging import DEADLINE_S, Rank
from support.processes import wait_until
from torch import Tensor

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.comm_ops import averaging_loop
from bagua.comm_ops.averaging_loop import Phase


class Meeting:
    """Where ranks that are threads exchange values: each `meet` gives everybody the values of all."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(DEADLINE_S)
        values = list(self._values)
        self._barrier.wait(DEADLINE_S)
        return values

    def part(self) -> None:
        """Whoever waits fails, as if a rank had died."""
        self._barrier.abort()


class ThreadRank:
    """As AveragingGroup, of one rank of a Meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.ranks = meeting.ranks
        self.is_registered = True
        self.is_destroyed = False
        self.sums = 0
        self.agreements = 0
        self.before_sum: Callable[[], None] = lambda: None
        self._meeting = meeting
        self._rank = rank

    def agree(self, values: Sequence[int]) -> list[int]:
        self.agreements += 1
        return [int(min(column)) for column in zip(*self._meeting.meet(self._rank, values), strict=True)]

    def sum(self, tensor: Tensor) -> None:
        self.before_sum()
        self.sums += 1
        tensor.copy_(torch.stack(self._meeting.meet(self._rank, tensor.clone())).sum(dim=0))

    def finish(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there is no GPU here")

    def abort(self) -> None:
        self._meeting.part()

    def destroy(self) -> None:
        self.is_destroyed = True


def _start(count: int, values: Sequence[Sequence[float]], interval_s: float = 0.0) -> list[Rank]:
    meeting = Meeting(count)
    ranks = [Rank(ThreadRank(meeting, rank), values[rank], interval_s) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.begin()
    return ranks


def _all(functions: Sequence[Callable[[], Any]]) -> None:
    """At once, each in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as threads:
        for one in [threads.submit(function) for function in functions]:
            one.result(DEADLINE_S)


def _wait_until(condition: Callable[[], bool]) -> None:
    wait_until(condition, "what the loop does", DEADLINE_S)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging_loop, "PATIENCE_S", 0.02)
    monkeypatch.setattr(averaging_loop, "QUIET_PAUSE_S", 0.001)


def test_an_end_without_a_step_between_gives_all_ranks_the_same_bits() -> None:
    ranks = _start(3, [(0.1,), (0.2,), (0.7,)])
    for turn in range(50):
        for number, rank in enumerate(ranks):
            rank.step(0.1 * number + turn)
    _all([rank.end for rank in ranks])
    assert len({rank.value() for rank in ranks}) == 1
    assert all(rank.loop.ended_with_mean for rank in ranks)


def test_one_that_does_not_train_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is lost once."""
    ranks = _start(2, [(0.0,), (8.0,)])
    idle, busy = ranks
    _wait_until(lambda: idle.loop.parts[0].is_idle)
    monkeypatch.setattr(averaging_loop, "PATIENCE_S", 1000.0)
    _wait_until(lambda: busy.safe_point() is not None and busy.loop.exchanges > 5)
    # It was given nothing yet, and is owed all of it.
    assert idle.value() == 0.0
    _wait_until(lambda: idle.safe_point() is not None)
    # From its next safe point on, it is waited for again.
    assert not idle.loop.parts[0].is_idle
    _all([rank.end for rank in ranks])
    assert idle.value() == busy.value() == 4.0


def test_ranks_that_are_all_at_rest_exchange_nothing() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    group = ranks[0].ranks
    _wait_until(lambda: group.agreements > 20)
    assert group.sums == 0
    for rank in ranks:
        rank.loop.leave()
    _wait_until(lambda: not any(rank.loop.is_alive for rank in ranks))
    assert [rank.value() for rank in ranks] == [0.0, 8.0]


def test_the_pause_is_kept_but_not_by_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _start(2, [(0.0,), (8.0,)], interval_s=1000.0)
    _wait_until(lambda: all(rank.loop._phase is Phase.PAUSE for rank in ranks))
    _all([rank.end for rank in ranks])
    assert {rank.value() for rank in ranks} == {4.0}

    # Nor by who asked for it a turn before the other.
    monkeypatch.setattr(averaging_loop, "PATIENCE_S", 1000.0)
    meeting = Meeting(2)
    first, second = (Rank(ThreadRank(meeting, rank), (8.0 * rank,), 1000.0) for rank in range(2))
    for rank in (first, second):
        rank.begin()
        rank.start()
    with ThreadPoolExecutor(1) as threads:
        end = threads.submit(first.end)
        _wait_until(lambda: first.ranks.agreements == 1 and second.loop._phase is Phase.COPY)
        second.safe_point()
        _wait_until(lambda: second.loop.exchanges == 1)
        second.end()
        end.result(DEADLINE_S)
    assert first.value() == second.value() == 4.0


def test_who_leaves_takes_part_until_all_do_and_gives_the_group_back() -> None:
    ranks = _start(3, [(0.0,), (3.0,), (6.0,)])
    ranks[0].loop.leave(destroy_group=True)
    _wait_until(lambda: ranks[1].safe_point() is not None and ranks[1].loop.exchanges > 3)
    assert ranks[0].loop.is_alive
    ranks[1].loop.leave(destroy_group=True)
    with ranks[2].loop._condition:  # from a garbage collection, which runs on any thread, also on one that holds it
        ranks[2].loop.leave(destroy_group=False)
    _wait_until(lambda: not any(rank.loop.is_alive for rank in ranks))
    assert [rank.ranks.is_destroyed for rank in ranks] == [True, True, False]


def _start_without_training() -> list[Rank]:
    meeting = Meeting(2)
    ranks = [Rank(ThreadRank(meeting, rank), (float(rank),)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


@pytest.mark.parametrize(("begun", "values"), [(0, [0.0, 1.0]), (1, [0.5, 0.5])])
def test_an_end_gives_the_mean_if_any_rank_has_begun(begun: int, values: list[float]) -> None:
    ranks = _start_without_training()
    for rank in ranks[:begun]:
        rank.begin()
    _all([rank.end for rank in ranks])
    assert [rank.value() for rank in ranks] == values


def test_nothing_is_averaged_before_all_have_begun() -> None:
    """Until then a rank may still load parameters: a copy from before would not be what it trains."""
    ranks = _start_without_training()
    ranks[1].begin()
    agreements = ranks[1].ranks.agreements
    _wait_until(lambda: ranks[1].step(0.0) is not None or ranks[1].ranks.agreements > agreements + 10)
    assert ranks[1].ranks.sums == 0
    for tensor in ranks[0].parameters[0][0]:
        tensor.fill_(7.0)
    ranks[0].begin()
    _wait_until(lambda: ranks[1].step(0.0) is not None)
    assert ranks[1].value() == 4.0
    _all([rank.end for rank in ranks])
    assert [rank.value() for rank in ranks] == [4.0, 4.0]


def test_a_peer_that_is_lost_fails_the_others() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    ranks[0].ranks.abort()
    _wait_until(lambda: all(rank.loop.failure is not None for rank in ranks))
    assert ranks[0].safe_point() is None
    with pytest.raises(threading.BrokenBarrierError):
        ranks[0].end()


def test_a_group_that_was_destroyed_is_said_to_be() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    for rank in ranks:
        rank.ranks.is_registered = False
    _wait_until(lambda: all(rank.loop.failure is not None for rank in ranks))
    assert "abort(model) on every rank before destroy_process_group" in str(ranks[0].loop.failure)


def test_an_end_that_the_others_do_not_share_is_an_error_that_stays() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    with pytest.raises(RuntimeError, match=r"not all ranks of 2 stopped averaging within 0\.01 s"):
        ranks[0].loop.end(ranks[0].parameters, ranks[0].steps, 0.01)
    with pytest.raises(RuntimeError, match="not all ranks"):
        ranks[0].end()
    ranks[0].ranks.abort()


def test_an_end_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has batches left."""
    told: list[str] = []
    ranks = _start(2, [(0.0,), (8.0,)])
    monkeypatch.setattr(averaging_loop, "NAMED_S", 0.01)
    monkeypatch.setattr(averaging_loop._logger, "warning", lambda text: (told.append(text), ranks[1].loop.leave()))
    ranks[0].loop.end(ranks[0].parameters, ranks[0].steps, DEADLINE_S)
    assert told == [f"waiting for the other ranks to stop averaging, for at most {DEADLINE_S:g} s"]


def test_an_end_waits_for_an_exchange_no_longer_than_it_may() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    goes_on = threading.Event()
    for rank in ranks:
        rank.ranks.before_sum = lambda: goes_on.wait(DEADLINE_S)

    def is_exchanging() -> bool:
        for rank in ranks:
            rank.safe_point()
        return ranks[0].loop._phase is Phase.EXCHANGE

    _wait_until(is_exchanging)
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"not all ranks of 2 stopped averaging within 0\.01 s"):
            ranks[0].loop.end(ranks[0].parameters, ranks[0].steps, 0.01)
        assert time.monotonic() - began < DEADLINE_S / 2
    finally:
        goes_on.set()
        ranks[0].ranks.abort()


def test_the_end_of_the_process_waits_for_others_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    averaging_loop.end_with_the_process()
    assert [rank.loop.failure for rank in ranks] == [None, None], "all at once"
    monkeypatch.setattr(averaging_loop, "EXIT_S", 0.05)
    ranks = _start(2, [(0.0,), (8.0,)])
    averaging_loop.running.discard(ranks[1].loop)  # of another process
    averaging_loop.end_with_the_process()
    assert not ranks[0].loop.is_alive
    _wait_until(lambda: ranks[1].loop.failure is not None)


def test_a_loop_that_has_ended_is_freed() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    _all([rank.end for rank in ranks])
    reference = weakref.ref(ranks[0].loop)
    ranks.clear()
    gc.collect()
    assert reference() is None
