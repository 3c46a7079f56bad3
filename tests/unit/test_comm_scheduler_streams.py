"""What scheduler and hooks make CUDA streams wait for, with stand-ins for streams: tensors lie on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.collectives import process_group
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_hooks import background
from bagua.engine.bucket import Bucket, FunctionOp
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.step_state import BucketEvent
from bagua.job import torch_internals
from bagua.job.failure_report import CollectiveError


class _Stream:
    """Says in the log what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class _Bucket(Bucket):
    """Seems to be on a GPU."""

    log: list[str]

    def __init__(self, tensors: Sequence[Any], name: str) -> None:
        super().__init__(tensors, name)
        self.device, self.is_on_gpu = torch.device("cuda", 0), True

    def copy_in(self) -> None:
        self.log.append("gather")
        super().copy_in()

    def keep_for(self, stream: Any) -> None:
        self.log.append(f"memory for {stream.name}")

    def keep_gradients_for(self, stream: Any) -> None:
        self.log.append(f"gradients for {stream.name}")


class _Device:
    """With streams "main" and "side", of which one is current, and that of the group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        streams = {name: _Stream(name, self.log) for name in ("main", "side", "group")}
        self.current = "main"
        self.group: Any = SimpleNamespace(ranks=[0], torch_group=object(), stream_on=lambda _: streams["group"])
        monkeypatch.setattr("bagua.engine.comm_scheduler.has_thread", lambda _: False)
        monkeypatch.setattr("bagua.engine.comm_scheduler.watch", lambda _: lambda: None)
        monkeypatch.setattr("bagua.engine.step_statistics.PassRecorder.begin_pass", lambda *_: None)
        monkeypatch.setattr(torch_internals, "raw_stream_of", lambda _: lambda: list(streams).index(self.current))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: streams[self.current])
        for module in ("bagua.engine.comm_scheduler", "bagua.comm_hooks.background"):
            monkeypatch.setattr(f"{module}.on_stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda _: self.log.append("event")))

    def scheduler(
        self, sizes: Sequence[int], inline: bool, run: Callable[[str], None] | None = None
    ) -> tuple[CommScheduler, list[list[Any]]]:
        """With buckets of so many tensors; and these."""
        made: list[list[Any]] = []
        buckets: list[Bucket] = []
        for number, size in enumerate(sizes):
            tensors: list[Any] = [torch.zeros(2) for _ in range(size)]
            for index, tensor in enumerate(tensors):
                tensor.ensure_bagua_tensor(f"{number}.{index}", "module")
            bucket = _Bucket(tensors, str(number))
            bucket.log = self.log
            buckets.append(bucket.append_op(FunctionOp(run or (lambda name: self.log.append(f"run {name}")), inline)))
            made.append(tensors)
        return CommScheduler(buckets, self.group), made

    def mark(self, tensor: Any, stream: str) -> None:
        self.current = stream
        tensor.bagua_mark_communication_ready()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    return _Device(monkeypatch)


@pytest.mark.parametrize("inline", [True, False])
def test_gradients_of_another_stream_are_waited_for_before_they_are_gathered(device: _Device, inline: bool) -> None:
    scheduler, ((first, second, third),) = device.scheduler([3], inline)
    for _ in range(2):  # the marks of one pass are not those of the next
        device.log.clear()
        device.mark(first, "side")
        device.mark(second, "main")
        device.mark(third, "main")
        assert device.log[:3] == ["main waits for side", "gradients for main", "gather"]
        if not inline:
            assert device.log[3:] == ["memory for group", "group waits for main", "run 0", "event"]
        scheduler._started.clear()
        scheduler.wait_pending_comm_ops()
    scheduler.close()


def test_a_bucket_that_another_ones_mark_launches_waits_for_its_own_stream(device: _Device) -> None:
    scheduler, ((front,), (behind,)) = device.scheduler([1, 1], inline=True)
    device.mark(behind, "side")
    assert device.log == []
    device.mark(front, "main")
    assert device.log == ["gather", "run 0", "main waits for side", "gradients for main", "gather", "run 1"]
    scheduler.close()


def test_one_stream_waits_for_nothing(device: _Device) -> None:
    scheduler, (tensors,) = device.scheduler([3], inline=True)
    for tensor in tensors:
        device.mark(tensor, "side")
    assert device.log == ["gather", "run 0"]
    scheduler.close()


def test_the_thread_of_a_module_on_the_cpu_gets_nothing_of_a_gpu(
    device: _Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams wait neither for the gradients, nor ours for what it starts."""
    monkeypatch.setattr("bagua.engine.comm_scheduler.has_thread", lambda _: True)
    monkeypatch.setattr("bagua.engine.comm_scheduler.join_thread", lambda _: pytest.fail("on the thread"))
    scheduler, ((tensor,),) = device.scheduler([1], inline=True)
    device.mark(tensor, "main")
    assert device.log == ["gather", "run 0"]
    scheduler.close()


def test_operations_that_an_error_cuts_off_are_waited_for(device: _Device) -> None:
    def fail(_: str) -> None:
        raise ValueError("no memory")

    scheduler, ((tensor,),) = device.scheduler([1], inline=False, run=fail)
    with pytest.raises(ValueError, match="no memory"):
        device.mark(tensor, "main")
    assert device.log[-2:] == ["group waits for main", "main waits for group"]
    scheduler.close()


def test_what_an_error_cuts_off_in_a_communication_hook_is_waited_for(
    device: _Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "Future", lambda devices: SimpleNamespace(set_result=devices.append))

    def fail() -> torch.Tensor:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        background.StreamBackground(device.group).run(fail, torch.device("cuda", 0))
    assert device.log == ["group waits for main", "main waits for group"]


def test_the_stream_of_a_group_is_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: SimpleNamespace(device=device, priority=priority)
    )
    one, other = torch.device("cuda", 1), torch.device("cuda", 0)
    group = BaguaProcessGroup(None, [0])
    assert group.stream_on(one) is group.stream_on(one) is group.stream
    assert group.stream_on(other) is group.stream_on(other)
    for device in (one, other):
        stream: Any = group.stream_on(device)
        assert (stream.device, stream.priority) == (device, process_group.STREAM_PRIORITY)
    given: Any = SimpleNamespace(device=one)
    group = BaguaProcessGroup(None, [0], given)
    assert group.stream_on(one) is given
    assert group.stream_on(other).device == other


@pytest.mark.parametrize("is_named", [True, False])
def test_a_launch_that_fails_is_named_in_every_pass(device: _Device, is_named: bool) -> None:
    seen: list[tuple[str, str]] = []

    def name_failure(error: Exception, what: str, **_: bool) -> None:
        seen.append((str(error), what))
        if is_named:
            raise CollectiveError("rank 1 is gone", [1])

    device.group.get_global_communicator = lambda: SimpleNamespace(name_failure=name_failure)
    fails = False

    def run(_: str) -> None:
        if fails:
            raise RuntimeError("connection lost")

    scheduler, ((tensor,),) = device.scheduler([1], inline=True, run=run)
    device.mark(tensor, "main")
    scheduler._started.clear()
    scheduler.sent = [scheduler._states[0].bucket]  # what waiting leaves, which needs a device
    state = scheduler._states[0]
    state.state = BucketEvent.WAITED_FOR[state.state]
    fails = True
    with pytest.raises(RuntimeError) as raised:
        device.mark(tensor, "main")
    assert str(raised.value) == ("rank 1 is gone" if is_named else "connection lost")
    assert seen == [("connection lost", "starting to communicate the results of a backward pass")]
    scheduler.close()
