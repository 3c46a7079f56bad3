"""The ways of tokens: to the slots of experts, to the ranks that have these, and back.

The exchange is called by all ranks in the same order: in forward by the thread that trains, in backward by autograd's,
while buckets of gradients may be under way in other groups. A slot has one row at most, which makes `put` and `take`
each other's gradient, without sums: faster than index_add, and the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives import collectives
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import group_for, is_initialized, to_bagua_process_group


class Exchange:
    """Between the ranks of the default group; without one, this process alone."""

    def __init__(self) -> None:
        self._tokens: BaguaCommunicator | None = None
        self._numbers: BaguaCommunicator | None = None
        if is_initialized() or dist.is_initialized():
            group = to_bagua_process_group()
            if group.size > 1:
                self._tokens = group_for("tokens of experts", group).get_global_communicator()
                # On the CPU, wherever the tokens are.
                self._numbers = group_for("capacities of experts", group, "gloo").get_global_communicator()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._tokens is None else self._tokens.nranks()

    def largest(self, number: int | None) -> int:
        """Of all ranks' numbers. None: this rank has none, because of an error.

        Raises:
            CollectiveError: a rank is gone; names it.
            RuntimeError: another rank has none; on those that have one.
        """
        if self._numbers is None:
            return number or 0
        # The second is 1 if a rank has none.
        told = torch.tensor([number or 0, number is None], dtype=torch.int64, device="cpu")
        self._numbers.perform("comparing capacities of MoE", told.device, dist.all_reduce, told, op=dist.ReduceOp.MAX)
        largest, is_missing = told.tolist()
        if is_missing and number is not None:
            raise RuntimeError(
                "Another rank could not take part in the forward pass of MoE.\n"
                "Its input has too few tokens, or the wrong shape.\n"
                "Its error message says which."
            )
        return int(largest)

    def all_to_all(self, tokens: Tensor) -> Tensor:
        """Part i goes to rank i: [ranks, ...] -> [ranks, ...]. Differentiable."""
        if self._tokens is None:
            return tokens
        exchanged: Tensor = _AllToAll.apply(self._tokens, tokens)  # type: ignore[no-untyped-call]
        return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: BaguaCommunicator, tokens: Tensor) -> Tensor:
        ctx.comm = comm
        return _exchanged(comm, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _exchanged(ctx.comm, gradients[0])


def _exchanged(comm: BaguaCommunicator, tokens: Tensor) -> Tensor:
    tokens = tokens.contiguous()
    received = torch.empty_like(tokens)
    collectives.alltoall(tokens, received, comm)
    return received


class ScaledGradient(torch.autograd.Function):
    """The same values; their gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


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
