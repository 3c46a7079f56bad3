"""RegroupSampler, simulated: ranks of one process that step, die, and are told of it at any point, in any order.

DataLoaders are torch's without workers, or a stand-in for the iterator that fetches ahead.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from support.sweeps import rest_is_deep
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from bagua.regroup import coordinator
from bagua.regroup.samplers import FollowingSampler
from bagua.torch_api.contrib import RegroupSampler


class FetchesAhead(_BaseDataLoaderIter):
    """What a DataLoader with workers does with its sampler: torch's `_MultiProcessingDataLoaderIter`, in order."""

    _auto_collation, _in_order, _num_workers, _prefetch_factor = True, True, 2, 1

    def __init__(self, loader: DataLoader[int]) -> None:
        self._index_sampler = loader.batch_sampler
        self._num_yielded = self._send_idx = self._tasks_outstanding = 0
        self._shutdown = False
        self._sampler_iter = iter(self._index_sampler)
        self._fetched: list[list[int]] = []
        self._received = 0
        for _ in range(self._num_workers * self._prefetch_factor):
            self._try_put_index()

    def _try_put_index(self) -> None:
        assert self._tasks_outstanding < self._num_workers * self._prefetch_factor
        try:
            batch = next(self._sampler_iter)
        except StopIteration:
            return
        self._fetched.append(batch)
        self._tasks_outstanding += 1
        self._send_idx += 1

    def __next__(self) -> list[int]:
        if not self._fetched:
            self._shutdown = True
            raise StopIteration
        if not self._received:  # they have arrived in any order, the first one last
            self._received, self._tasks_outstanding = len(self._fetched), 0
        self._received -= 1
        batch = self._fetched.pop(0)
        self._try_put_index()
        self._num_yielded += 1
        return batch


@dataclass(eq=False)
class Rank:
    """A process: its loop, and what it knows of the job."""

    size: int
    settings: dict[str, Any]
    loads: Callable[[DataLoader[int]], Iterator[Any]]
    batch_size: int
    step: int = 0
    sampler: RegroupSampler = field(init=False)
    drawn: list[list[int]] = field(default_factory=list)  # for the present step
    ends: list[int] = field(default_factory=list)  # steps at which epochs ended

    def start(self) -> None:
        self.sampler = RegroupSampler(range(self.size), **self.settings)
        self.loader = DataLoader(range(10**6), batch_size=self.batch_size, sampler=self.sampler)  # type: ignore[arg-type]
        self.batches: Iterator[Any] | None = None  # between epochs

    def add_sampler(self, sampler: FollowingSampler) -> None:
        assert sampler

    def begin(self) -> Iterator[Any]:
        self.sampler.set_epoch(len(self.ends))
        return self.loads(self.loader)

    def draw(self) -> None:
        while True:
            self.batches = self.batches or self.begin()
            batch = next(self.batches, None)
            if batch is not None:
                self.drawn.append([int(one) for one in batch])
                return
            assert not self.drawn  # an epoch ends between steps
            self.end()

    def end(self) -> None:
        self.ends.append(self.step)
        self.batches = None

    def look(self) -> None:
        """At a batch of the next epoch, between epochs, as to show it."""
        next(self.begin())

    @property
    def is_at_end(self) -> bool:
        return self.batches is not None and self.sampler.position(self.step)["is_over"]


class Job:
    """A job that loses ranks.

    Args:
        draw: what happens.
        patch: of torch and Bagua, which take each rank for this process in turn.

    Attributes:
        trained: for each number of steps, the samples of the step that led there.
    """

    def __init__(self, draw: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.draw = draw
        self.accumulation = draw.choice((1, 1, 2))
        # At least a step of all ranks: an epoch may have none otherwise.
        self.size, self.drop_last = draw.randrange(31, 60), draw.random() < 0.3
        loads = draw.choice((iter, FetchesAhead))
        batch_size = draw.choice((1, 2, 3))
        self.members: list[Rank] = []
        self.trained: dict[int, list[int]] = {}
        self.world = draw.randrange(2, 6)
        self.step_size = batch_size * self.accumulation * self.world
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: len(self.members))
        patch.setattr(dist, "get_rank", lambda: self.members.index(self.running))
        patch.setattr(coordinator, "current", lambda: self.running)
        for _ in range(self.world):
            settings = {"seed": 3, "drop_last": self.drop_last, "accumulation": self.accumulation}
            self.members.append(Rank(self.size, settings, loads, batch_size))
        for one in self.members:
            self.run(one, one.start)

    def run(self, rank: Rank, function: Callable[[], Any]) -> Any:
        self.running = rank
        return function()

    def draws(self, rank: Rank, batches: int) -> None:
        while len(rank.drawn) < batches:
            self.run(rank, rank.draw)

    def finish_step(self, rank: Rank) -> None:
        rank.step += 1
        rank.drawn = []
        rank.sampler.end_step()

    def step(self) -> None:
        for one in self.members:
            self.draws(one, self.accumulation)
        self._train()
        for one in self.members:
            self.finish_step(one)

    def _train(self) -> None:
        self.trained[self.members[0].step + 1] = [one for rank in self.members for batch in rank.drawn for one in batch]

    def lose(self, victims: list[Rank]) -> None:
        """In the next step, after anything that ranks may have done by then."""
        draw, before = self.draw, list(self.members)
        left = [one for one in before if one not in victims]
        ahead = draw.sample(left, draw.randrange(len(left) + 1)) if draw.random() < 0.5 else []
        keeps = dict.fromkeys(left, False)
        if ahead:
            for one in before:
                self.draws(one, self.accumulation)
            self._train()
            for one in ahead:
                self.finish_step(one)
        for one in left:
            if one in ahead and one.is_at_end and draw.random() < 0.5:
                assert next(one.batches, None) is None
                one.end()
            if one.batches is None and draw.random() < 0.3:
                self.run(one, one.look)
            if one in ahead or not ahead:
                self.draws(one, draw.randrange(self.accumulation + 1))
                # It is in a forward pass of its own; the others drop their steps.
                keeps[one] = draw.random() < 0.5
        self.settle(left, keeps)

    def settle(self, left: list[Rank], keeps: dict[Rank, bool]) -> None:
        draw = self.draw
        while True:
            step = max(one.step for one in left)
            ahead = [one for one in left if one.step == step]
            order = [ahead[0], *(one for one in left if one is not ahead[0])]
            positions = [json.loads(json.dumps(one.sampler.position(one.step))) for one in order]
            fails = draw.random() < 0.4
            following = draw.sample(order, draw.randrange(len(order))) if fails else order
            self.members = order
            for one in following:
                one.step = step
                self.running = one
                one.sampler.follow(positions, order.index(one), [keeps[other] for other in order])
                if not keeps[one]:
                    one.drawn = []
            if not fails:
                break
            for one in following:  # it is in its next step when another is lost, or the network is away
                self.draws(one, draw.randrange(self.accumulation + 1))
                keeps[one] = draw.random() < 0.5
            if len(left) > 1 and draw.random() < 0.7:
                left.remove(draw.choice(left))
            if all(one.step < step for one in left):
                del self.trained[step]
        for one in left:
            assert keeps[one] or not one.drawn


@pytest.mark.parametrize("block", rest_is_deep(range(400), 0))
def test_samples_are_trained_once_an_epoch_whatever_happens(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        draw = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            job = Job(draw, patch)
            while min(len(one.ends) for one in job.members) < 3:
                if len(job.members) > 1 and draw.random() < 0.3:
                    job.lose(draw.sample(job.members, draw.choice((0, 1, 1, 2)) % len(job.members)))
                else:
                    job.step()
                assert job.members[0].step < 1000, seed
            first = job.members[0]
            assert all(one.ends[:3] == first.ends[:3] for one in job.members), seed
            begin = 0
            for end in first.ends[:3]:
                counts = Counter(one for step in range(begin, end) for one in job.trained[step + 1])
                if job.drop_last:
                    assert not counts or max(counts.values()) == 1, seed
                    assert job.size - len(counts) < job.step_size, seed
                else:
                    assert len(counts) == job.size, (seed, set(range(job.size)) - set(counts))
                    assert counts.total() - job.size < 2 * job.step_size, (seed, counts)
                begin = end


def test_a_rank_that_resumes_follows_before_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(random.Random(11), monkeypatch)
    assert (job.world, job.drop_last) == (3, False)
    job.step()
    job.step()
    state = job.members[0].sampler.state_dict()
    for one in job.members:
        job.run(one, one.start)
        one.step = 7  # anything but where the epoch began
        one.sampler.load_state_dict(state)
    trained, job.trained = job.trained, {}
    job.draws(job.members[0], 1)
    job.members = job.members[:2]
    job.draw = random.Random(2)  # it is the only loss
    job.settle(list(job.members), dict.fromkeys(job.members, False))
    assert len(job.members) == 2
    while not all(one.ends for one in job.members):
        job.step()
    end = job.members[0].ends[0]
    before = [one for step in trained.values() for one in step]
    after = [one for step in range(7, end) for one in job.trained[step + 1]]
    assert set(before + after) == set(range(job.size))
    assert len(before + after) - job.size < job.step_size


def test_a_rank_that_joins_takes_the_position_of_another_and_its_share_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(random.Random(11), monkeypatch)
    for _ in range(3):
        job.step()
    job.draws(job.members[1], 1)  # which it keeps
    state = job.members[0].sampler.state_dict()
    late = Rank(*(getattr(job.members[0], name) for name in ("size", "settings", "loads", "batch_size")))
    job.run(late, late.start)
    late.step = job.members[0].step
    late.sampler.load_state_dict(state)
    job.draw = random.Random(2)
    members = [*job.members, late]
    job.settle(members, dict.fromkeys(members, True))
    assert len(job.members) == 4
    while not all(one.ends for one in job.members):
        job.step()
    assert len({one.ends[0] for one in job.members}) == 1
    counts = Counter(one for step in range(job.members[0].ends[0]) for one in job.trained[step + 1])
    assert len(counts) == job.size
    assert counts.total() - job.size < 2 * job.step_size


class Outside:
    """A process without regroup."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.world = 0, 1
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: self.world)
        patch.setattr(dist, "get_rank", lambda: self.rank)


@pytest.mark.parametrize("arguments", [{}, {"shuffle": False}, {"drop_last": True}])
def test_without_regroup_it_gives_what_a_distributed_sampler_gives(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    process = Outside(monkeypatch)
    for world, rank, size in ((1, 0, 7), *((3, rank, 10) for rank in range(3)), (3, 2, 9), (4, 3, 2)):
        process.world, process.rank = world, rank
        sampler = RegroupSampler(range(size), seed=4, **arguments)
        theirs = DistributedSampler(range(size), world, rank, seed=4, **arguments)  # type: ignore[arg-type]
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(sampler) == list(theirs)
            assert len(sampler) == len(theirs)


@pytest.mark.parametrize("loads", [iter, FetchesAhead])
def test_an_epoch_goes_on_with_other_ranks_after_what_its_loop_was_given(
    monkeypatch: pytest.MonkeyPatch, loads: Callable[[DataLoader[int]], Iterator[Any]]
) -> None:
    process = Outside(monkeypatch)
    seen: list[int] = []
    process.world = 2
    for process.rank in range(2):
        sampler = RegroupSampler(range(24))
        sampler.set_epoch(1)
        batches = loads(DataLoader(range(24), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
        seen += [int(one) for _ in range(2) for one in next(batches)]
        state = sampler.state_dict()
    process.world = 4
    for process.rank in range(4):
        resumed = RegroupSampler(range(24))
        resumed.load_state_dict(state)
        resumed.set_epoch(resumed.epoch)
        seen += list(resumed)
        assert len(list(resumed)) == 6  # the next epoch is whole again
        resumed.load_state_dict(state)
        resumed.set_epoch(2)
        assert len(list(resumed)) == 6
    assert sorted(seen) == list(range(24))
    with pytest.raises(ValueError, match="'seed': 0"):
        RegroupSampler(range(24), seed=1).load_state_dict(state)


def test_what_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(random.Random(0), monkeypatch)
    first = job.members[0]
    job.running = first
    batch_sampler = BatchSampler(first.sampler, 2, drop_last=False)
    del batch_sampler.batch_size
    with pytest.raises(ValueError, match="BatchSampler has no batch_size"):
        next(iter(DataLoader(range(99), batch_sampler=batch_sampler)))  # type: ignore[arg-type]
    loader: DataLoader[int] = DataLoader(range(99), sampler=first.sampler)  # type: ignore[arg-type]
    FetchesAhead._in_order = False
    with pytest.raises(ValueError, match="in_order=False"):
        FetchesAhead(loader)
    FetchesAhead._in_order = True
    with pytest.raises(ValueError, match="accumulation is 0"):
        RegroupSampler(range(9), accumulation=0)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="not initialized"):
        RegroupSampler(range(9))


def test_ranks_that_draw_different_numbers_of_batches_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(random.Random(0), monkeypatch)
    job.step()
    job.draws(job.members[1], 1)
    job.finish_step(job.members[1])
    job.members[0].step += 1
    with pytest.raises(RuntimeError, match=r"ranks differ in rows: 2, 4, after step 2"):
        job.settle(job.members, dict.fromkeys(job.members, False))
