"""Parameters that share memory: what is added to each of them must reach their common elements once. Pure functions;
any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def count_once(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Of each tensor, which of its elements no tensor before it holds: bool, of its shape. None: all of them."""
    counts: list[Tensor | None] = [None] * len(tensors)
    for begin, end, indices in _overlapping(tensors):
        # Of each byte between them, whether a tensor that was counted holds it.
        is_held = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
        for index in sorted(indices):
            tensor = tensors[index]
            size = tensor.dtype.itemsize
            bytes_of = is_held.as_strided(
                (*tensor.shape, size), (*(size * stride for stride in tensor.stride()), 1), tensor.data_ptr() - begin
            )
            count = ~bytes_of.any(dim=-1)
            if not count.all():
                counts[index] = count
            bytes_of.fill_(True)
    return counts


def _overlapping(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, list[int]]]:
    """(first address, end, positions) of tensors between whose ends others begin."""
    extents = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), index)
        for index, tensor in enumerate(tensors)
        if tensor.numel()
    )
    group: list[int] = []
    begin = end = 0
    for first, last, index in [*extents, (torch.iinfo(torch.int64).max, 0, -1)]:
        if first < end:
            group.append(index)
            end = max(end, last)
            continue
        if len(group) > 1:
            yield begin, end, group
        begin, end, group = first, last, [index]


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize
