"""NCCL's communicator under regroup, with a backend that only says what it is told: what is aborted when, and what the
watch finds. The real one: tests/gpu/test_regroup.py."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from bagua.job.failure_report import is_communication_error
from bagua.regroup import coordinator, nccl_group, watched_group
from bagua.regroup.nccl_group import TIMED_OUT, NcclGroup, NcclWatch, is_waited_for, results_deferred


class _Work:
    is_done = False

    def is_completed(self) -> bool:
        return self.is_done


class _Backend:
    def __init__(self) -> None:
        self.error, self.calls = "SUCCESS", list[str]()

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        self.calls.append("abort")


def _group(timeout_s: float = 60.0) -> tuple[NcclGroup, _Backend]:
    backend = _Backend()
    return NcclGroup(backend, torch.device("cuda", 0), datetime.timedelta(seconds=timeout_s)), backend


def test_a_communicator_is_aborted_once_and_queues_nothing_then() -> None:
    group, backend = _group()

    def abort() -> None:
        # Whoever comes back from a wait now is told.
        with pytest.raises(dist.DistBackendError):
            group.raise_if_left()
        backend.calls.append("abort")

    backend.abort = abort  # type: ignore[method-assign]
    work: Any = _Work()
    assert group.queue(lambda: work) is work
    group.leave("rank 1 is gone")
    group.leave("again")
    with pytest.raises(dist.DistBackendError, match="rank 1 is gone") as caught:
        group.queue(lambda: work)
    assert is_communication_error(caught.value)
    assert (group.is_left, backend.calls) == (True, ["abort"])


def test_an_abort_waits_for_a_collective_that_is_being_queued_and_not_for_one_that_finds_no_room() -> None:
    group, backend = _group()
    work: Any = _Work()
    at_it, go_on = threading.Event(), threading.Event()

    def queueing() -> Any:
        at_it.set()
        go_on.wait()
        backend.calls.append("queued")
        return work

    with ThreadPoolExecutor() as pool:
        last = pool.submit(group.queue, queueing)
        at_it.wait()
        aborted = pool.submit(group.leave, "rank 1 is gone")
        go_on.set()
        aborted.result()
        last.result()
    assert backend.calls == ["queued", "abort"]

    full, _ = _group()
    for _ in range(nccl_group.MAX_QUEUED):
        full.queue(lambda: work)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(full.queue, lambda: work)
        full.leave("rank 1 is gone")
        with pytest.raises(dist.DistBackendError, match="rank 1 is gone"):
            waiting.result()
    roomy, _ = _group()
    for _ in range(nccl_group.MAX_QUEUED):
        roomy.queue(lambda: work)
    work.is_done = True  # all are
    assert roomy.queue(lambda: work) is work


def test_the_watch_finds_a_failed_network_and_a_collective_that_takes_longer_than_the_timeout() -> None:
    group, backend = _group()
    work: Any = _Work()
    assert group.problem() is None
    group.queue(lambda: work)
    assert group.problem() is None  # under way
    backend.error = "REMOTE_ERROR"
    assert group.problem() == "a rank exited or the network failed"
    late, _ = _group(1e-9)
    late.queue(lambda: work)
    problem = late.problem()
    assert problem is not None
    assert TIMED_OUT in problem
    work.is_done = True
    assert late.problem() is None
    work.is_done = False
    assert late.problem() is None  # it was done, and no other has been queued


def test_the_watch_asks_who_has_left_only_while_a_collective_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = _group()
    work: Any = _Work()
    group.queue(lambda: work)
    asked, problems = list[tuple[Any, int]](), list[tuple[Any, str]]()
    found = threading.Event()

    def why_waiting(epoch: Any, queued: int) -> str:
        asked.append((epoch, queued))
        return "rank 1 left the job"

    def on_problem(epoch: Any, problem: str) -> None:
        problems.append((epoch, problem))
        found.set()

    assert not group.is_waiting()
    monkeypatch.setattr(nccl_group, "ASK_S", 0.0)
    watch: Any = NcclWatch(on_problem, why_waiting)
    watch.follow(group, "epoch 3")
    found.wait()
    watch.stop()
    assert (asked[0], problems[0]) == (("epoch 3", 1), ("epoch 3", "rank 1 left the job"))


def test_results_are_waited_for_on_the_host_but_in_a_backward_pass() -> None:
    seen = []

    def see(_: torch.Tensor) -> None:
        seen.append(is_waited_for())
        with results_deferred(False):
            seen.append(is_waited_for())

    values = torch.ones(1, requires_grad=True)
    values.register_hook(see)
    values.sum().backward()
    assert seen == [False, True]
    assert is_waited_for()
    with results_deferred():
        assert not is_waited_for()
        with results_deferred(False):
            assert is_waited_for()
        assert not is_waited_for()


def test_a_collective_goes_where_its_tensors_are() -> None:
    with FakeTensorMode():
        gpu, cpu = torch.empty(1, device="cuda"), torch.empty(1)
    for arguments, expected in (
        (([gpu], dist.AllreduceOptions()), True),
        (([cpu], dist.AllreduceOptions()), False),
        (([[gpu]], [gpu]), True),
        (([], [gpu]), True),
        ((gpu, gpu, []), True),
        ((dist.BarrierOptions(),), False),
        ((), False),
    ):
        assert watched_group._is_on_gpu(arguments) is expected
    options = dist.BarrierOptions()
    options.device = torch.device("cuda", 0)  # type: ignore[assignment]
    assert watched_group._is_on_gpu((options,)) is True


def test_ranks_that_use_the_same_gpu_are_named() -> None:
    device = torch.device("cuda", 0)
    coordinator._check_gpus([b"GPU-1 ", b"GPU-2 ", b"GPU-1 other-host"], device)
    with pytest.raises(ValueError, match=r"ranks 0 and 2 use the same GPU.*it is cuda:0, the current device") as caught:
        coordinator._check_gpus([b"GPU-1 ", b"GPU-2 ", b"GPU-1 "], device)
    assert "set_device(bagua.get_local_rank())" in str(caught.value)


def test_messages_between_gpus_are_refused() -> None:
    group, _ = _group()
    with pytest.raises(NotImplementedError, match="send of a tensor on a GPU is not supported under regroup"):
        watched_group._queued(group, "send", group.queue, (), {})
