"""Which tensors of a bucket are ready in this pass, and the functions that set their flags.

Flags are set on autograd's threads, one per device; the scheduler reads and resets them.

[Note: streams of flags] With CUDA, autograd makes each gradient on the stream that was current in its forward pass. A
bucket may have tensors of several (branches of a model that run side by side), and it may be launched by the flag of
another bucket, on another device even. So its flags note their streams, and the stream that is current at the launch
waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from bagua.engine.bucket import Bucket
from bagua.engine.step_state import BucketEvent, BucketState
from bagua.job import torch_internals


class Launcher(Protocol):
    """What launches buckets.

    has_begun: a ready flag was set, or a bucket launched, since the step began. What sets a flag says so.
    """

    has_begun: bool

    def launch_complete(self) -> None:
        """The last ready flag of a bucket was set."""


class BucketReadiness:
    """Of one bucket, with its state in the step.

    Attributes:
        state: in the step.
        ready: a flag for each tensor.
        is_left_out: the bucket is not in the launch set of this step.
        flagged_on: with CUDA, the streams of the flags, as the driver knows them, each when another one was current
            than at the flag before.
        last_stream: of these.
        current_stream: with CUDA, tells the one that is current.
    """

    __slots__ = ("_streams", "bucket", "current_stream", "flagged_on", "is_left_out", "last_stream", "ready", "state")

    def __init__(self, bucket: Bucket) -> None:
        self.state = BucketState.WAITING
        self.bucket = bucket
        self.current_stream = torch_internals.raw_stream_of(bucket.device) if bucket.is_on_gpu else None
        # All that flags were ever set on, by these numbers: to make such an object takes longer than to set a flag.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.clear_flags()

    def may_launch(self, pass_is_over: bool) -> bool:
        """Whether all flags are set, and no gradient can be added any more."""
        if 0 in self.ready or self.state is BucketState.LAUNCHED:
            return False
        return pass_is_over or self.state is not BucketState.HELD

    @property
    def is_flagged(self) -> bool:
        """Whether any flag is set that counts."""
        return 1 in self.ready and not self.is_left_out

    def unready_names(self) -> list[str]:
        return [record.name for record, ready in zip(self.bucket.records, self.ready, strict=True) if not ready]

    def clear_flags(self) -> None:
        self.ready = bytearray(len(self.bucket.tensors))
        self.is_left_out = False
        self.flagged_on: list[int] = []
        self.last_stream: int | None = None

    def leave_out(self) -> None:
        """The bucket is not in the launch set of this step. Setting a flag has no effect then, because it is set
        already."""
        self.ready = bytearray(b"\1" * len(self.ready))
        self.is_left_out = True

    def set_all_flags(self) -> None:
        """At once, on the stream that is current at the launch as well."""
        if self.state is BucketState.LAUNCHED:
            raise _made_twice(self.bucket, 0)
        self.ready = bytearray(b"\1" * len(self.ready))

    def reset(self) -> None:
        """As it was in the beginning."""
        self.clear_flags()
        self.bucket.forget_scaled()
        self.state = BucketState.WAITING

    def take_over_flags(self, made: set[int], sent: set[int]) -> None:
        """Go on in the step of other buckets.

        Args:
            made: ids of tensors whose gradients are there, and were not sent.
            sent: ids of those that were. A bucket that has others, too, is sent again as a whole.
        """
        ids = [id(tensor) for tensor in self.bucket.tensors]
        if sent.issuperset(ids):
            self.state = BucketEvent.WAITED_FOR[BucketEvent.LAUNCH[self.state]]
            return
        for index, one in enumerate(ids):
            if one in made:
                self.ready[index] = 1
        if self.is_flagged or not sent.isdisjoint(ids):
            self.state = BucketEvent.LEFT_PARTLY[self.state]

    def note_stream(self, stream: int) -> None:
        """A flag is set on this stream, which is current, and is not that of the last flag."""
        self.last_stream = stream
        self.flagged_on.append(stream)
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self.bucket.device)

    def other_streams(self) -> list[torch.cuda.Stream]:
        """Those of the flags but for the one that is current now."""
        if self.current_stream is None:
            return []
        current = self.current_stream()
        return [self._streams[stream] for stream in dict.fromkeys(self.flagged_on) if stream != current]


def flag_setter(state: BucketReadiness, index: int, launcher: Launcher) -> Callable[[object], None]:
    """What sets the flag of a tensor of the bucket, and launches with the last one; it ignores its argument. Runs once
    per tensor and step, between kernels: it is short, and calls little. Without a lock: the tensors of a bucket are of
    one device, whose gradients one thread makes, and reentrant passes wait for each other."""
    if state.current_stream is not None:
        return _flag_setter_on_gpu(state, index, launcher, state.current_stream)
    bucket = state.bucket
    is_copied_now = bucket.gathers_alone(index)
    launched, held = BucketState.LAUNCHED, BucketState.HELD

    def set_flag(_: object = None) -> None:
        if state.state is launched or bucket.is_scaled[index]:
            raise _made_twice(bucket, index)
        ready = state.ready
        if not ready[index]:
            ready[index] = 1
            launcher.has_begun = True
            if is_copied_now and state.state is not held:
                bucket.copy_in_one(index)
            if 0 not in ready:
                launcher.launch_complete()

    return set_flag


def _flag_setter_on_gpu(
    state: BucketReadiness, index: int, launcher: Launcher, current_stream: Callable[[], int]
) -> Callable[[object], None]:
    """Notes the stream, too, and copies nothing."""
    launched = BucketState.LAUNCHED

    def set_flag(_: object = None) -> None:
        stream = current_stream()
        if stream != state.last_stream:
            state.note_stream(stream)
        if state.state is launched:
            raise _made_twice(state.bucket, index)
        ready = state.ready
        if not ready[index]:
            ready[index] = 1
            launcher.has_begun = True
            if 0 not in ready:
                launcher.launch_complete()

    return set_flag


def _made_twice(bucket: Bucket, index: int) -> RuntimeError:
    return RuntimeError(
        f"{bucket.records[index].name!r} became ready again after it was taken for communication. Either one backward"
        " pass made its gradient twice, as reentrant activation checkpointing of a module that is used more than once"
        " does: use checkpoint(..., use_reentrant=False). Or two threads ran backward passes of the module at the same"
        " time: run one after the other."
    )
