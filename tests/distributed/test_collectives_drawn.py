"""Every collective that moves elements, as hypothesis draws calls, against models in numpy: any bits of every dtype,
shapes without dimensions, empty and odd ones, any root, counts and places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_calls import Drawing, Elements, Given, Group, Shape, call, call_each
from support.examples import examples

DRAWN = settings(max_examples=examples(4))


class Moves:
    """One example: the tensors of all ranks, of one dtype."""

    def __init__(self, group: Group, data: st.DataObject) -> None:
        self.group, self.draw, self.ranks = group, Drawing(data, group.size), range(group.size)
        self.dtype = self.draw.moved_dtype()

    def inputs(self, count: int) -> list[Elements]:
        """By rank."""
        return [self.draw.elements(count, self.dtype) for _ in self.ranks]

    def tensor(self, elements: Elements, shape: Shape | None = None) -> Given:
        return Given(elements.tobytes(), self.dtype, (len(elements),) if shape is None else shape)

    def check(self, name: str, arguments: Sequence[Sequence[Any]], position: int, expected: Sequence[Elements]) -> None:
        """The argument at this position has become what is expected, by rank; other tensors are as they were."""
        results, after = call(self.group, name, arguments)
        assert results == [None] * self.group.size
        for rank, before in enumerate(arguments):
            for place, argument in enumerate(before):
                if isinstance(argument, Given):
                    right = expected[rank].tobytes() if place == position else argument.elements
                    assert after[rank][place] == right, f"argument {place} of rank {rank}"


def part(elements: Elements, rank: int, count: int) -> Elements:
    return elements[rank * count : (rank + 1) * count]


@DRAWN
@given(st.data())
def test_broadcast(group: Group, data: st.DataObject) -> None:
    moves = Moves(group, data)
    shape, root = moves.draw.shape(), moves.draw.rank("src")
    inputs = moves.inputs(math.prod(shape))
    moves.check("broadcast", [[moves.tensor(one, shape), root] for one in inputs], 0, [inputs[root]] * group.size)


@DRAWN
@given(st.data())
def test_send_and_recv(group: Group, data: st.DataObject) -> None:
    moves = Moves(group, data)
    shape, source = moves.draw.shape(), moves.draw.rank("src")
    target = (source + moves.draw.one_of(range(1, group.size), "distance")) % group.size
    sent, room = moves.inputs(math.prod(shape))[:2]
    tasks: list[tuple[str, list[Any]] | None] = [None] * group.size
    tasks[source] = "send", [moves.tensor(sent, shape), target]
    tasks[target] = "recv", [moves.tensor(room, shape), source]
    results, after = call_each(group, tasks)
    assert results == [None] * group.size
    assert after[source][0] == after[target][0] == sent.tobytes()


@DRAWN
@given(st.data())
def test_allgather(group: Group, data: st.DataObject) -> None:
    moves = Moves(group, data)
    shape = moves.draw.shape()
    whole = moves.draw.parts(shape)
    inputs, rooms = moves.inputs(math.prod(shape)), moves.inputs(math.prod(whole))
    arguments = [[moves.tensor(inputs[rank], shape), moves.tensor(rooms[rank], whole)] for rank in moves.ranks]
    moves.check("allgather", arguments, 1, [np.concatenate(inputs)] * group.size)


@DRAWN
@given(st.data())
def test_allgather_inplace(group: Group, data: st.DataObject) -> None:
    moves = Moves(group, data)
    shape = moves.draw.shape()
    whole, count = moves.draw.parts(shape), math.prod(shape)
    inputs = moves.inputs(math.prod(whole))
    gathered = np.concatenate([part(inputs[rank], rank, count) for rank in moves.ranks])
    moves.check("allgather_inplace", [[moves.tensor(one, whole)] for one in inputs], 0, [gathered] * group.size)


@DRAWN
@given(st.data())
def test_gather(group: Group, data: st.DataObject) -> None:
    """What others than the root give as destination is left alone, whatever it is."""
    moves = Moves(group, data)
    shape, root = moves.draw.shape(), moves.draw.rank("dst")
    whole = moves.draw.parts(shape)
    inputs, rooms = moves.inputs(math.prod(shape)), moves.inputs(math.prod(whole))
    arguments = [[moves.tensor(inputs[rank], shape), moves.tensor(rooms[rank], whole), root] for rank in moves.ranks]
    expected = [np.concatenate(inputs) if rank == root else rooms[rank] for rank in moves.ranks]
    moves.check("gather", arguments, 1, expected)


@DRAWN
@given(st.data())
def test_gather_inplace(group: Group, data: st.DataObject) -> None:
    moves = Moves(group, data)
    shape, root = moves.draw.shape(), moves.draw.rank("dst")
    whole, count = moves.draw.parts(shape), math.prod(shape)
    inputs, buffer = moves.inputs(count), moves.draw.elements(math.prod(whole), moves.dtype)
    inputs[root] = part(buffer, root, count)
    arguments = [
        [moves.tensor(buffer, whole) if rank == root else moves.tensor(inputs[rank], shape), count, root]
        for rank in moves.ranks
    ]
    expected = [np.concatenate(inputs) if rank == root else inputs[rank] for rank in moves.ranks]
    moves.check("gather_inplace", arguments, 0, expected)


@DRAWN
@given(st.data())
def test_scatter(group: Group, data: st.DataObject) -> None:
    moves = Moves(group, data)
    shape, root = moves.draw.shape(), moves.draw.rank("src")
    whole, count = moves.draw.parts(shape), math.prod(shape)
    sources, rooms = moves.inputs(math.prod(whole)), moves.inputs(count)
    arguments = [[moves.tensor(sources[rank], whole), moves.tensor(rooms[rank], shape), root] for rank in moves.ranks]
    moves.check("scatter", arguments, 1, [part(sources[root], rank, count) for rank in moves.ranks])


@DRAWN
@given(st.data())
def test_scatter_inplace(group: Group, data: st.DataObject) -> None:
    """The root's buffer stays as it is."""
    moves = Moves(group, data)
    shape, root = moves.draw.shape(), moves.draw.rank("src")
    whole, count = moves.draw.parts(shape), math.prod(shape)
    rooms, buffer = moves.inputs(count), moves.draw.elements(math.prod(whole), moves.dtype)
    arguments = [
        [moves.tensor(buffer, whole) if rank == root else moves.tensor(rooms[rank], shape), count, root]
        for rank in moves.ranks
    ]
    expected = [buffer if rank == root else part(buffer, rank, count) for rank in moves.ranks]
    moves.check("scatter_inplace", arguments, 0, expected)


@DRAWN
@given(st.data(), st.booleans())
def test_alltoall(group: Group, data: st.DataObject, is_in_place: bool) -> None:
    moves = Moves(group, data)
    shape = moves.draw.shape()
    whole, count = moves.draw.parts(shape), math.prod(shape)
    inputs, rooms = moves.inputs(math.prod(whole)), moves.inputs(math.prod(whole))
    expected = [np.concatenate([part(source, rank, count) for source in inputs]) for rank in moves.ranks]
    if is_in_place:
        moves.check("alltoall_inplace", [[moves.tensor(one, whole)] for one in inputs], 0, expected)
    else:
        arguments = [[moves.tensor(inputs[rank], whole), moves.tensor(rooms[rank])] for rank in moves.ranks]
        moves.check("alltoall", arguments, 1, expected)


def places(draw: Drawing, lengths: list[int]) -> tuple[list[int], int]:
    """Where parts of these lengths lie without touching each other, in any order, and the length of all."""
    starts, end = [0] * len(lengths), 0
    gaps = draw.numbers(len(lengths), "gaps", 2)
    for gap, number in zip(gaps, draw.one_of(ORDERS[len(lengths)], "order"), strict=True):
        starts[number] = end + gap
        end = starts[number] + lengths[number]
    return starts, end


ORDERS = {2: [(0, 1), (1, 0)], 3: [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]}


@DRAWN
@given(st.data())
def test_alltoall_v(group: Group, data: st.DataObject) -> None:
    """Parts of what is sent may overlap; what lies between those that are received stays as it is."""
    moves = Moves(group, data)
    counts = [moves.draw.numbers(group.size, f"rank {rank} sends") for rank in moves.ranks]
    starts = [moves.draw.numbers(group.size, f"rank {rank} sends from") for rank in moves.ranks]
    arguments, expected = [], []
    inputs = moves.inputs(20)  # the last part ends before
    for rank in moves.ranks:
        received = [counts[source][rank] for source in moves.ranks]
        targets, end = places(moves.draw, received)
        room = moves.draw.elements(end, moves.dtype)
        arguments.append(
            [moves.tensor(inputs[rank]), counts[rank], starts[rank], moves.tensor(room), received, targets]
        )
        right = room.copy()
        for source in moves.ranks:
            begin, target, count = starts[source][rank], targets[source], received[source]
            right[target : target + count] = inputs[source][begin : begin + count]
        expected.append(right)
    moves.check("alltoall_v", arguments, 3, expected)


@DRAWN
@given(st.data())
def test_alltoall_v_inplace(group: Group, data: st.DataObject) -> None:
    """As much to a rank as from it."""
    moves = Moves(group, data)
    drawn = moves.draw.numbers(group.size * group.size, "counts")
    counts = [[drawn[group.size * min(a, b) + max(a, b)] for b in moves.ranks] for a in moves.ranks]
    layouts = [places(moves.draw, counts[rank]) for rank in moves.ranks]
    inputs = [moves.draw.elements(end, moves.dtype) for _, end in layouts]
    expected = [one.copy() for one in inputs]
    for rank in moves.ranks:
        for source in moves.ranks:
            begin, target, count = layouts[source][0][rank], layouts[rank][0][source], counts[rank][source]
            expected[rank][target : target + count] = inputs[source][begin : begin + count]
    arguments = [[moves.tensor(inputs[rank]), counts[rank], layouts[rank][0]] for rank in moves.ranks]
    moves.check("alltoall_v_inplace", arguments, 0, expected)
