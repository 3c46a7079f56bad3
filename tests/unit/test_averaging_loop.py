"""The loop that averages parameters: its turns, what is owed to whom, its ends and errors. Ranks are threads of this
process, or play their turns in a fixed order."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.comm_ops import averaging_exit, averaging_loop
from bagua.comm_ops.async_average import BucketAverage
from bagua.comm_ops.averaging_loop import AveragingLoop, Phase, Request
from bagua.comm_ops.averaging_memory import Part
from bagua.engine.bucket import Bucket

DEADLINE_S = 30.0


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


class Rank:
    """A rank that trains: parameters in two parts, and its loop."""

    def __init__(
        self, ranks: Any, values: Sequence[float], interval_s: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> None:
        self.parameters: list[list[list[Tensor]]] = []
        parts = []
        for number, value in enumerate(values):
            tensors: list[Any] = [torch.full((2, 3), value, dtype=dtype), torch.full((), value, dtype=dtype)]
            for index, tensor in enumerate(tensors):
                tensor.ensure_bagua_tensor(f"{number}.{index}", "module")
            bucket = Bucket(tensors, str(number), flatten=False)
            self.parameters.append([bucket.tensors])
            parts.append(Part([BucketAverage(bucket)]))
        self.steps = [0] * len(values)
        self.ranks = ranks
        self.loop = AveragingLoop(parts, ranks, interval_s)

    def start(self) -> None:
        self.loop.start()

    def begin(self) -> None:
        self.loop.begin(self.parameters, self.steps)

    def step(self, amount: float, part: int = 0) -> int | None:
        """An optimizer's step of one part, and its safe point."""
        for tensor in self.parameters[part][0]:
            tensor.add_(amount)
        self.steps[part] += 1
        return self.safe_point(part)

    def safe_point(self, part: int = 0) -> int | None:
        return self.loop.safe_point(part, self.parameters[part], self.steps[part])

    def end(self) -> list[int]:
        return self.loop.end(self.parameters, self.steps, DEADLINE_S)

    def value(self, part: int = 0) -> float:
        values = {float(value) for tensor in self.parameters[part][0] for value in tensor.view(-1)}
        assert len(values) == 1, values
        return values.pop()


def _start(count: int, values: Sequence[Sequence[float]], interval_s: float = 0.0) -> list[Rank]:
    meeting = Meeting(count)
    ranks = [Rank(ThreadRank(meeting, rank), values[rank], interval_s) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.begin()
    return ranks


def _all(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """At once, each in a thread of its own."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "not done in time"
    return results


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging_loop, "PATIENCE_S", 0.02)
    monkeypatch.setattr(averaging_loop, "QUIET_PAUSE_S", 0.001)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_ranks_that_do_not_move_meet_at_their_mean() -> None:
    ranks = _start(3, [(1.0,), (2.0,), (6.0,)])

    def have_met() -> bool:
        for rank in ranks:
            rank.safe_point()
        return {rank.value() for rank in ranks} == {3.0}

    _wait_until(have_met)
    _all([rank.end for rank in ranks])
    assert {rank.value() for rank in ranks} == {3.0}
    assert not any(rank.loop.is_alive for rank in ranks)


def test_an_end_without_a_step_between_gives_all_ranks_the_same_bits() -> None:
    ranks = _start(3, [(0.1,), (0.2,), (0.7,)])
    for turn in range(50):
        for number, rank in enumerate(ranks):
            rank.step(0.1 * number + turn)
    _all([rank.end for rank in ranks])
    assert len({rank.value() for rank in ranks}) == 1
    assert all(rank.loop.ended_with_mean for rank in ranks)


def test_one_that_does_not_train_does_not_keep_the_others() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    idle, busy = ranks
    _wait_until(lambda: busy.safe_point() is not None and busy.loop.exchanges > 5)
    # It was given nothing yet, and is owed all of it.
    assert idle.value() == 0.0
    _wait_until(lambda: idle.safe_point() is not None)
    _all([rank.end for rank in ranks])
    assert idle.value() == busy.value() == 4.0


def test_patience_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    idle, busy = ranks
    _wait_until(lambda: idle.loop.parts[0].is_idle)
    monkeypatch.setattr(averaging_loop, "PATIENCE_S", 1000.0)
    exchanges = busy.loop.exchanges
    _wait_until(lambda: busy.safe_point() is not None and busy.loop.exchanges > exchanges + 5)
    # From its next safe point on, it is waited for again.
    _wait_until(lambda: idle.safe_point() is not None)
    assert not idle.loop.parts[0].is_idle
    _all([rank.end for rank in ranks])


def test_ranks_that_are_all_at_rest_exchange_nothing() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    group = ranks[0].ranks
    _wait_until(lambda: group.agreements > 20)
    assert group.sums == 0
    for rank in ranks:
        rank.loop.leave()
    _wait_until(lambda: not any(rank.loop.is_alive for rank in ranks))
    assert [rank.value() for rank in ranks] == [0.0, 8.0]


def test_the_pause_is_kept_but_not_by_an_end() -> None:
    ranks = _start(2, [(0.0,), (8.0,)], interval_s=1000.0)
    _wait_until(lambda: all(rank.loop._phase is Phase.PAUSE for rank in ranks))
    _all([rank.end for rank in ranks])
    assert {rank.value() for rank in ranks} == {4.0}


def test_who_leaves_takes_part_until_all_do_and_gives_the_group_back() -> None:
    ranks = _start(3, [(0.0,), (3.0,), (6.0,)])
    ranks[0].loop.leave(destroy_group=True)
    _wait_until(lambda: ranks[1].safe_point() is not None and ranks[1].loop.exchanges > 3)
    assert ranks[0].loop.is_alive
    ranks[1].loop.leave(destroy_group=True)
    ranks[2].loop.leave(destroy_group=False)
    _wait_until(lambda: not any(rank.loop.is_alive for rank in ranks))
    assert [rank.ranks.is_destroyed for rank in ranks] == [True, True, False]


def _start_without_training() -> list[Rank]:
    meeting = Meeting(2)
    ranks = [Rank(ThreadRank(meeting, rank), (float(rank),)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def test_an_end_that_nobody_began_changes_nothing() -> None:
    ranks = _start_without_training()
    _all([rank.end for rank in ranks])
    assert [rank.value() for rank in ranks] == [0.0, 1.0]


def test_an_end_that_one_began_gives_the_mean_of_all() -> None:
    ranks = _start_without_training()
    ranks[1].begin()
    _all([rank.end for rank in ranks])
    assert [rank.value() for rank in ranks] == [0.5, 0.5]


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


def test_leaving_is_possible_from_a_garbage_collection_in_the_loop_itself() -> None:
    """The collector runs on any thread, also on one that holds the lock."""
    ranks = _start(2, [(0.0,), (8.0,)])
    with ranks[0].loop._condition:
        ranks[0].loop.leave()
    ranks[1].loop.leave()
    _wait_until(lambda: not any(rank.loop.is_alive for rank in ranks))


def test_the_end_of_the_process_waits_for_others_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging_exit, "EXIT_S", 0.05)
    ranks = _start(2, [(0.0,), (8.0,)])
    averaging_exit.running.discard(ranks[1].loop)  # of another process
    averaging_exit.end_with_the_process()
    assert not ranks[0].loop.is_alive
    _wait_until(lambda: ranks[1].loop.failure is not None)


def test_the_end_of_all_processes_at_once_is_no_error() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    averaging_exit.end_with_the_process()
    assert [rank.loop.failure for rank in ranks] == [None, None]


def test_a_loop_that_has_ended_is_freed() -> None:
    ranks = _start(2, [(0.0,), (8.0,)])
    _all([rank.end for rank in ranks])
    reference = weakref.ref(ranks[0].loop)
    ranks.clear()
    gc.collect()
    assert reference() is None


# --- turns in a fixed order ------------------------------------------------------------------------------------------


class Played:
    """Ranks without threads: turns are played step by step, with training at every place where it may happen."""

    def __init__(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> None:
        self.ranks = [Rank(self, one, dtype=dtype) for one in values]
        self.is_registered = True
        for rank in self.ranks:
            for part, tensors, step in zip(rank.loop.parts, rank.parameters, rank.steps, strict=True):
                rank.loop._memory.copy(part, tensors, step)
                part.is_copied = False

    def set_phase(self, phase: Phase) -> None:
        for rank in self.ranks:
            rank.loop._phase = phase

    def exchange(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """All ranks at once, by the arithmetic of each; `meanwhile` comes in the middle."""
        for rank in self.ranks:
            rank.loop._phase = Phase.EXCHANGE
        parts = range(len(self.ranks[0].loop.parts))
        sums = {
            part: torch.stack([rank.loop.parts[part].averages[0].contribution for rank in self.ranks]).sum(dim=0)
            for part in parts
        }
        waiting = [meanwhile]
        for rank in self.ranks:
            for index, part in enumerate(rank.loop.parts):
                average = part.averages[0]
                scratch = torch.empty_like(average.contribution)

                def add_up(mean: Tensor, index: int = index) -> None:
                    mean.copy_(sums[index])
                    if waiting:
                        waiting.pop()()

                average.exchange(add_up, len(self.ranks), part.is_owed, scratch)
        for rank in self.ranks:
            for part in rank.loop.parts:
                part.is_copied, part.is_owed = False, True
            rank.loop._phase = Phase.PAUSE


def test_staleness_is_the_steps_between_copy_and_addition() -> None:
    played = Played([(0.0,), (8.0,)])
    played.set_phase(Phase.COPY)
    first, second = played.ranks
    assert [first.step(0.0), second.step(0.0)] == [None, None]  # copied
    assert first.step(0.0) is None  # copied again: the older one is replaced
    during: list[int | None] = []
    played.exchange(lambda: during.extend([first.step(0.0), first.step(0.0), first.step(0.0)]))
    assert during == [None, None, None]
    assert first.step(0.0) == 4
    assert second.step(0.0) == 1
    assert [first.step(0.0), second.step(0.0)] == [None, None]
    assert (first.value(), second.value()) == (4.0, 4.0)


def test_training_goes_on_while_the_mean_is_made() -> None:
    """x += mean - copy, and not x = mean."""
    during: list[int | None] = []
    played = Played([(0.0,), (8.0,)])
    first, second = played.ranks
    played.set_phase(Phase.COPY)
    first.step(2.0)
    second.step(0.0)
    played.exchange(lambda: during.append(first.step(100.0)))
    first.step(1000.0)
    second.step(0.0)
    assert (first.value(), second.value()) == (5.0 + 1100.0, 5.0)


@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_lost_and_nothing_is_counted_twice(seed: int) -> None:
    """Whatever the order of steps, safe points and exchanges: the sum of parameters and what they are owed is that of
    the beginning and all steps, for each of two parts that are copied and given apart."""
    draw = random.Random(seed)
    values = [(float(draw.randrange(100)), float(draw.randrange(100))) for _ in range(draw.choice((1, 2, 4)))]
    played = Played(values)
    expected = [sum(one[part] for one in values) for part in range(2)]

    def train() -> None:
        for rank in played.ranks:
            for part in range(2):
                for _ in range(draw.choice((0, 0, 1, 3))):
                    amount = float(draw.randrange(-9, 9))
                    expected[part] += amount
                    rank.step(amount, part)

    for _ in range(30):
        played.set_phase(draw.choice((Phase.PAUSE, Phase.COPY)))
        train()
        if draw.random() < 0.6:
            played.exchange(train)
            train()
        for part in range(2):
            total = 0.0
            for rank in played.ranks:
                one = rank.loop.parts[part]
                owed = one.averages[0]._differences[1].item() if one.is_owed else 0.0
                total += rank.value(part) + owed
            assert total == pytest.approx(expected[part], abs=1e-9)
    # Ranks that rest meet at the mean.
    played.set_phase(Phase.COPY)
    for rank in played.ranks:
        for part in range(2):
            rank.safe_point(part)
    played.exchange()
    for part in range(2):
        for rank in played.ranks:
            rank.safe_point(part)
            assert rank.value(part) == pytest.approx(expected[part] / len(values), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_short_dtypes_are_averaged_in_float32(dtype: torch.dtype) -> None:
    # 2**-9 is half a unit in the last place of float16 at 1 and less of bfloat16's: each sum would lose it.
    values = [1.0, 1.0 + 2**-7, 1.0, 1.0 + 2**-7]
    played = Played([(value,) for value in values], dtype)
    played.set_phase(Phase.COPY)
    for rank in played.ranks:
        rank.safe_point()
        found = rank.loop.parts[0].averages[0].contribution.dtype
        assert found is (torch.float32 if dtype.itemsize == 2 else dtype)
    played.exchange()
    mean = torch.tensor(values).mean().to(dtype)
    for rank in played.ranks:
        rank.safe_point()
        assert all(torch.equal(tensor, mean.expand(tensor.shape)) for tensor in rank.parameters[0][0])


def test_a_wish_that_was_told_does_not_shorten_the_pause() -> None:
    played = Played([(0.0,)])
    loop = played.ranks[0].loop
    loop.leave()
    start = time.monotonic()
    loop._pause(0.05, Request.LEAVE)
    assert time.monotonic() - start >= 0.05
    loop._pause(DEADLINE_S, Request.RUN)  # returns at once
    assert time.monotonic() - start < DEADLINE_S
