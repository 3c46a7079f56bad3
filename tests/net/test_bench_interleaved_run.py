"""The order of a run: every backend at every size in every repetition, and each takes its turn to be first."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress
from bagua.net.bench.ring.interleaved_run import RunResults, Visit, run_interleaved
from bagua.net.bench.ring.iteration_plan import IterationPlan, fixed_plan
from bagua.net.bench.ring.sessions import Sample, Verification
from bagua.net.bench.turns import rotated

Call = tuple[str, int, int, int]


class RecordingSession:
    """Writes down what it is asked; an iteration of `size` takes size microseconds."""

    collective = "all_reduce"

    def __init__(self, name: str, calls: list[Call], wrong_at: int | None = None) -> None:
        self.name = name
        self._calls = calls
        self._wrong_at = wrong_at
        self.patience: list[float] = []

    def connect(self, timeout_s: float) -> None:
        raise AssertionError(f"a session is connected before the run, {timeout_s}")

    def run(self, size_bytes: int, iterations: int, warmup: int, timeout_s: float) -> Sample:
        self._calls.append((self.name, size_bytes, iterations, warmup))
        self.patience.append(timeout_s)
        return Sample(iterations, size_bytes * 1e-6, (), 1.0, size_bytes)

    def verify(self, size_bytes: int, timeout_s: float) -> Verification:
        assert timeout_s == 5.0
        return Verification(size_bytes != self._wrong_at, "3 wrong elements" if size_bytes == self._wrong_at else "")


def run(sessions: list[RecordingSession], sizes: Mapping[str, list[int]], verify: bool = True) -> RunResults:
    def make_plan(costs: Mapping[int, float]) -> IterationPlan:
        return fixed_plan(costs, iterations=4, warmup=2, repeats=3)

    return run_interleaved(
        Visit(sessions, sizes),
        make_plan=make_plan,
        verify=verify,
        timeout_s=5.0,
        progress=lambda total: Progress(total, stream=io.StringIO()),
    )


def test_every_visit_happens_once_and_everyone_is_first_in_turn() -> None:
    calls: list[Call] = []
    sessions = [RecordingSession(name, calls) for name in "abc"]
    results = run(sessions, {name: [1, 2] for name in "abc"})
    measured = [call for call in calls if call[2:] == (4, 2)]
    assert [name for name, size, _, _ in measured if size == 1] == list("abcbcacab")
    assert [name for name, size, _, _ in measured if size == 2] == list("bcacababc")
    # Backends alternate within one size of one repetition; sizes follow each other, the largest first.
    assert [size for _, size, _, _ in measured] == [2, 2, 2, 1, 1, 1] * 3
    assert set(Counter(measured).values()) == {3}
    assert {len(results.samples[name][size]) for name in "abc" for size in (1, 2)} == {3}


def test_the_estimate_is_not_a_sample() -> None:
    calls: list[Call] = []
    results = run([RecordingSession("a", calls)], {"a": [8, 1 << 20]})
    assert [call for call in calls if call[2:] != (4, 2)] == [("a", 1 << 20, 1, 1), ("a", 8, 20, 1)]
    assert {len(samples) for samples in results.samples["a"].values()} == {3}


def test_a_backend_may_have_sizes_of_its_own() -> None:
    calls: list[Call] = []
    sessions = [RecordingSession("ring", calls), RecordingSession("raw x1", calls)]
    results = run(sessions, {"ring": [8, 16], "raw x1": [16, 32]})
    assert set(results.samples["ring"]) == {8, 16}
    assert set(results.samples["raw x1"]) == {16, 32}


def test_slow_sizes_are_given_their_time() -> None:
    session = RecordingSession("a", [])
    run([session], {"a": [1_000_000]})
    # 1 s an iteration, 6 iterations with the warm-ups.
    assert session.patience == [5.0, 65.0, 65.0, 65.0]


def test_no_size_is_begun_that_would_overrun_the_deadline() -> None:
    calls: list[Call] = []
    session = RecordingSession("a", calls)

    def spent() -> float:
        return sum(size * (iterations + warmup) * 1e-6 for _, size, iterations, warmup in calls)

    def run_until(deadline: float) -> RunResults:
        calls.clear()
        return run_interleaved(
            Visit([session], {"a": [100_000, 1_000_000, 10_000_000]}),
            make_plan=lambda costs: fixed_plan(costs, iterations=1, warmup=1, repeats=7),
            verify=False,
            timeout_s=5.0,
            progress=lambda total: Progress(total, stream=io.StringIO()),
            deadline=deadline,
            clock=spent,
        )

    results = run_until(8.0)
    assert spent() <= 8.0
    assert results.unmeasured == [10_000_000]
    assert [len(results.samples["a"][size]) for size in (100_000, 1_000_000)] == [7, 2]
    with pytest.raises(BenchError, match="Raise --time-budget"):
        run_until(-1.0)


class BusySession(RecordingSession):
    """Each iteration waits for a CPU, and then moves 4 GB/s: 16 MiB take little more than 8 bytes."""

    def __init__(self, name: str, latency_s: float, clock: list[float]) -> None:
        super().__init__(name, [])
        self._latency_s = latency_s
        self._clock = clock

    def run(self, size_bytes: int, iterations: int, warmup: int, timeout_s: float) -> Sample:
        seconds = self._latency_s + size_bytes / 4e9
        self._clock[0] += (iterations + warmup) * seconds
        return replace(super().run(size_bytes, iterations, warmup, timeout_s), seconds=seconds)


@pytest.mark.parametrize(
    ("latency_s", "repetitions"),
    [
        (0.0001, [8, 8, 8, 8, 8]),  # a machine that nobody else uses
        (0.005, [8, 8, 8, 8, 8]),
        (0.01, [0, 7, 8, 8, 8]),
        (0.03, [0, 0, 2, 2, 2]),  # repetitions are dropped
        (0.04, [0, 0, 0, 5, 6]),
    ],
)
def test_on_a_busy_machine_the_large_sizes_are_kept(latency_s: float, repetitions: list[int]) -> None:
    sizes = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20]
    clock = [0.0]
    output = io.StringIO()
    names = ("plugin", "raw x1", "raw x4")
    results = run_interleaved(
        Visit([BusySession(name, latency_s, clock) for name in names], dict.fromkeys(names, sizes)),
        make_plan=lambda costs: fixed_plan(costs, iterations=1, warmup=1, repeats=8),
        verify=False,
        timeout_s=5.0,
        progress=lambda total: Progress(total, stream=output),
        deadline=3.5,
        clock=lambda: clock[0],
    )
    assert [len(results.samples["plugin"][size]) for size in sizes] == repetitions
    assert clock[0] <= 3.5
    assert " sizes, 2 backends, 8 repetitions" in output.getvalue()


def test_wrong_data_is_recorded_and_the_run_goes_on() -> None:
    sessions = [RecordingSession("a", []), RecordingSession("b", [], wrong_at=16)]
    results = run(sessions, {name: [8, 16] for name in "ab"})
    assert results.wrong() == [("b", 16, "3 wrong elements")]
    assert len(results.verifications) == 4
    assert run(sessions, {name: [8, 16] for name in "ab"}, verify=False).verifications == {}


def test_a_failure_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Sample:
        raise BenchError("gone")

    session = RecordingSession("a", [])
    monkeypatch.setattr(session, "run", fail)
    with pytest.raises(BenchError, match="gone"):
        run([session], {"a": [8]})


def test_rotation() -> None:
    sessions = [RecordingSession(name, []) for name in "abc"]
    assert ["".join(s.name for s in rotated(sessions, turn)) for turn in range(4)] == ["abc", "bca", "cab", "abc"]
    assert rotated([], 3) == []
