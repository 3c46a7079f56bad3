"""A bucket: tensors that are communicated together, and the operations that do it.

Owned by the engine of its module. The engine runs the operations of a bucket one after the other, and the buckets in
the same order on every rank. With CUDA they run under the group's stream, on the thread that found the bucket ready,
and may only queue work there: the host does not wait. On CPU they run on the group's communication thread. An `inline`
operation that is the only one of its bucket runs on the thread and the stream that found the bucket ready, and goes on
in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from bagua.engine.bucket_memory import BucketMemory


@runtime_checkable
class BucketOp(Protocol):
    """What an algorithm does with a bucket that is ready: the protocol between engine and algorithms.

    inline: `run` returns at once, with a Work that goes on in the background, so that it needs no thread and no stream.
    """

    inline: bool

    def run(self, bucket: Bucket) -> dist.Work | None:
        """Work on `bucket.flattened_tensor()` in place. A Work that is returned is waited for before the next operation
        of the bucket, and before the results are used."""
        ...


class PrescaledOp:
    """Base class of operations that need all elements of the bucket multiplied by a number before they run. For the
    first operation of a bucket that happens while the bucket is filled, which is cheaper than a pass over the bucket of
    its own.

    prescale: the number, or None. Asked when the operation is appended.
    """

    prescale: float | None = None


class FunctionOp(PrescaledOp):
    """A Python function of the bucket's name as an operation."""

    def __init__(self, function: Callable[[str], None], inline: bool = False, prescale: float | None = None) -> None:
        self._function = function
        self.inline = inline
        self.prescale = prescale

    def run(self, bucket: Bucket) -> dist.Work | None:
        self._function(bucket.name)
        return None


class Bucket(BucketMemory):
    """As BucketMemory, whose arguments and errors it has, with operations.

    Attributes:
        inline_op: its only operation, if that goes on in the background by itself.
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool = True, alignment: int = 1) -> None:
        super().__init__(tensors, name, flatten, alignment)
        self._ops: list[BucketOp] = []
        self.inline_op: BucketOp | None = None
        # What the elements are multiplied by before each operation. Before the first one: `prescale`.
        self._scales: list[float | None] = []

    @property
    def ops(self) -> Sequence[BucketOp]:
        """In the order in which they run."""
        return self._ops

    def append_op(self, op: BucketOp) -> Bucket:
        """Run `op` after those before it. Returns the bucket.

        Raises:
            TypeError: `op` has a `prescale`, but is not a PrescaledOp: it would run on values that are not scaled.
        """
        scale = op.prescale if isinstance(op, PrescaledOp) else None
        if hasattr(op, "prescale") and not isinstance(op, PrescaledOp):
            raise TypeError(
                f"{type(op).__name__} has prescale={op.prescale!r}, which has no effect.\n"
                "Derive the operation from bagua.engine.bucket.PrescaledOp, or remove the attribute."
            )
        if self._ops:
            self._scales.append(scale)
        else:
            self.prescale = scale
            self._scales.append(None)
        self.inline_op = op if op.inline and not self._ops else None
        self._ops.append(op)
        return self

    def append_python_op(self, python_function: Callable[[str], None], group: object = None) -> Bucket:
        """Run `python_function(bucket_name)` as an operation: with CUDA under the group's stream, where it must not
        wait on the host; an exception ends the backward pass. `group` is accepted for old code: the stream is that of
        the module's group. Returns the bucket."""
        return self.append_op(FunctionOp(python_function))

    def clear_ops(self) -> Bucket:
        """Forget all operations. Returns the bucket."""
        self._ops, self._scales, self.prescale, self.inline_op = [], [], None, None
        return self

    def run_ops(self) -> None:
        """All operations, one after the other, on this thread and the current stream. `copy_in` comes first."""
        for op, scale in zip(self._ops, self._scales, strict=True):
            if scale is not None:
                self.flattened_tensor().mul_(scale)
            work = op.run(self)
            if work is not None:
                work.wait()
