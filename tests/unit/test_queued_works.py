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

LOST = RuntimeError("NCCL error: remote process exited or there was a network error")


class Work:
    def __init__(self, error: Exception | None = None, *, ends: bool = True) -> None:
        self.error, self.ends = error, ends
        self.questions = 0

    def is_completed(self) -> bool:
        return self.ends or self.error is not None

    def exception(self) -> Exception | None:
        self.questions += 1
        return self.error


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


def test_a_collective_under_way_is_no_error() -> None:
    works, work = QueuedWorks(), Work(ends=False)
    queued(works, work, None)
    assert [works.error() for _ in range(5)] == [None] * 5
    assert work.questions == 0


def test_one_that_has_ended_is_not_asked_although_its_stream_says_so_a_moment_later() -> None:
    works, work = QueuedWorks(), Work()
    queued(works, work, 2)
    assert [works.error() for _ in range(5)] == [None] * 5
    assert work.questions == 0


def test_one_that_is_over_and_never_ends_is_asked_for_its_error() -> None:
    works, healthy, failed = QueuedWorks(), Work(), Work(LOST)
    queued(works, healthy, 1)
    queued(works, failed, None)
    assert works.error() is None
    assert works.error() is LOST
    assert works.error() is LOST
    assert healthy.questions == 0


def test_one_that_is_slow_to_end_is_no_error_after_any_number_of_questions() -> None:
    works, work = QueuedWorks(), Work()
    queued(works, work, None)
    assert [works.error() for _ in range(5)] == [None] * 5
    assert work.questions == 4


def test_those_that_have_ended_are_forgotten() -> None:
    works, first = QueuedWorks(), Work(LOST)
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
    queued(group._queued, Work(LOST), None)
    with pytest.raises(CollectiveError, match=r"averaging the parameters (.|\n)*remote process exited") as raised:
        group.finish(SimpleNamespace())  # type: ignore[arg-type]
    assert raised.value.__cause__ is LOST


def test_abort_ends_the_wait_as_well(group: AveragingGroup, communicator: Communicator) -> None:
    queued(group._queued, Work(ends=False), None)
    communicator.problem = RuntimeError("aborted")
    with pytest.raises(RuntimeError, match="aborted"):
        group.finish(SimpleNamespace())  # type: ignore[arg-type]
