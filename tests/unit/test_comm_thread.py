"""The communication thread of a group: who starts it, and who ends it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua.engine.comm_thread import EarlierFailureError, has_thread, in_order, join_thread


class _TorchGroup:
    """Nothing but an object that a thread can belong to."""


def _group() -> Any:
    return SimpleNamespace(torch_group=_TorchGroup())


def test_users_share_a_thread_until_the_last_leaves() -> None:
    group = _group()
    first, second = join_thread(group), join_thread(group)
    assert first is second
    first.leave()
    assert has_thread(group)
    assert second.submit(lambda: 7).result(20) == 7
    second.leave()
    assert not has_thread(group)


def test_what_follows_a_failure_fails_too_and_says_that_it_is_another() -> None:
    thread = join_thread(_group())
    failed = thread.submit(lambda: 1 // 0)
    later = thread.submit(lambda: 1)
    assert isinstance(failed.exception(20), ZeroDivisionError)
    error = later.exception(20)
    assert isinstance(error, EarlierFailureError)
    assert "ZeroDivisionError: integer division" in str(error)
    assert error.__cause__ is failed.exception(20)
    thread.leave()


def test_what_follows_a_failure_of_the_network_fails_likewise() -> None:
    def fail() -> None:
        raise dist.DistNetworkError("a peer is gone")

    thread = join_thread(_group())
    failed = thread.submit(fail)
    later = thread.submit(lambda: 1)
    assert isinstance(failed.exception(20), dist.DistNetworkError)
    assert later.exception(20) is failed.exception(20)
    thread.leave()


def test_collectives_of_other_threads_keep_the_order_of_what_was_submitted() -> None:
    group = _group()
    cpu = torch.device("cpu")
    thread = join_thread(group)
    may_run = threading.Event()
    order = []

    def slow() -> None:
        assert may_run.wait(60)
        order.append("bucket")

    bucket = thread.submit(slow)
    timer = threading.Timer(0.1, may_run.set)
    timer.start()
    in_order(group.torch_group, cpu, lambda: order.append("other"))
    assert order == ["bucket", "other"]
    bucket.result(20)

    # From within a job: here and now, for the thread would wait for itself.
    nested = thread.submit(lambda: in_order(group.torch_group, cpu, threading.current_thread))
    assert nested.result(20).name == "bagua-comm"
    thread.leave()
    assert not has_thread(group)
    assert in_order(group.torch_group, cpu, threading.current_thread) is threading.current_thread()
    timer.join()


def test_a_new_thread_may_collect_the_user_of_another_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits for the new thread, and in that, too, garbage is collected: it must find no lock held."""
    other = join_thread(_group())
    original = threading.Thread.start
    collected = []

    def start(thread: threading.Thread) -> None:
        collector = threading.Thread(target=other.leave)
        original(collector)
        collector.join(60)
        collected.append(not collector.is_alive())
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    thread = join_thread(_group())
    monkeypatch.undo()
    assert collected == [True]
    thread.leave()


def test_a_thread_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group = _group()
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            join_thread(group)
    assert not has_thread(group)
    thread = join_thread(group)
    assert thread.submit(lambda: 7).result(20) == 7
    thread.leave()
