"""Rows of tokens to the slots of experts, and back. Each slot has one row at most, which makes each operation the
other's gradient, without sums: faster than index_add, and the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def put(rows: Tensor, slots: Tensor, count: int) -> Tensor:
    """[n, hidden] -> [count, hidden]: row i in slot slots[i], unless that is `count`. Zeros in slots without a row.
    Differentiable."""
    placed: Tensor = _Put.apply(rows, slots, count)  # type: ignore[no-untyped-call]
    return placed


def take(table: Tensor, slots: Tensor) -> Tensor:
    """[count, hidden] -> [n, hidden]: what `put` has placed; zeros where slots[i] is `count`. Differentiable."""
    taken: Tensor = _Take.apply(table, slots)  # type: ignore[no-untyped-call]
    return taken


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(slots)
        # Those without a slot meet in one more, which is cut off.
        return rows.new_zeros(count + 1, rows.shape[1]).index_copy_(0, slots, rows)[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return take(gradients[0], ctx.saved_tensors[0]), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.count = table.shape[0]
        if ctx.count == 0:
            return table.new_zeros(slots.shape[0], table.shape[1])
        is_nowhere = slots == ctx.count
        return table.index_select(0, slots.masked_fill(is_nowhere, 0)).masked_fill_(is_nowhere[:, None], 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return put(gradients[0], ctx.saved_tensors[0], ctx.count), None
