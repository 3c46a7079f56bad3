"""Every collective in place, against a model in numpy: random sizes, dtypes and roots."""

from __future__ import annotations

import random

import pytest
import torch
from support.collective_model import MOVED_DTYPES, REDUCTIONS, assert_reduced, assert_same, contributions
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks

import bagua.torch_api as bagua
from bagua.collectives.communicator import BaguaCommunicator
from bagua.torch_api import communication

EXAMPLES = 25
MAX_SIZE = 60


def moved(draw: random.Random, comm: BaguaCommunicator) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], int]:
    """Inputs with a part for every rank, their parts, and the size of a part."""
    size, ranks = draw.randrange(MAX_SIZE), comm.nranks()
    inputs = contributions(draw, ranks, ranks * size, draw.choice(MOVED_DTYPES))
    return inputs, [list(one.clone().view(ranks, size).unbind()) for one in inputs], size


def allgather_inplace(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, parts, _ = moved(draw, comm)
    tensor = inputs[comm.rank()].to(device)
    bagua.allgather_inplace(tensor, comm)
    assert_same(tensor, torch.cat([parts[rank][rank] for rank in range(comm.nranks())]), "allgather_inplace")


def alltoall_inplace(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, parts, _ = moved(draw, comm)
    tensor = inputs[comm.rank()].to(device)
    bagua.alltoall_inplace(tensor, comm)
    assert_same(tensor, torch.cat([parts[rank][comm.rank()] for rank in range(comm.nranks())]), "alltoall_inplace")


def gather_inplace(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    """The root's own part is where it belongs already."""
    inputs, parts, size = moved(draw, comm)
    root, me = draw.randrange(comm.nranks()), comm.rank()
    tensor = (inputs[me] if me == root else parts[me][0].clone()).to(device)
    bagua.gather_inplace(tensor, size, root, comm)
    gathered = [parts[root][root] if rank == root else parts[rank][0] for rank in range(comm.nranks())]
    assert_same(tensor, torch.cat(gathered) if me == root else parts[me][0], "gather_inplace")


def scatter_inplace(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, parts, size = moved(draw, comm)
    root, me = draw.randrange(comm.nranks()), comm.rank()
    tensor = (inputs[me] if me == root else parts[me][0].clone()).to(device)
    bagua.scatter_inplace(tensor, size, root, comm)
    assert_same(tensor, torch.cat(parts[root]) if me == root else parts[root][me], "scatter_inplace")


def alltoall_v_inplace(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    """What two ranks exchange is of the same size both ways, but lies anywhere."""
    ranks, me = comm.nranks(), comm.rank()
    counts = [[0] * ranks for _ in range(ranks)]
    for one in range(ranks):
        for other in range(one, ranks):
            counts[one][other] = counts[other][one] = draw.choice((0, draw.randrange(20)))
    starts = []
    for rank in range(ranks):
        row, end = [0] * ranks, 0
        for other in draw.sample(range(ranks), ranks):
            end += draw.randrange(3)
            row[other] = end
            end += counts[rank][other]
        starts.append(row)
    size = max(starts[rank][other] + counts[rank][other] for rank in range(ranks) for other in range(ranks))
    inputs = contributions(draw, ranks, size, draw.choice(MOVED_DTYPES))
    expected = inputs[me].clone()
    for rank in range(ranks):
        part = inputs[rank][starts[rank][me] : starts[rank][me] + counts[rank][me]]
        expected[starts[me][rank] : starts[me][rank] + counts[me][rank]] = part
    tensor = inputs[me].to(device, copy=True)
    bagua.alltoall_v_inplace(tensor, counts[me], starts[me], comm)
    assert_same(tensor, expected, ("alltoall_v_inplace", counts, starts))


MOVING = [allgather_inplace, alltoall_inplace, gather_inplace, scatter_inplace, alltoall_v_inplace]


def allreduce_inplace(
    draw: random.Random, comm: BaguaCommunicator, device: torch.device, dtype: torch.dtype, op: bagua.ReduceOp
) -> None:
    inputs = contributions(draw, comm.nranks(), draw.randrange(MAX_SIZE), dtype)
    tensor = inputs[comm.rank()].to(device, copy=True)
    bagua.allreduce_inplace(tensor, op, comm)
    assert_reduced(tensor, inputs, op, ("allreduce_inplace", dtype, op))


def reduce_inplace(
    draw: random.Random, comm: BaguaCommunicator, device: torch.device, dtype: torch.dtype, op: bagua.ReduceOp
) -> None:
    inputs = contributions(draw, comm.nranks(), draw.randrange(MAX_SIZE), dtype)
    root = draw.randrange(comm.nranks())
    tensor = inputs[comm.rank()].to(device, copy=True)
    bagua.reduce_inplace(tensor, root, op, comm)
    if comm.rank() == root:
        assert_reduced(tensor, inputs, op, ("reduce_inplace", dtype, op))
    else:
        assert_same(tensor, inputs[comm.rank()], "reduce_inplace elsewhere")


def reduce_scatter_inplace(
    draw: random.Random, comm: BaguaCommunicator, device: torch.device, dtype: torch.dtype, op: bagua.ReduceOp
) -> None:
    size, me = draw.randrange(MAX_SIZE), comm.rank()
    inputs = contributions(draw, comm.nranks(), comm.nranks() * size, dtype)
    tensor = inputs[me].to(device, copy=True)
    bagua.reduce_scatter_inplace(tensor, op, comm)
    part = slice(me * size, (me + 1) * size)
    assert_reduced(tensor[:size], [one[part] for one in inputs], op, ("reduce_scatter_inplace", dtype, op))
    assert_same(tensor[size:], inputs[me][size:], "rest of reduce_scatter_inplace")


REDUCING = [allreduce_inplace, reduce_inplace, reduce_scatter_inplace]


def check_everything(seed: int, ranks: list[int] | None) -> int:
    """Returns the number of examples that this rank took part in."""
    device = device_for(bagua.get_rank())
    bagua.init_process_group()
    group = communication._get_default_group() if ranks is None else communication.new_group(ranks)
    if not group.is_member:
        return 0
    comm = group.get_global_communicator()
    draw = random.Random(seed)
    done = 0
    for _ in range(EXAMPLES):
        for move in MOVING:
            move(draw, comm, device)
            done += 1
    for dtype, op in REDUCTIONS:
        for reduce in REDUCING:
            reduce(draw, comm, device, dtype, op)
            done += 1
    return done


ALL_EXAMPLES = EXAMPLES * len(MOVING) + len(REDUCTIONS) * len(REDUCING)


@pytest.mark.parametrize(("world_size", "seed"), [(2, 21), (3, 22)])
def test_in_the_whole_world(world_size: int, seed: int) -> None:
    assert run_ranks(world_size, check_everything, seed, None) == [ALL_EXAMPLES] * world_size


def test_in_a_group_of_some_ranks() -> None:
    assert run_ranks(4, check_everything, 24, [0, 2, 3]) == [ALL_EXAMPLES, 0, ALL_EXAMPLES, ALL_EXAMPLES]


@on_ranks(2)
def test_shapes_are_kept(rank: int, device: torch.device) -> None:
    """Tensors of several dimensions are taken as their elements in order."""
    matrix = torch.arange(6.0, device=device).view(2, 3) + 10 * rank
    bagua.allgather_inplace(matrix)
    assert_same(matrix, torch.tensor([[0.0, 1, 2], [13, 14, 15]]), "allgather_inplace of a matrix")
    # One element counts as contiguous, whatever its stride is.
    single = torch.tensor([rank + 1, 9], device=device)[:1].as_strided((1,), (2,))
    bagua.broadcast(single, 1)
    assert_same(single, torch.tensor([2]), "broadcast of one element")
    scalar = torch.tensor(rank + 1, device=device)
    bagua.allreduce_inplace(scalar)
    assert_same(scalar, torch.tensor(3), "allreduce_inplace of a scalar")
