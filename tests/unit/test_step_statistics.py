"""What is counted as communication, and as exposed, on a clock that is played."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.engine import step_statistics
from bagua.engine.step_statistics import PassRecorder
from bagua.tuning import sampled_steps


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bucket_of(name: str, elements: int, is_on_gpu: bool = False) -> Any:
    return SimpleNamespace(name=name, is_on_gpu=is_on_gpu, flattened_tensor=lambda: torch.zeros(elements))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PassRecorder:
    for module in (step_statistics, sampled_steps):
        monkeypatch.setattr(module, "SAMPLE_EVERY", 2)
    return PassRecorder(clock)


def run_pass(recorder: PassRecorder, clock: Clock, by_thread_s: float, by_itself_s: float, waited_s: float) -> bool:
    """Of two buckets: the first is run by a thread, the second goes on by itself and is over when it was waited for."""
    first, second = bucket_of("first", 100), bucket_of("second", 10)
    recorder.begin_pass(first)
    is_sampling = recorder.is_sampling
    if is_sampling:
        for bucket in (first, second):
            recorder.launched(bucket)
        recorder.timed(first, lambda: setattr(clock, "now", clock.now + by_thread_s))()
        clock.now += by_itself_s - by_thread_s
        for bucket in (first, second):
            recorder.is_over(bucket)
    else:
        clock.now += by_itself_s
    recorder.end_pass(waited_s, None)
    return is_sampling


def test_nothing_is_known_before_the_first_steps(recorder: PassRecorder) -> None:
    stats = recorder.statistics()
    assert str(stats).startswith("no step has communicated yet")
    assert (stats.steps, stats.nbytes, stats.buckets) == (0, 0, ())
    assert all(map(math.isnan, (stats.step_s, stats.communication_s, stats.exposed_s)))


def test_figures_are_medians(recorder: PassRecorder, clock: Clock) -> None:
    sampled = [run_pass(recorder, clock, 0.2, 0.3, 0.1) for _ in range(6)]
    assert sampled == [False, True] * 3
    clock.now += 100.0  # an evaluation
    run_pass(recorder, clock, 0.2, 0.3, 0.4)
    stats = recorder.statistics()
    assert stats.steps == 7
    assert stats.step_s == pytest.approx(0.3)
    assert [(one.name, one.nbytes, round(one.communication_s, 6)) for one in stats.buckets] == [
        ("first", 400, 0.2),
        ("second", 40, 0.3),
    ]
    assert (stats.nbytes, stats.communication_s, stats.exposed_s) == (440, pytest.approx(0.5), pytest.approx(0.1))
    assert stats.hidden_s == pytest.approx(0.4)
    assert str(stats) == (
        "step 300 ms; communication 500 ms, of which exposed 100 ms (33 % of the step); 0.00042 MiB in 2 buckets"
    )


class Event:
    """At a time of the GPU; not passed until `is_over`."""

    def __init__(self, at_ms: float, is_over: bool = True) -> None:
        self.at_ms, self.is_over = at_ms, is_over

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, later: Event) -> float:
        assert all((self.is_over, later.is_over)), "CUDA raises"
        return later.at_ms - self.at_ms


@pytest.mark.parametrize("is_backward_last", [False, True])
def test_events_of_a_gpu_are_read_when_it_has_passed_them(
    recorder: PassRecorder, monkeypatch: pytest.MonkeyPatch, is_backward_last: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    bucket = bucket_of("only", 10, is_on_gpu=True)
    late: list[Event] = []
    for number in range(4):
        recorder.begin_pass(bucket)
        if not recorder.is_sampling:
            recorder.end_pass(None, None)
            continue
        recorder.launched(bucket)
        end, gradients_done = Event(30.0), Event(25.0)
        late.append(gradients_done if is_backward_last else end)
        late[-1].is_over = number < 3
        recorder.queued(bucket, Event(10.0), end)  # type: ignore[arg-type]
        recorder.is_over(bucket)
        recorder.end_pass(None, gradients_done)  # type: ignore[arg-type]
    assert len(recorder._unread) == 1
    stats = recorder.statistics()
    assert (stats.communication_s, stats.exposed_s) == (pytest.approx(0.020), pytest.approx(0.005))
    late[-1].is_over = True
    recorder.statistics()
    assert not recorder._unread


def test_a_graph_that_is_captured_is_not_timed(recorder: PassRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(4):
        recorder.begin_pass(bucket_of("only", 10, is_on_gpu=True))
        assert not recorder.is_sampling
        recorder.end_pass(None, None)
