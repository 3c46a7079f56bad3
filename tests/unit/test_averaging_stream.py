"""Sums over NCCL that fail while a stream waits for them, and who is told: the backend and the stream are played."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import wait_until

from bagua.comm_ops.averaging_group import AveragingGroup
from bagua.job import nccl_watch, torch_internals
from bagua.job.failure_report import CollectiveError

LOST = "NCCL ended a collective: a rank exited or the network failed. Its own message is above in this log."
LATE = LOST.replace("a rank exited or the network failed", "it timed out")


class Backend:
    """Of a torch group that is one as well."""

    group_name = "averages"
    _device_types = (torch.device("cuda"),)

    def __init__(self) -> None:
        self.error = "SUCCESS"

    def _get_backend(self, _device: torch.device) -> Backend:
        return self

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)


class Group:
    """Of two ranks, and its own global communicator."""

    size, ranks, group_name, timeout = 2, (0, 1), "averages", datetime.timedelta(seconds=1)

    def __init__(self) -> None:
        self.torch_group: Any = Backend()
        self.torch_groups = [self.torch_group]
        self.is_alive = True
        self.problem: Exception | None = None

    def get_global_communicator(self) -> Group:
        return self

    def raise_if_aborted(self, _what: str) -> None:
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Whose stream never comes to its end."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, query=lambda: False))
    return Group()


@pytest.mark.parametrize(("error", "told"), [("REMOTE_ERROR", LOST), ("COMM_ERROR", LOST), ("TIMEOUT", LATE)])
def test_a_sum_that_fails_ends_the_wait_for_its_stream(group: Group, error: str, told: str) -> None:
    group.torch_group.error = error
    with pytest.raises(CollectiveError, match="averaging the parameters") as raised:
        AveragingGroup(group).finish(SimpleNamespace())  # type: ignore[arg-type]
    assert str(raised.value.__cause__) == told


def test_abort_ends_the_wait_as_well(group: Group) -> None:
    group.problem = RuntimeError("aborted")
    with pytest.raises(RuntimeError, match="aborted"):
        AveragingGroup(group).finish(SimpleNamespace())  # type: ignore[arg-type]


def test_a_backend_that_cannot_tell(group: Group) -> None:
    assert torch_internals.backend_error(group.torch_group) is None
    group.torch_group.get_error = None
    assert torch_internals.backend_error(group.torch_group) is None


def test_the_watch_prints_what_failed_once(
    group: Group, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """However many modules train in the group, and whatever becomes of others."""
    monkeypatch.setattr(nccl_watch, "_the_watch", None)
    monkeypatch.setattr(nccl_watch, "LOOK_S", 0.001)
    gone = Group()
    nccl_watch.watch(gone)
    for _ in range(2):
        nccl_watch.watch(group)()
    watch = nccl_watch._the_watch
    assert watch is not None
    gone.is_alive = False
    wait_until(lambda: gone not in watch._all, "the watch leaves a group that is gone")
    assert capfd.readouterr().err == ""
    group.torch_group.error = "REMOTE_ERROR"
    watch._thread.join(60)
    assert capfd.readouterr().err.count("Operation on this rank: communicating on GPUs (group averages") == 1
