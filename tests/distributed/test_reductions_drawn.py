"""Every collective that reduces, that takes many tensors or objects, and what all refuse, as hypothesis draws calls."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collective_model import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    MOVED_DTYPES,
    REDUCED_DTYPES,
    assert_reduced,
    contributions,
)
from support.drawn_calls import Drawing, Given, Shape, call, given_as, tensor_of
from support.examples import examples
from support.rank_pool import RankPool

import bagua.torch_api as bagua
from bagua.collectives.reduce_op import is_meaningful

DRAWN = settings(max_examples=examples(5))


class Sums:
    """One example: a dtype and all its reductions, and what the ranks give to them."""

    def __init__(self, pool: RankPool, data: st.DataObject) -> None:
        self.pool, self.draw = pool, Drawing(data, pool.size)
        self.dtype = self.draw.one_of(REDUCED_DTYPES, "dtype")
        self.ops = [op for op in bagua.ReduceOp if is_meaningful(self.dtype, op)]
        self.shape = self.draw.shape()

    def inputs(self, shape: Shape) -> list[torch.Tensor]:
        """By rank."""
        flat = contributions(random.Random(self.draw.seed()), self.pool.size, math.prod(shape), self.dtype)
        return [one.view(shape) for one in flat]

    def tensors(self, shape: Shape) -> list[Given]:
        """With values that nobody asks for."""
        return [given_as(one) for one in self.inputs(shape)]

    def call(self, name: str, arguments: list[list[object]]) -> list[list[bytes]]:
        results, after = call(self.pool, name, arguments)
        assert results == [None] * self.pool.size
        return after

    def check(self, actual: bytes, inputs: list[torch.Tensor], op: bagua.ReduceOp) -> None:
        assert_reduced(tensor_of(actual, self.dtype, tuple(inputs[0].shape)), inputs, op, op.name)


@DRAWN
@given(st.data())
def test_allreduce(pool: RankPool, data: st.DataObject) -> None:
    sums = Sums(pool, data)
    is_aliased = sums.draw.one_of([False, True], "source is destination")
    for op in sums.ops:
        inputs = sums.inputs(sums.shape)
        sources = [given_as(one) for one in inputs]
        targets = sources if is_aliased else sums.tensors(sums.shape)
        after = sums.call("allreduce", [[*pair, op] for pair in zip(sources, targets, strict=True)])
        assert is_aliased or [rank[0] for rank in after] == [one.elements for one in sources]
        for rank in after:
            sums.check(rank[1], inputs, op)
        for rank in sums.call("allreduce_inplace", [[one, op] for one in sources]):
            sums.check(rank[0], inputs, op)


@DRAWN
@given(st.data())
def test_reduce(pool: RankPool, data: st.DataObject) -> None:
    """Elsewhere than on the root nothing changes."""
    sums = Sums(pool, data)
    root = sums.draw.rank("dst")
    for op in sums.ops:
        inputs = sums.inputs(sums.shape)
        pairs = [[given_as(one), room] for one, room in zip(inputs, sums.tensors(sums.shape), strict=True)]
        after = sums.call("reduce", [[*pair, root, op] for pair in pairs])
        in_place = sums.call("reduce_inplace", [[source, root, op] for source, _ in pairs])
        for rank, (source, room) in enumerate(pairs):
            assert after[rank][0] == source.elements
            if rank == root:
                sums.check(after[rank][1], inputs, op)
                sums.check(in_place[rank][0], inputs, op)
            else:
                assert after[rank][1] == room.elements
                assert in_place[rank][0] == source.elements


@DRAWN
@given(st.data())
def test_reduce_scatter(pool: RankPool, data: st.DataObject) -> None:
    """In place, what is behind the first part stays as it is."""
    sums = Sums(pool, data)
    whole, count = sums.draw.parts(sums.shape), math.prod(sums.shape)
    size = count * sums.dtype.itemsize
    for op in sums.ops:
        inputs = sums.inputs(whole)
        pairs = [[given_as(one), room] for one, room in zip(inputs, sums.tensors(sums.shape), strict=True)]
        after = sums.call("reduce_scatter", [[*pair, op] for pair in pairs])
        in_place = sums.call("reduce_scatter_inplace", [[source, op] for source, _ in pairs])
        for rank, (source, _) in enumerate(pairs):
            of_rank = [one.reshape(-1)[rank * count : (rank + 1) * count] for one in inputs]
            assert after[rank][0] == source.elements
            sums.check(after[rank][1], of_rank, op)
            sums.check(in_place[rank][0][:size], of_rank, op)
            assert in_place[rank][0][size:] == source.elements[size:]


# What gloo computes with, as torch.distributed offers it.
OF_TORCH = [dtype for dtype in REDUCED_DTYPES if dtype not in (torch.int16, torch.bool, *COMPLEX)]


@DRAWN
@given(st.data())
def test_allreduce_has_the_bits_of_torch(pool: RankPool, data: st.DataObject) -> None:
    """Of any numbers: floating-point sums depend on their order."""
    draw = Drawing(data, pool.size)
    dtype, shape = draw.one_of(OF_TORCH, "dtype"), draw.shape()
    generator = torch.Generator().manual_seed(draw.seed())
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) * 9 for _ in range(pool.size)]
    inputs = [given_as(one.abs().to(dtype) if dtype == torch.uint8 else one.to(dtype)) for one in values]
    for op in bagua.ReduceOp:
        if op != bagua.ReduceOp.AVG and is_meaningful(dtype, op):
            _, ours = call(pool, "allreduce_inplace", [[one, op] for one in inputs])
            _, theirs = call(pool, "allreduce of torch", [[one, op] for one in inputs])
            assert [rank[0] for rank in ours] == [rank[0] for rank in theirs], op.name


# --- many tensors ----------------------------------------------------------------------------------------------------


def many(draw: Drawing, dtypes: tuple[torch.dtype, ...]) -> tuple[list[list[torch.Tensor]], list[list[Given]]]:
    """By rank: values, and tensors that have them, in any layout. Memory differs between ranks, too."""
    kinds = [(draw.one_of(dtypes, "dtype"), draw.shape()) for _ in range(draw.one_of(range(5), "tensors"))]
    values: list[list[torch.Tensor]] = [[] for _ in range(draw.ranks)]
    for dtype, shape in kinds:
        flat = contributions(random.Random(draw.seed()), draw.ranks, math.prod(shape), dtype)
        for rank, one in enumerate(flat):
            values[rank].append(one.view(shape))
    return values, [[given_as(one, draw.layout(tuple(one.shape))) for one in rank] for rank in values]


FLAT_BYTES = (20, 64 << 20)  # of one message: several, or one for each dtype


@DRAWN
@given(st.data())
def test_broadcast_coalesced(pool: RankPool, data: st.DataObject) -> None:
    draw = Drawing(data, pool.size)
    root, size = draw.rank("src"), draw.one_of(FLAT_BYTES, "bytes of a message")
    _, tensors = many(draw, MOVED_DTYPES)
    results, after = call(pool, "broadcast_coalesced", [[size, one, root] for one in tensors])
    assert results == [None] * pool.size
    assert [rank[1] for rank in after] == [[one.elements for one in tensors[root]]] * pool.size


@DRAWN
@given(st.data())
def test_allreduce_coalesced_inplace(pool: RankPool, data: st.DataObject) -> None:
    draw = Drawing(data, pool.size)
    op = draw.one_of([op for op in bagua.ReduceOp if op.name in ("SUM", "PRODUCT", "AVG")], "op")
    values, tensors = many(draw, (*INTEGERS, *FLOATS, *COMPLEX))
    size = draw.one_of(FLAT_BYTES, "bytes of a message")
    results, after = call(pool, "allreduce_coalesced_inplace", [[size, one, op] for one in tensors])
    assert results == [None] * pool.size
    for rank in after:
        for number, actual in enumerate(rank[1]):
            inputs = [one[number] for one in values]
            assert_reduced(tensor_of(actual, inputs[0].dtype, tuple(inputs[0].shape)), inputs, op, op.name)


# --- objects ---------------------------------------------------------------------------------------------------------

OBJECTS = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@DRAWN
@given(st.data())
def test_objects(pool: RankPool, data: st.DataObject) -> None:
    root = Drawing(data, pool.size).rank("src")
    given_objects = data.draw(st.lists(OBJECTS, min_size=pool.size, max_size=pool.size))
    broadcast, _ = call(pool, "broadcast_object", [[one, root] for one in given_objects])
    assert broadcast == [given_objects[root]] * pool.size
    gathered, _ = call(pool, "all_gather_object", [[one] for one in given_objects])
    assert gathered == [given_objects] * pool.size


# --- what is refused -------------------------------------------------------------------------------------------------

# name -> the arguments after the tensor, as often as the collective takes it.
OF_CONTIGUOUS_TENSORS: dict[str, tuple[int, list[object]]] = {
    "broadcast": (1, [0]),
    "reduce": (2, [0]),
    "reduce_inplace": (1, [0]),
    "allreduce": (2, []),
    "allreduce_inplace": (1, []),
    "allgather": (2, []),
    "allgather_inplace": (1, []),
    "gather": (2, [0]),
    "gather_inplace": (1, [1, 0]),
    "scatter": (2, [0]),
    "scatter_inplace": (1, [1, 0]),
    "reduce_scatter": (2, []),
    "reduce_scatter_inplace": (1, []),
    "alltoall": (2, []),
    "alltoall_inplace": (1, []),
    "alltoall_v_inplace": (1, [[0] * 9, [0] * 9]),
}


@DRAWN
@given(st.data())
def test_memory_with_gaps_is_refused_before_anything_is_sent(pool: RankPool, data: st.DataObject) -> None:
    draw = Drawing(data, pool.size)
    name = draw.one_of(list(OF_CONTIGUOUS_TENSORS), "collective")
    times, others = OF_CONTIGUOUS_TENSORS[name]
    shape = (2 + draw.rank("rows"), 2 + draw.rank("columns"))
    tensor = given_as(torch.zeros(shape), draw.one_of(("strided", "transposed"), "layout"))
    results, after = call(pool, name, [[tensor] * times + others] * pool.size)
    for result in results:
        assert result.startswith("ValueError: ")
        assert "is not contiguous" in result
    assert all(rank[0] == tensor.elements for rank in after)
