"""What tools/train/compare_core.py reads from a trace: intervals, and how much communication backward compute hides."""

from __future__ import annotations

import gzip
import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs PyTorch, whose traces these are")
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "train"))

from core_comparison.intervals import length, overlap, union
from core_comparison.profiling import profiler_of
from core_comparison.trace_summary import read_chrome_trace, summarize


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


class TestIntervals:
    INTERVALS = st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
    )

    @given(INTERVALS, INTERVALS)
    def test_they_count_what_counting_moments_counts(
        self, left: list[tuple[int, int]], right: list[tuple[int, int]]
    ) -> None:
        first, second = union(left), union(right)
        assert length(first) == len(covered(left))
        assert overlap(first, second) == overlap(second, first) == len(covered(left) & covered(right))

    def test_a_union_is_disjoint_and_in_order(self) -> None:
        assert union([(8, 9), (1, 3), (2, 5), (5, 6)]) == [(1, 6), (8, 9)]

    def test_small_gaps_are_closed_when_asked(self) -> None:
        assert union([(0, 1), (3, 4), (10, 11)], gap=2) == [(0, 4), (10, 11)]
        assert union([(0, 10), (2, 3), (11, 12)], gap=0.5) == [(0, 10), (11, 12)]


def event(name: str, category: str, begin: float, end: float, **arguments: object) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "args": arguments}


def gpu_trace() -> list[dict[str, Any]]:
    """Two steps of 1,000 us, of which the GPU is 300 us late. NCCL runs 200 us a step, 150 of them under backward."""
    events = []
    for step in (0, 1000):
        events.append(event("back", "user_annotation", step + 100, step + 200))
        # The annotation again, where its kernels are: as long as all of them, and no backward of the host.
        events.append(event("back", "gpu_user_annotation", step, step + 1000))
        kernels = [
            ("forward", 50, 7, 300, 400),
            ("backward_1", 110, 7, 400, 500),
            ("backward_2", 120, 7, 510, 600),  # 10 us later: the GPU waited for the launch
            ("divide", 150, 20, 600, 700),  # on the stream of the communication
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 160, 20, 450, 650),
            ("optimizer", 300, 7, 700, 800),
        ]
        for name, launch, stream, begin, end in kernels:
            correlation = f"{name}{step}"
            events.append(
                event("cudaLaunchKernel", "cuda_runtime", step + launch, step + launch + 2, correlation=correlation)
            )
            events.append(event(name, "kernel", step + begin, step + end, stream=stream, correlation=correlation))
    return events


class TestTraces:
    def test_on_a_gpu_only_kernels_launched_by_backward_hide(self) -> None:
        summary = summarize(gpu_trace(), backward="back", steps=2)
        assert summary.communication_ms == pytest.approx(0.2)
        assert summary.backward_ms == pytest.approx(0.2)
        assert summary.hidden_ms == pytest.approx(0.15)
        assert summary.hidden_share == pytest.approx(0.75)
        (name,) = summary.by_operation
        assert (name, summary.operations) == ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1)

    def test_on_a_cpu_waiting_at_the_end_of_backward_hides_nothing(self) -> None:
        node = "autograd::engine::evaluate_function: AddmmBackward0"
        events = [
            event("back", "user_annotation", 0, 1000),
            event(node, "cpu_op", 0, 400),
            event(node, "cpu_op", 2000, 2400),  # somebody else's
            event("gloo:broadcast", "user_annotation", -100, -50),
            event("gloo:all_reduce", "user_annotation", 300, 700),
            event("gloo:all_reduce", "user_annotation", 500, 800),  # beside the other: the time passes once
            event("gloo:all_reduce", "user_annotation", 2000, 2100),
        ]
        summary = summarize(events, backward="back", steps=1)
        assert summary.communication_ms == pytest.approx(0.05 + 0.5 + 0.1)
        assert summary.hidden_ms == pytest.approx(0.1)
        assert summary.by_operation["gloo:broadcast"].hidden_ms == 0
        assert summary.by_operation["gloo:all_reduce"].count == 3

    def test_without_communication_there_is_no_share(self) -> None:
        assert summarize([event("back", "user_annotation", 0, 1)], backward="back", steps=1).hidden_share is None

    def test_a_trace_without_the_annotation_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no event 'back'"):
            summarize([event("gloo:all_reduce", "user_annotation", 0, 1)], backward="back", steps=1)

    def test_a_trace_is_read_compressed(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json.gz"
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": [{"ph": "M", "name": "x"}, event("back", "user_annotation", 0, 1)]}, file)
        assert [one["name"] for one in read_chrome_trace(path)] == ["back"]

    def test_a_contender_may_communicate_in_a_thread_of_its_own(self, tmp_path: Path) -> None:
        """Which runs before the profiler begins, as the thread of an engine does."""
        orders: queue.SimpleQueue[str] = queue.SimpleQueue()

        def serve() -> None:
            with torch.profiler.record_function(orders.get()):
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        with profiler_of(torch.device("cpu")) as profiler:
            orders.put("gloo:all_reduce")
            thread.join()
        path = tmp_path / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        assert "gloo:all_reduce" in [one["name"] for one in read_chrome_trace(path)]
