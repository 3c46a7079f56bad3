"""The communication thread of a group: who starts it, and who ends it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bagua.engine.comm_thread import has_thread, join_thread


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


def test_what_follows_a_failure_fails_likewise() -> None:
    thread = join_thread(_group())
    failed = thread.submit(lambda: 1 // 0)
    later = thread.submit(lambda: 1)
    assert isinstance(failed.exception(20), ZeroDivisionError)
    assert later.exception(20) is failed.exception(20)
    thread.leave()


def test_a_new_thread_may_collect_the_user_of_another_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits for the new thread, and in that, too, garbage is collected: it must find no lock held."""
    other = join_thread(_group())
    original = threading.Thread.start
    collected = []

    def start(thread: threading.Thread) -> None:
        collector = threading.Thread(target=other.leave)
        original(collector)
        collector.join(20)
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
