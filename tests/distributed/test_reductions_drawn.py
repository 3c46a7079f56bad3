"""Every collective that reduces, that takes many tensors or objects, and what all refuse, as hypothesis draws calls."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collective_model import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    MOVED_DTYPES,
    REDUCED_DTYPES,
    assert_reduced,
    contributions,
)
from support.drawn_calls import Drawing, Given, Group, Shape, call, call_all, given_as, tensor_of
from support.examples import examples

import bagua.torch_api as bagua
from bagua.collectives.reduce_op import is_meaningful

DRAWN = settings(max_examples=examples(5))
REDUCED = settings(max_examples=examples(20))  # of every dtype and reduction


class Case:
    """A reduction, what the ranks give to it, and memory for results with values that nobody asks for."""

    def __init__(self, draw: Drawing, op: bagua.ReduceOp, dtype: torch.dtype, given: Shape, room: Shape) -> None:
        self.op, self.dtype, self.ranks = op, dtype, range(draw.ranks)

        def values(shape: Shape) -> list[torch.Tensor]:
            flat = contributions(random.Random(draw.seed()), draw.ranks, math.prod(shape), dtype)
            return [one.view(shape) for one in flat]

        self.inputs = values(given)
        self.sources = [given_as(one) for one in self.inputs]
        self.rooms = [given_as(one) for one in values(room)]

    def check(self, actual: bytes, part: slice = slice(None)) -> None:
        inputs = [one.reshape(-1)[part] for one in self.inputs]
        assert_reduced(tensor_of(actual, self.dtype, inputs[0].shape), inputs, self.op, f"{self.op.name}, {self.dtype}")


def reductions(group: Group, data: st.DataObject, in_parts: bool = False) -> tuple[Drawing, list[Case]]:
    draw = Drawing(data, group.size)
    cases = []
    for dtype in REDUCED_DTYPES:
        shape = draw.shape()
        given = draw.parts(shape) if in_parts else shape
        ops = [op for op in bagua.ReduceOp if is_meaningful(dtype, op)]
        cases.extend(Case(draw, op, dtype, given, shape) for op in ops)
    return draw, cases


@REDUCED
@given(st.data(), st.booleans())
def test_allreduce(group: Group, data: st.DataObject, is_aliased: bool) -> None:
    _, cases = reductions(group, data)
    targets = [one.sources if is_aliased else one.rooms for one in cases]
    arguments = [
        [[one.sources[rank], target[rank], one.op] for rank in one.ranks]
        for one, target in zip(cases, targets, strict=True)
    ]
    apart = call_all(group, "allreduce", arguments)
    in_place = call_all(group, "allreduce_inplace", [[[source, one.op] for source in one.sources] for one in cases])
    for number, one in enumerate(cases):
        for rank in one.ranks:
            source, target, _ = apart[number][rank]
            one.check(target)
            assert source == (target if is_aliased else one.sources[rank].elements)
            one.check(in_place[number][rank][0])


@REDUCED
@given(st.data())
def test_reduce(group: Group, data: st.DataObject) -> None:
    """Elsewhere than on the root nothing changes."""
    draw, cases = reductions(group, data)
    roots = [draw.rank("dst") for _ in cases]
    arguments = [
        [[one.sources[rank], one.rooms[rank], root, one.op] for rank in one.ranks]
        for one, root in zip(cases, roots, strict=True)
    ]
    apart = call_all(group, "reduce", arguments)
    in_place = call_all(group, "reduce_inplace", [[[one[0], *one[2:]] for one in every] for every in arguments])
    for number, (one, root) in enumerate(zip(cases, roots, strict=True)):
        for rank in one.ranks:
            source, target, *_ = apart[number][rank]
            assert source == one.sources[rank].elements
            if rank == root:
                one.check(target)
                one.check(in_place[number][rank][0])
            else:
                assert target == one.rooms[rank].elements
                assert in_place[number][rank][0] == source


@REDUCED
@given(st.data())
def test_reduce_scatter(group: Group, data: st.DataObject) -> None:
    """In place, what is behind the first part stays as it is."""
    _, cases = reductions(group, data, in_parts=True)
    arguments = [[[one.sources[rank], one.rooms[rank], one.op] for rank in one.ranks] for one in cases]
    apart = call_all(group, "reduce_scatter", arguments)
    in_place = call_all(group, "reduce_scatter_inplace", [[[one[0], one[2]] for one in every] for every in arguments])
    for number, one in enumerate(cases):
        size = len(one.rooms[0].elements)
        count = size // one.dtype.itemsize
        for rank in one.ranks:
            part = slice(rank * count, (rank + 1) * count)
            source, target, _ = apart[number][rank]
            assert source == one.sources[rank].elements
            one.check(target, part)
            one.check(in_place[number][rank][0][:size], part)
            assert in_place[number][rank][0][size:] == source[size:]


# What gloo computes with, as torch.distributed offers it.
OF_TORCH = [dtype for dtype in REDUCED_DTYPES if dtype not in (torch.int16, torch.bool, *COMPLEX, *FLOAT8)]


@DRAWN
@given(st.data())
def test_allreduce_has_the_bits_of_torch(group: Group, data: st.DataObject) -> None:
    """Of any numbers: floating-point sums depend on their order."""
    draw = Drawing(data, group.size)
    dtype, shape = draw.one_of(OF_TORCH, "dtype"), draw.shape()
    generator = torch.Generator().manual_seed(draw.seed())
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) * 9 for _ in range(group.size)]
    inputs = [given_as(one.abs().to(dtype) if dtype == torch.uint8 else one.to(dtype)) for one in values]
    ops = [op for op in bagua.ReduceOp if op != bagua.ReduceOp.AVG and is_meaningful(dtype, op)]
    arguments = [[[one, op] for one in inputs] for op in ops]
    assert call_all(group, "allreduce_inplace", arguments) == call_all(group, "allreduce of torch", arguments)


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
def test_broadcast_coalesced(group: Group, data: st.DataObject) -> None:
    draw = Drawing(data, group.size)
    root, size = draw.rank("src"), draw.one_of(FLAT_BYTES, "bytes of a message")
    _, tensors = many(draw, MOVED_DTYPES)
    results, after = call(group, "broadcast_coalesced", [[size, one, root] for one in tensors])
    assert results == [None] * group.size
    assert [rank[1] for rank in after] == [[one.elements for one in tensors[root]]] * group.size


@DRAWN
@given(st.data())
def test_allreduce_coalesced_inplace(group: Group, data: st.DataObject) -> None:
    draw = Drawing(data, group.size)
    op = draw.one_of([op for op in bagua.ReduceOp if op.name in ("SUM", "PRODUCT", "AVG")], "op")
    values, tensors = many(draw, (*INTEGERS, *FLOATS, *COMPLEX))
    size = draw.one_of(FLAT_BYTES, "bytes of a message")
    results, after = call(group, "allreduce_coalesced_inplace", [[size, one, op] for one in tensors])
    assert results == [None] * group.size
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
def test_objects(group: Group, data: st.DataObject) -> None:
    root = Drawing(data, group.size).rank("src")
    given_objects = data.draw(st.lists(OBJECTS, min_size=group.size, max_size=group.size))
    broadcast, _ = call(group, "broadcast_object", [[one, root] for one in given_objects])
    assert broadcast == [given_objects[root]] * group.size
    gathered, _ = call(group, "all_gather_object", [[one] for one in given_objects])
    assert gathered == [given_objects] * group.size


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
def test_memory_with_gaps_is_refused_before_anything_is_sent(group: Group, data: st.DataObject) -> None:
    draw = Drawing(data, group.size)
    name = draw.one_of(list(OF_CONTIGUOUS_TENSORS), "collective")
    times, others = OF_CONTIGUOUS_TENSORS[name]
    shape = (2 + draw.rank("rows"), 2 + draw.rank("columns"))
    tensor = given_as(torch.zeros(shape), draw.one_of(("strided", "transposed"), "layout"))
    results, after = call(group, name, [[tensor] * times + others] * group.size)
    for result in results:
        assert result.startswith("ValueError: ")
        assert "is not contiguous" in result
    assert all(rank[0] == tensor.elements for rank in after)
