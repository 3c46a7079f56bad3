"""Memory that an operation on CPU needs while it runs, kept by the communication thread for the next operation.

malloc gives pieces of megabytes back to the system or keeps them, depending on all that the process has allocated
before. Where it gives them back, the kernel has to find and clear every page again in each step, which can take longer
than what is done with the memory (docs/design/measurements.md).

A communication thread has a block of its own (`keep_scratch`), as large as what its largest operation needed but no
larger than KEPT_BYTES, and frees it when it ends. Elsewhere, and on other devices, `scratch` is torch.empty.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

# Buckets of the default size need less; an operation on a whole model gives back what it needs beyond this.
KEPT_BYTES = 64 << 20
# Of the beginning of a piece: a line of the cache.
_ALIGNMENT = 64


class ScratchMemory:
    """A block, from which pieces are cut one after the other until `clear`. For one thread."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0  # also by pieces that a larger block would have had room for

    @property
    def kept_bytes(self) -> int:
        return self._block.numel()

    def piece(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not initialized, and valid until `clear`. If the block is too small, the piece has memory of its own, and the
        block is larger after `clear`, unless that took it beyond KEPT_BYTES."""
        size = math.prod(shape) * dtype.itemsize
        begin, end = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        if end <= KEPT_BYTES:
            self._used = end
            if end <= self._block.numel():
                return self._block[begin : begin + size].view(dtype).view(*shape)
        return torch.empty(*shape, dtype=dtype, device="cpu")

    def clear(self) -> None:
        """Nobody uses the pieces any more."""
        needed, self._used = self._used, 0
        if needed > self._block.numel():
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # never both at once
            self._block = torch.empty(needed, dtype=torch.uint8, device="cpu")


class _OfThread(threading.local):
    memory: ScratchMemory | None = None


_of_thread = _OfThread()


def keep_scratch() -> ScratchMemory:
    """From now on `scratch` on this thread, until it ends, cuts from what this returns. Whoever calls it clears it
    after each operation."""
    _of_thread.memory = ScratchMemory()
    return _of_thread.memory


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor that is not initialized, for the operation that runs on this thread: nobody may hold it when
    that has ended."""
    memory = _of_thread.memory
    if memory is None or device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    return memory.piece(shape, dtype)


def scratch_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`scratch` of the shape and device of `tensor`, and of its dtype unless another is given."""
    return scratch(tensor.shape, dtype or tensor.dtype, tensor.device)
