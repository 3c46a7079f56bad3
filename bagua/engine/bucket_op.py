"""What an algorithm does with a bucket that is ready: the protocol between engine and algorithms.

The engine runs the operations of a bucket one after the other, and the buckets in the same order on every rank. With
CUDA they run under the group's stream, on the thread that found the bucket ready, and may only queue work there: the
host does not wait. On CPU they run on the engine's communication thread. An `inline` operation that is the only one of
its bucket runs on the thread and the stream that found the bucket ready, and goes on in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch.distributed as dist

    from bagua.engine.bucket import Bucket


@runtime_checkable
class BucketOp(Protocol):
    """One step of communication.

    inline: `run` returns at once, with a Work that goes on in the background, so that it needs no thread and no stream.

    An operation may also have `prescale`, a number or None: if it is the first of its bucket, everything is multiplied
    by it while the bucket is filled, which is cheaper than a pass over the bucket of its own.
    """

    inline: bool

    def run(self, bucket: Bucket) -> dist.Work | None:
        """Work on `bucket.flattened_tensor()` in place. A Work that is returned is waited for before the next operation
        of the bucket, and before the results are used."""
        ...


class FunctionOp:
    """A Python function of the bucket's name as an operation."""

    def __init__(self, function: Callable[[str], None], inline: bool = False) -> None:
        self._function = function
        self.inline = inline

    def run(self, bucket: Bucket) -> dist.Work | None:
        self._function(bucket.name)
        return None
