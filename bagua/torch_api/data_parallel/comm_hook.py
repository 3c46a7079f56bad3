"""Communication hooks, as torch's DistributedDataParallel has them: a function that communicates a bucket.

torch's GradBucket cannot be made in Python. GradientBucket has the same methods, and hooks use nothing else.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.bucket import Bucket


@dataclass(frozen=True, eq=False)
class CommHook:
    """`function(state, bucket)` gives a future of the tensor with the communicated gradients."""

    state: object
    function: Callable[[Any, Any], torch.futures.Future[Any]]


def check_comm_hook(function: Any) -> None:
    """
    Raises:
        TypeError: it cannot be called.
        ValueError: its annotations are others than torch's.
    """
    if not callable(function):
        raise TypeError(
            f"Communication hook must be callable, not {type(function).__name__}.\n"
            "Pass a function hook(state, bucket) that returns a torch.futures.Future of the bucket's tensor."
        )
    signature = inspect.signature(function)
    bucket = signature.parameters.get("bucket")
    expected = dist.GradBucket  # type: ignore[attr-defined]
    # Those that are not evaluated (`from __future__ import annotations`) are text, which may name anything.
    annotation = inspect.Parameter.empty if bucket is None else bucket.annotation
    if not isinstance(annotation, str) and annotation not in (inspect.Parameter.empty, expected):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, not {annotation!r}.\n"
            "Leave it out, or write dist.GradBucket."
        )
    result = torch.futures.Future[torch.Tensor]
    returned = signature.return_annotation
    if not isinstance(returned, str) and returned not in (inspect.Signature.empty, result):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not {returned!r}.\n"
            "Leave it out, or write that."
        )


class GradientBucket:
    """What a hook is given; the methods are those of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.flattened_tensor()[: sum(view.numel() for view in bucket.views)]

    def index(self) -> int:
        """Of the bucket, in launch order."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one in launch order."""
        return self._is_last

    def buffer(self) -> Tensor:
        """1-D: the gradients, not yet divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces what `buffer` gives."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """A view of `buffer` for each parameter."""
        if self._buffer.data_ptr() == self._bucket.flattened_tensor().data_ptr():
            return list(self._bucket.views)
        pieces = torch.split(self._buffer, [view.numel() for view in self._bucket.views])
        return [piece.view(view.shape) for piece, view in zip(pieces, self._bucket.views, strict=True)]

    def parameters(self) -> list[Tensor]:
        """In the order of `gradients`."""
        return list(self._bucket.tensors)


class CommHookOp:
    """Runs a hook instead of the all-reduce, on the thread that finds the bucket ready."""

    inline = True

    def __init__(self, hook: CommHook, engine: weakref.ref[AlgorithmFacade]) -> None:
        self._hook = hook
        self._engine = engine

    def run(self, bucket: Bucket) -> Any:
        """What the hook has begun, which is waited for before results are used."""
        engine = self._engine()
        assert engine is not None
        buckets = engine.bagua_buckets
        index = next(number for number, one in enumerate(buckets) if one is bucket)
        given = GradientBucket(bucket, index, index == len(buckets) - 1)
        return _HookWork(self._hook.function(self._hook.state, given), given.buffer(), bucket)


class _HookWork:
    def __init__(self, future: torch.futures.Future[Any], sent: Tensor, bucket: Bucket) -> None:
        self._future, self._sent, self._bucket = future, sent, bucket

    def wait(self) -> None:
        result = self._future.wait()
        if isinstance(result, list | tuple):
            (result,) = result
        flat = self._bucket.flattened_tensor()[: result.numel()]
        if result.data_ptr() != flat.data_ptr():
            with torch.no_grad():
                flat.copy_(result.view(-1))
