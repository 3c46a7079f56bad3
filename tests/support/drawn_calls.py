"""Calls of collectives as hypothesis draws them: what each rank gives, and what it has afterwards.

Tensors travel between the test process and the ranks (support.rank_pool) as bytes. The test process sees their elements
as opaque numpy records: what moves them is modelled without their dtype.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.collective_model import MOVED_DTYPES
from support.rank_pool import RankPool
from support.ranks import device_for

import bagua.torch_api as bagua
from bagua.collectives import coalesced
from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.object_collectives import all_gather_object
from bagua.torch_api import communication

Elements = NDArray[np.void]  # of one dimension
Shape = tuple[int, ...]
Drawn = TypeVar("Drawn")

# --- what ranks do ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor, as a rank is to make it. One that appears twice among the arguments of a call is one tensor."""

    elements: bytes
    dtype: torch.dtype
    shape: Shape
    layout: str = "contiguous"

    def tensor(self) -> torch.Tensor:
        raw = torch.tensor(np.frombuffer(self.elements, np.uint8))
        values = raw.view(self.dtype).view(self.shape).to(device_for(int(os.environ["RANK"])))
        if self.layout == "transposed":
            return values.mT.contiguous().mT
        if self.layout == "strided":
            return torch.stack([values, values], dim=-1)[..., 0]
        return values


def _bytes(tensor: torch.Tensor) -> bytes:
    # Not view(-1): a dimension of size 1 may have any stride. Not clone: it makes every true bool a byte of 1.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def _of_torch(tensor: torch.Tensor, op: bagua.ReduceOp, comm: BaguaCommunicator | None) -> None:
    if comm is not CommMember.NON_COMM_MEMBER:
        dist.all_reduce(tensor, op.torch_op, group=comm and comm.torch_group)


def _in_pieces_of(
    flat_bytes: int, collective: Callable[..., None], *arguments: Any, comm: BaguaCommunicator | None
) -> None:
    coalesced.FLAT_BYTES = flat_bytes
    collective(*arguments, comm=comm)


_OTHERS: dict[str, Callable[..., Any]] = {
    "broadcast_object": communication.broadcast_object,
    "all_gather_object": all_gather_object,
    "broadcast_coalesced": lambda size, *rest, comm: _in_pieces_of(
        size, communication.broadcast_coalesced, *rest, comm=comm
    ),
    "allreduce_coalesced_inplace": lambda size, *rest, comm: _in_pieces_of(
        size, communication.allreduce_coalesced_inplace, *rest, comm=comm
    ),
    "allreduce of torch": _of_torch,
}


@functools.cache
def _communicator(members: Sequence[int]) -> BaguaCommunicator:
    return communication.new_group(list(members)).get_global_communicator()


Task = tuple[str | None, Sequence[Any]]  # a collective and its arguments; no collective: the rank takes no part


def carry_out(members: tuple[int, ...], tasks: Sequence[Task]) -> list[tuple[Any, list[Any]]]:
    """In a rank: collectives of these ranks, or of all if there are none."""
    comm = _communicator(members) if members else None
    return [_carry_out(comm, *task) for task in tasks]


def _carry_out(comm: BaguaCommunicator | None, name: str | None, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns what the call returned, or the error of an argument, and the bytes of the tensors among the arguments as
    they are then."""
    made: dict[int, torch.Tensor] = {}

    def real(argument: Any) -> Any:
        if isinstance(argument, Given):
            return made.setdefault(id(argument), argument.tensor())
        return [real(one) for one in argument] if isinstance(argument, list) else argument

    def bytes_of(argument: Any) -> Any:
        if isinstance(argument, Given):
            return _bytes(made[id(argument)].cpu())
        return [bytes_of(one) for one in argument] if isinstance(argument, list) else argument

    given = [real(argument) for argument in arguments]
    result = None
    if name is not None:
        try:
            result = (_OTHERS.get(name) or getattr(bagua, name))(*given, comm=comm)
        except (TypeError, ValueError) as error:
            result = f"{type(error).__name__}: {error}"
    return result, [bytes_of(argument) for argument in arguments]


# --- what the test process does --------------------------------------------------------------------------------------


class Group:
    """Some ranks of a pool. The others make the calls of rank 0, for which they have nothing to do.

    Args:
        members: ascending; none: all of the pool.
    """

    def __init__(self, pool: RankPool, members: tuple[int, ...] = ()) -> None:
        self._pool, self._members = pool, members
        self._ranks = members or tuple(range(pool.size))
        self.size = len(self._ranks)

    def call(self, tasks: Sequence[Sequence[Task]]) -> list[list[tuple[Any, list[Any]]]]:
        """`carry_out` of these tasks, by rank of the group."""
        every = [tasks[0]] * self._pool.size
        for rank, one in zip(self._ranks, tasks, strict=True):
            every[rank] = one
        answers = self._pool.call(carry_out, [(self._members, one) for one in every])
        for rank in {*range(self._pool.size)} - {*self._ranks}:
            for (_, arguments), (_, after) in zip(tasks[0], answers[rank], strict=True):
                assert after == _bytes_of_given(arguments), f"rank {rank}, which is not in the group"
        return [answers[rank] for rank in self._ranks]


def _bytes_of_given(argument: Any) -> Any:
    if isinstance(argument, Given):
        return argument.elements
    return [_bytes_of_given(one) for one in argument] if isinstance(argument, list) else argument


class Drawing:
    """Draws what one example is made of."""

    def __init__(self, data: st.DataObject, ranks: int) -> None:
        self._draw = data.draw
        self.ranks = ranks
        self._values = np.random.default_rng(self._draw(st.integers(0, 2**32 - 1), label="seed of the values"))

    def one_of(self, choices: Sequence[Drawn], label: str) -> Drawn:
        return self._draw(st.sampled_from(choices), label=label)

    def moved_dtype(self) -> torch.dtype:
        return self.one_of(MOVED_DTYPES, "dtype")

    def rank(self, label: str) -> int:
        return self._draw(st.integers(0, self.ranks - 1), label=label)

    def numbers(self, count: int, label: str, largest: int = 9) -> list[int]:
        return self._draw(st.lists(st.integers(0, largest), min_size=count, max_size=count), label=label)

    def shape(self) -> Shape:
        """Of no dimension to three, which may be empty."""
        return tuple(self._draw(st.lists(st.integers(0, 7), max_size=3), label="shape"))

    def parts(self, shape: Shape) -> Shape:
        """A shape with room for as much of every rank."""
        return self.one_of([(self.ranks, *shape), (*shape, self.ranks), (self.ranks * math.prod(shape),)], "whole")

    def layout(self, shape: Shape) -> str:
        """Any that the shape can have."""
        return self.one_of(("contiguous", "strided", "transposed")[: 1 + min(len(shape), 2)], "layout")

    def elements(self, count: int, dtype: torch.dtype) -> Elements:
        """Any bits, but for bool, of which a byte is 0 or 1."""
        raw = self._values.integers(0, 2 if dtype == torch.bool else 256, count * dtype.itemsize, np.uint8)
        return raw.view(f"V{dtype.itemsize}")

    def seed(self) -> int:
        """Of other values."""
        return int(self._values.integers(2**32))


def tensor_of(elements: bytes, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    return torch.tensor(np.frombuffer(elements, np.uint8)).view(dtype).view(shape)


def given_as(tensor: torch.Tensor, layout: str = "contiguous") -> Given:
    return Given(_bytes(tensor), tensor.dtype, tuple(tensor.shape), layout)


def call_each(group: Group, tasks: Sequence[Task | None]) -> tuple[list[Any], list[list[Any]]]:
    """
    Args:
        tasks: by rank the collective and its arguments; None: it takes no part.

    Returns:
        by rank what the call returned, and the arguments afterwards, with bytes for each tensor.
    """
    answers = group.call([[task or (None, [])] for task in tasks])
    return [result for ((result, _),) in answers], [after for ((_, after),) in answers]


def call(group: Group, name: str, arguments: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """`call_each` of the same collective."""
    return call_each(group, [(name, one) for one in arguments])


def call_all(group: Group, name: str, arguments: Sequence[Sequence[Sequence[Any]]]) -> list[list[list[Any]]]:
    """`call` with each of these, in one message to the ranks. Returns the arguments afterwards, by call and rank."""
    answers = group.call([[(name, one[rank]) for one in arguments] for rank in range(group.size)])
    assert all(result is None for rank in answers for result, _ in rank)
    return [[after for _, after in every] for every in zip(*answers, strict=True)]
