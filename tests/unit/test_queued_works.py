"""Collectives of NCCL that fail while a stream waits for them, on a stage: works and events that are played."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.collectives.failure_report import CollectiveError
from bagua.comm_ops.averaging_group import AveragingGroup
from bagua.comm_ops.queued_works import QueuedWorks

SUCCESS, TIMEOUT, REMOTE_ERROR = 0, 1, 2  # c10d::WorkResult
LOST = "NCCL ended a collective: a rank exited or the network failed. Its own message is above in this log."
LATE = LOST.replace("a rank exited or the network failed", "it timed out")


class Work:
    """Without a result it goes on, or torch has not told yet. An error is known once the work was asked whether it is
    over, which a timeout does not change."""

    def __init__(self, result: int | None = None, *, ends: bool = True) -> None:
        self.result, self.ends = result, ends
        self.asked = False

    def is_completed(self) -> bool:
        self.asked = True
        return self.ends

    def get_future_result(self) -> Any:
        assert self.asked
        return SimpleNamespace(done=lambda: self.result is not None, value=lambda: self.result)


class Event:
    """Done when it is looked at for the `looks`-th time; never with None."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks

    def query(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks <= 0


def queued(works: QueuedWorks, work: Work, looks: int | None) -> Event:
    event = Event(looks)
    stream: Any = SimpleNamespace(record_event=lambda: event)
    works.add(work, stream)  # type: ignore[arg-type]
    return event


@pytest.mark.parametrize("work", [Work(ends=False), Work(), Work(SUCCESS)], ids=["under way", "over", "told"])
def test_a_collective_that_is_well_is_no_error(work: Work) -> None:
    works = QueuedWorks()
    queued(works, work, None)
    assert [works.error() for _ in range(5)] == [None] * 5


@pytest.mark.parametrize(("result", "told"), [(REMOTE_ERROR, LOST), (TIMEOUT, LATE)])
def test_one_that_failed_is_found_behind_one_that_ended(result: int, told: str) -> None:
    works = QueuedWorks()
    queued(works, Work(), 1)
    queued(works, Work(result, ends=result != TIMEOUT), None)
    assert [str(works.error()) for _ in range(2)] == [told] * 2


def test_those_that_have_ended_are_forgotten() -> None:
    works, first = QueuedWorks(), Work(REMOTE_ERROR)
    event = queued(works, first, None)
    event.looks = 0  # it ends after all
    queued(works, Work(ends=False), None)
    event.looks = None
    assert [works.error() for _ in range(3)] == [None] * 3


class Communicator:
    torch_group = SimpleNamespace(group_name="averages")

    def __init__(self) -> None:
        self.problem: Exception | None = None

    def raise_if_aborted(self, _what: str) -> None:
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def communicator() -> Communicator:
    return Communicator()


@pytest.fixture
def group(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> AveragingGroup:
    """Waits for a stream that never comes to its end."""
    monkeypatch.setattr("bagua.collectives.torch_internals.device_types", lambda _: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, query=lambda: False))
    ours: Any = SimpleNamespace(
        size=2,
        ranks=[0, 1],
        group_name="averages",
        timeout=datetime.timedelta(seconds=1),
        get_global_communicator=lambda: communicator,
    )
    return AveragingGroup(ours)


def test_a_sum_that_loses_a_rank_ends_the_wait_for_its_stream(group: AveragingGroup) -> None:
    queued(group._queued, Work(REMOTE_ERROR), None)
    with pytest.raises(CollectiveError, match=r"averaging the parameters (.|\n)*a rank exited") as raised:
        group.finish(SimpleNamespace())  # type: ignore[arg-type]
    assert str(raised.value.__cause__) == LOST


def test_abort_ends_the_wait_as_well(group: AveragingGroup, communicator: Communicator) -> None:
    queued(group._queued, Work(ends=False), None)
    communicator.problem = RuntimeError("aborted")
    with pytest.raises(RuntimeError, match="aborted"):
        group.finish(SimpleNamespace())  # type: ignore[arg-type]
