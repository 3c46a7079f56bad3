"""Which tensors of a bucket are ready in this pass, and the functions that mark them.

Marks come from autograd's threads, one per device; the scheduler reads and resets them.

[Note: streams of marks] With CUDA, autograd makes each gradient on the stream that was current in its forward pass. A
bucket may have tensors of several (branches of a model that run side by side), and it may be launched by the mark of
another bucket, on another device even. So its marks note their streams, and the stream that is current at the launch
waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.collectives import torch_internals
from bagua.engine.bucket import Bucket


class BucketReadiness:
    """Of one bucket.

    Attributes:
        ready: a mark for each tensor.
        missing: how many lack it.
        launched_in_pass: until the pass is waited for.
        launched_in_step: until the step ends.
        held: it has marks of an earlier pass, whose gradients this pass may add to: it is launched at the end of it.
        marked_on: with CUDA, the streams of the marks, as the driver knows them, each when another one was current than
            at the mark before.
        last_stream: of these.
        current_stream: with CUDA, tells the one that is current.
    """

    __slots__ = (
        *("bucket", "held", "last_stream", "launched_in_pass", "launched_in_step", "marked_on", "missing", "ready"),
        *("_streams", "current_stream"),
    )

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.current_stream = torch_internals.raw_stream_of(bucket.device) if bucket.is_on_gpu else None
        # All that marks were ever made on, by these numbers: to make such an object takes longer than a mark.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.reset()
        self.launched_in_pass = self.launched_in_step = self.held = False

    @property
    def may_launch(self) -> bool:
        return self.missing == 0 and not self.launched_in_pass and not self.held

    @property
    def is_marked(self) -> bool:
        return self.missing < len(self.ready)

    def unmarked_names(self) -> list[str]:
        return [record.name for record, ready in zip(self.bucket.records, self.ready, strict=True) if not ready]

    def reset(self) -> None:
        self.ready = bytearray(len(self.bucket.tensors))
        self.missing = len(self.bucket.tensors)
        self.marked_on: list[int] = []
        self.last_stream: int | None = None

    def note_stream(self, stream: int) -> None:
        """A mark is made on this stream, which is current, and is not that of the last mark."""
        self.last_stream = stream
        self.marked_on.append(stream)
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self.bucket.device)

    def other_streams(self) -> list[torch.cuda.Stream]:
        """Those of the marks but for the one that is current now."""
        if self.current_stream is None:
            return []
        current = self.current_stream()
        return [self._streams[stream] for stream in dict.fromkeys(self.marked_on) if stream != current]


def marker(state: BucketReadiness, index: int, launch: Callable[[], None]) -> Callable[[], None]:
    """What marks a tensor of the bucket, and calls `launch` when it is the last. Runs once per tensor and step, between
    kernels: it is short, and calls little. Without a lock: the tensors of a bucket are of one device, whose gradients
    one thread makes, and reentrant passes wait for each other."""
    if state.current_stream is not None:
        return _marker_on_gpu(state, index, launch, state.current_stream)
    bucket = state.bucket
    one_by_one = bucket.gathers_one_by_one

    def mark() -> None:
        if state.launched_in_pass or bucket.is_scaled[index]:
            raise _made_twice(bucket, index)
        if not state.ready[index]:
            state.ready[index] = 1
            if one_by_one and not state.held:
                bucket.copy_in_one(index)
            state.missing -= 1
            if not state.missing:
                launch()

    return mark


def _marker_on_gpu(
    state: BucketReadiness, index: int, launch: Callable[[], None], current_stream: Callable[[], int]
) -> Callable[[], None]:
    """Notes the stream, too, and gathers nothing."""

    def mark() -> None:
        stream = current_stream()
        if stream != state.last_stream:
            state.note_stream(stream)
        if state.launched_in_pass:
            raise _made_twice(state.bucket, index)
        ready = state.ready
        if not ready[index]:
            ready[index] = 1
            state.missing -= 1
            if not state.missing:
                launch()

    return mark


def _made_twice(bucket: Bucket, index: int) -> RuntimeError:
    return RuntimeError(
        f"{bucket.records[index].name!r} became ready again after it was taken for communication: one backward pass"
        " made its gradient twice. Reentrant activation checkpointing of a module that is used more than once does"
        " that; use checkpoint(..., use_reentrant=False)"
    )
