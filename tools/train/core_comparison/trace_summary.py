"""From a Chrome trace of torch.profiler: how long communication took, and how much of that backward compute hid.

[Note: what counts] Communication on a GPU is NCCL's kernels, which also wait for the peers; on a CPU gloo's operations,
from their start to their end. Backward compute on a GPU is the kernels that were launched inside the backward's
annotation, on the stream on which most of them run: the copies of buckets on other streams hide nothing. On a CPU it is
the operators of autograd inside that annotation. Pauses up to LAUNCH_GAP_US between kernels count as compute: the GPU
was waiting for a launch, not for a bucket.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_comparison.intervals import Interval, length, overlap, union

LAUNCH_GAP_US = 20.0

_KERNEL = "kernel"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_AUTOGRAD = "autograd::engine::evaluate_function"
_GLOO = "gloo:"


@dataclass(frozen=True)
class OperationTime:
    """Of all operations of one name, per step."""

    count: float
    communication_ms: float
    hidden_ms: float


@dataclass(frozen=True)
class CommunicationSummary:
    """Of one rank, per step. Operations that overlap each other are counted once in the times."""

    operations: float
    communication_ms: float
    hidden_ms: float  # under backward compute
    backward_ms: float  # compute alone
    by_operation: Mapping[str, OperationTime]  # also what is not about gradients, as the broadcast of buffers

    @property
    def hidden_share(self) -> float | None:
        return self.hidden_ms / self.communication_ms if self.communication_ms else None


def read_chrome_trace(path: Path) -> list[dict[str, Any]]:
    """The complete events, .json or .json.gz."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        document = json.load(file)
    return [event for event in document["traceEvents"] if event.get("ph") == "X"]


def summarize(events: Sequence[Mapping[str, Any]], *, backward: str, steps: int) -> CommunicationSummary:
    """`backward` names the annotation around every `loss.backward()`; see [Note: what counts].

    Raises:
        ValueError: the trace has no such annotation, so that nothing can be said about it.
    """
    annotations = union(_interval(event) for event in events if event["name"] == backward and not _is_on_gpu(event))
    if not annotations:
        raise ValueError(f"the trace has no event {backward!r}; trace at least one step, with CPU activities")
    kernels = [event for event in events if event.get("cat") == _KERNEL]
    communication = [event for event in kernels if "nccl" in event["name"].lower()]
    if kernels:
        compute = _backward_kernels(events, kernels, annotations)
    else:
        communication = [event for event in events if event["name"].startswith(_GLOO)]
        compute = [
            _interval(event)
            for event in events
            if event["name"].startswith(_AUTOGRAD) and _contains(annotations, float(event["ts"]))
        ]
    computing = union(compute, gap=LAUNCH_GAP_US)
    whole = _time_of(communication, computing, steps)
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in communication:
        # A kernel's name goes on with the types of its arguments.
        by_name[event["name"].partition("(")[0]].append(event)
    return CommunicationSummary(
        operations=whole.count,
        communication_ms=whole.communication_ms,
        hidden_ms=whole.hidden_ms,
        backward_ms=length(computing) / 1e3 / steps,
        by_operation={name: _time_of(same, computing, steps) for name, same in sorted(by_name.items())},
    )


def _time_of(communication: Sequence[Mapping[str, Any]], computing: Sequence[Interval], steps: int) -> OperationTime:
    busy = union(_interval(event) for event in communication)
    return OperationTime(len(communication) / steps, length(busy) / 1e3 / steps, overlap(busy, computing) / 1e3 / steps)


def _backward_kernels(
    events: Iterable[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]], annotations: Sequence[Interval]
) -> list[Interval]:
    # A kernel runs long after its launch, maybe when the host is already in the optimizer: the launch decides.
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in _LAUNCHES
        and "correlation" in event.get("args", {})
        and _contains(annotations, float(event["ts"]))
    }
    compute = [
        event
        for event in kernels
        if "nccl" not in event["name"].lower() and event.get("args", {}).get("correlation") in launched
    ]
    time_of_stream: dict[object, float] = defaultdict(float)
    for event in compute:
        time_of_stream[event["args"].get("stream")] += float(event["dur"])
    main = max(time_of_stream, key=lambda stream: time_of_stream[stream], default=None)
    return [_interval(event) for event in compute if event["args"].get("stream") == main]


def _is_on_gpu(event: Mapping[str, Any]) -> bool:
    """An annotation is written a second time, beside the kernels that it encloses."""
    return str(event.get("cat", "")).startswith("gpu_")


def _interval(event: Mapping[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _contains(disjoint: Sequence[Interval], moment: float) -> bool:
    place = bisect.bisect_right(disjoint, (moment, float("inf"))) - 1
    return place >= 0 and moment <= disjoint[place][1]
