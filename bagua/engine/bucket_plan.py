"""Which parameters are reduced together: a pure function of the list, so that every rank comes to the same plan.

Any thread. Knows nothing of gradients or groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Both measured. On GPUs fewer launches count for more than an earlier end of the last bucket:
# 25 MiB, as torch's DDP has it, were slower by 6 % where the processor that launches kernels is the limit.
DEFAULT_BUCKET_BYTES = 50 << 20
DEFAULT_BUCKET_BYTES_ON_CPU = 25 << 20
# Communication begins with a small bucket, while backward has just begun.
FIRST_BUCKET_BYTES = 1 << 20


def plan_buckets(
    tensors: Sequence[Tensor],
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Indices of `tensors`, grouped in their order: a group has one dtype and device, and ends with the tensor that
    makes it reach its limit.

    Groups are ordered by their last tensor, so that a group whose dtype is rare does not hold back those that are
    complete before it.

    Args:
        tensors: in the order in which they are expected to become ready.
        bucket_bytes: the limit of a group in bytes; None: the default of its device.
        first_bucket_bytes: the limit of the first group, where communication should begin early. On CPUs, where
            communication takes the cores from backward, tensors that fit into one group need no second. Several: of the
            first groups, one after the other, on every device.

    Raises:
        ValueError: a limit below one byte.
    """
    is_small_start = isinstance(first_bucket_bytes, int)
    first = [first_bucket_bytes] if isinstance(first_bucket_bytes, int) else list(first_bucket_bytes or ())
    for limit in (bucket_bytes, *first):
        if limit is not None and limit < 1:
            raise ValueError(f"a bucket of {limit} bytes: the limit must be at least 1 byte")
    on_cpu = DEFAULT_BUCKET_BYTES_ON_CPU if bucket_bytes is None else bucket_bytes
    elsewhere = DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    if is_small_start and all(one.device.type == "cpu" for one in tensors) and sum(map(_bytes, tensors)) <= on_cpu:
        first = []
    open_groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    done: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        open_groups.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + _bytes(tensor)
        limit = on_cpu if tensor.device.type == "cpu" else elsewhere
        if len(done) < len(first):
            limit = first[len(done)]
        if open_bytes[kind] >= limit:
            done.append(open_groups.pop(kind))
            del open_bytes[kind]
    done.extend(open_groups.values())
    return sorted(done, key=lambda group: group[-1])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
