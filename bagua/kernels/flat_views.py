"""Where tensors lie in one flat piece of memory. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# Where weights begin that a module computes with in one piece of memory. On an H100, a matrix product with bfloat16
# weights takes 2.8 times as long at an offset of 4 or 8 bytes, and 8 times at 2. On CPUs, and for what only optimizers
# read (1.45 times in one multi-tensor kernel), gaps are not worth the other layout.
ALIGNED_BYTES = {"cuda": 16}


def offsets_of(layouts: Sequence[Tensor], unit: int) -> tuple[list[int], int]:
    """Where each tensor begins, at a multiple of `unit`, and where the last one ends. In elements."""
    offsets, end = [], 0
    for layout in layouts:
        offsets.append(-(-end // unit) * unit)
        end = offsets[-1] + layout.numel()
    return offsets, end


def flat_views(flat: Tensor, layouts: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """A view for each tensor, with its strides where these are dense: autograd then keeps a gradient's layout."""
    views = []
    for layout, offset in zip(layouts, offsets, strict=True):
        if layout.is_contiguous() or not is_dense(layout):
            view = flat[offset : offset + layout.numel()].view(layout.shape)
        else:
            view = flat.as_strided(layout.shape, layout.stride(), offset)
        # The same memory, but no view to autograd, so that code of old that calls `p.grad.detach_()` may.
        views.append(view.data)
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in any order of the dimensions: contiguous or channels_last, say."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda one: one[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
