"""Every collective with a source and a destination, against a model in numpy: random sizes, dtypes and roots, and the
whole world as well as groups of some of its ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.collective_model import (
    MOVED_DTYPES,
    REDUCTIONS,
    assert_reduced,
    assert_same,
    contributions,
)
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks

import bagua.torch_api as bagua
from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.torch_api import communication

EXAMPLES = 25  # of each collective; every reduction of every dtype besides
MAX_SIZE = 70

# What one example needs: the generator that is seeded alike everywhere, the communicator and the device.
Example = Callable[[random.Random, BaguaCommunicator, torch.device], None]


def buffer_like(tensor: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """Filled with something that no collective leaves by chance."""
    pattern = 1 if tensor.dtype == torch.bool else 0x5A
    return torch.full((size * tensor.itemsize,), pattern, dtype=torch.uint8, device=device).view(tensor.dtype)


def moved(draw: random.Random, comm: BaguaCommunicator, parts: int = 1) -> tuple[list[torch.Tensor], int]:
    size = draw.randrange(MAX_SIZE)
    return contributions(draw, comm.nranks(), parts * size, draw.choice(MOVED_DTYPES)), size


def broadcast(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, _ = moved(draw, comm)
    source = draw.randrange(comm.nranks())
    tensor = inputs[comm.rank()].to(device)
    bagua.broadcast(tensor, source, comm)
    assert_same(tensor, inputs[source], "broadcast")


def send_and_recv(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, size = moved(draw, comm)
    source, destination = draw.sample(range(comm.nranks()), 2)
    if comm.rank() == source:
        bagua.send(inputs[source].to(device), destination, comm)
    elif comm.rank() == destination:
        tensor = buffer_like(inputs[source], size, device)
        bagua.recv(tensor, source, comm)
        assert_same(tensor, inputs[source], "recv")


def allgather(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, size = moved(draw, comm)
    target = buffer_like(inputs[0], comm.nranks() * size, device)
    bagua.allgather(inputs[comm.rank()].to(device), target, comm)
    assert_same(target, torch.cat(inputs), "allgather")


def gather(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, size = moved(draw, comm)
    destination = draw.randrange(comm.nranks())
    target = buffer_like(inputs[0], comm.nranks() * size, device)
    before = target.cpu().clone()
    bagua.gather(inputs[comm.rank()].to(device), target, destination, comm)
    assert_same(target, torch.cat(inputs) if comm.rank() == destination else before, "gather")


def scatter(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, size = moved(draw, comm, parts=comm.nranks())
    source = draw.randrange(comm.nranks())
    # What others give as the source is not looked at.
    sent = inputs[source].to(device) if comm.rank() == source else torch.empty(1)
    target = buffer_like(inputs[0], size, device)
    bagua.scatter(sent, target, source, comm)
    assert_same(target, inputs[source].view(comm.nranks(), size)[comm.rank()], "scatter")


def alltoall(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    inputs, size = moved(draw, comm, parts=comm.nranks())
    target = buffer_like(inputs[0], comm.nranks() * size, device)
    bagua.alltoall(inputs[comm.rank()].to(device), target, comm)
    expected = torch.stack(inputs).view(comm.nranks(), comm.nranks(), size)[:, comm.rank()].reshape(-1)
    assert_same(target, expected, "alltoall")


def alltoall_v(draw: random.Random, comm: BaguaCommunicator, device: torch.device) -> None:
    """The parts lie in any order with gaps between them; parts of what is sent overlap, too."""
    ranks, me = comm.nranks(), comm.rank()
    counts = [[draw.choice((0, draw.randrange(20))) for _ in range(ranks)] for _ in range(ranks)]
    is_packed = draw.random() < 0.3

    def layout(lengths: list[int]) -> tuple[list[int], int]:
        starts, end = [0] * ranks, 0
        for rank in range(ranks) if is_packed else draw.sample(range(ranks), ranks):
            end += 0 if is_packed else draw.randrange(3)
            starts[rank] = end
            end += lengths[rank]
        return starts, end

    sending = [layout(counts[rank]) for rank in range(ranks)]
    receiving = [layout([counts[source][rank] for source in range(ranks)]) for rank in range(ranks)]
    size = max(end for _, end in [*sending, *receiving])
    if not is_packed:
        sending = [
            ([draw.randrange(size - count + 1) for count in counts[rank]], size) for rank, (_, _) in enumerate(sending)
        ]
    inputs = contributions(draw, ranks, size, draw.choice(MOVED_DTYPES))
    expected = buffer_like(inputs[0], size, torch.device("cpu"))
    target = expected.to(device, copy=True)
    received = [counts[source][me] for source in range(ranks)]
    bagua.alltoall_v(inputs[me].to(device), counts[me], sending[me][0], target, received, receiving[me][0], comm)
    for source in range(ranks):
        part = slice(sending[source][0][me], sending[source][0][me] + received[source])
        start = receiving[me][0][source]
        expected.view(-1)[start : start + received[source]] = inputs[source][part]
    assert_same(target, expected, ("alltoall_v", counts, sending, receiving))


MOVING: list[Example] = [broadcast, send_and_recv, allgather, gather, scatter, alltoall, alltoall_v]


def allreduce(
    draw: random.Random, comm: BaguaCommunicator, device: torch.device, dtype: torch.dtype, op: bagua.ReduceOp
) -> None:
    """Aliased or not; the source is left alone if not."""
    inputs = contributions(draw, comm.nranks(), draw.randrange(MAX_SIZE), dtype)
    source = inputs[comm.rank()].to(device, copy=True)
    target = source if draw.random() < 0.5 else buffer_like(source, source.numel(), device)
    bagua.allreduce(source, target, op, comm)
    assert_reduced(target, inputs, op, ("allreduce", dtype, op))
    if target is not source:
        assert_same(source, inputs[comm.rank()], "source of allreduce")


def reduce(
    draw: random.Random, comm: BaguaCommunicator, device: torch.device, dtype: torch.dtype, op: bagua.ReduceOp
) -> None:
    inputs = contributions(draw, comm.nranks(), draw.randrange(MAX_SIZE), dtype)
    destination = draw.randrange(comm.nranks())
    source = inputs[comm.rank()].to(device, copy=True)
    target = buffer_like(source, source.numel(), device)
    before = target.cpu().clone()
    bagua.reduce(source, target, destination, op, comm)
    if comm.rank() == destination:
        assert_reduced(target, inputs, op, ("reduce", dtype, op))
    else:
        assert_same(target, before, "target of reduce elsewhere")
    assert_same(source, inputs[comm.rank()], "source of reduce")


def reduce_scatter(
    draw: random.Random, comm: BaguaCommunicator, device: torch.device, dtype: torch.dtype, op: bagua.ReduceOp
) -> None:
    size = draw.randrange(MAX_SIZE)
    inputs = contributions(draw, comm.nranks(), comm.nranks() * size, dtype)
    source = inputs[comm.rank()].to(device, copy=True)
    target = buffer_like(source, size, device)
    bagua.reduce_scatter(source, target, op, comm)
    part = slice(comm.rank() * size, (comm.rank() + 1) * size)
    assert_reduced(target, [one[part] for one in inputs], op, ("reduce_scatter", dtype, op))
    assert_same(source, inputs[comm.rank()], "source of reduce_scatter")


def check_everything(seed: int, ranks: list[int] | None) -> int:
    """Returns the number of examples that this rank took part in."""
    device = device_for(dist_rank := bagua.get_rank())
    bagua.init_process_group()
    comm: BaguaCommunicator | None = None
    if ranks is not None:
        comm = communication.new_group(ranks).get_global_communicator()
        if dist_rank not in ranks:
            assert comm is CommMember.NON_COMM_MEMBER
            return 0
    else:
        comm = communication._get_default_group().get_global_communicator()
    draw = random.Random(seed)
    done = 0
    for _ in range(EXAMPLES):
        for move in MOVING:
            move(draw, comm, device)
            done += 1
    for dtype, op in REDUCTIONS:
        for reduction in (allreduce, reduce, reduce_scatter):
            reduction(draw, comm, device, dtype, op)
            done += 1
    return done


ALL_EXAMPLES = EXAMPLES * len(MOVING) + 3 * len(REDUCTIONS)


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_in_the_whole_world(world_size: int, seed: int) -> None:
    assert run_ranks(world_size, check_everything, seed, None) == [ALL_EXAMPLES] * world_size


def test_in_a_group_of_some_ranks() -> None:
    assert run_ranks(4, check_everything, 4, [3, 1, 2]) == [0, *[ALL_EXAMPLES] * 3]


@on_ranks(3)
def test_floating_point_sums_equal_those_of_torch(device: torch.device) -> None:
    """Floating-point sums of any numbers, in the order in which torch's own collective makes them."""
    generator = torch.Generator().manual_seed(11 + bagua.get_rank())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for shape in ((1,), (7, 3), (2, 3, 50), (), (0, 4), (100_003,)):
            mine = torch.randn(shape, generator=generator).to(dtype).to(device)
            theirs = mine.clone()
            bagua.allreduce_inplace(mine)
            dist.all_reduce(theirs)
            assert torch.equal(mine, theirs)
            gathered = torch.empty(bagua.get_world_size(), *shape, dtype=dtype, device=device)
            pieces = list(torch.empty_like(gathered).unbind())
            bagua.allgather(mine, gathered)
            dist.all_gather(pieces, mine)
            assert torch.equal(gathered, torch.stack(pieces))


@on_ranks(3)
def test_float8_is_rounded_once(device: torch.device) -> None:
    """Float8 is added up in float32: 256 + 16 + 16 is 288 in float8, adding one by one would lose the 16 twice."""
    tensor = torch.tensor([256.0 if bagua.get_rank() == 0 else 16.0], device=device).to(torch.float8_e4m3fn)
    bagua.allreduce_inplace(tensor)
    assert [float(tensor.float().item())] == [288.0]


@on_ranks(3)
def test_source_and_destination_may_share_memory(rank: int, device: torch.device) -> None:
    """Source and destination overlap, equal or shifted."""
    ranks = 3
    whole = torch.arange(float(2 * ranks), device=device) + 100 * rank
    bagua.allgather(whole[2 * rank : 2 * rank + 2], whole)
    expected = torch.tensor([100.0 * (i // 2) + i for i in range(2 * ranks)])
    assert_same(whole, expected, "allgather")
    shifted = torch.arange(10.0, device=device)
    bagua.allreduce(shifted[:8], shifted[2:])
    assert_same(shifted, torch.cat([torch.arange(2.0), ranks * torch.arange(8.0)]), "shifted allreduce")
    chunks = torch.arange(float(ranks), device=device) + 10 * rank
    bagua.alltoall(chunks, chunks)
    assert_same(chunks, torch.arange(ranks) * 10.0 + rank, "alltoall")
    summed = torch.arange(float(ranks), device=device)
    bagua.reduce_scatter(summed, summed[-1:])
    assert_same(summed[-1:], torch.tensor([float(ranks * rank)]), "reduce_scatter")


@on_ranks(2)
def test_operations_may_be_numbers_or_those_of_torch(rank: int, device: torch.device) -> None:
    """By the numbers of the original interface, and as torch calls them."""
    results = []
    for op in (3, 10, dist.ReduceOp.MIN, dist.ReduceOp(dist.ReduceOp.PRODUCT)):
        tensor = torch.tensor([rank + 2.0], device=device)
        bagua.allreduce_inplace(tensor, op)  # type: ignore[arg-type]
        results.append(tensor.item())
    assert results == [3.0, 2.5, 2.0, 6.0]


@on_ranks(2)
def test_parameters_can_be_communicated(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    bagua.allreduce_inplace(parameter)
    bagua.broadcast(parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.tolist() == [2.0] * 3


def wait_for_each_other() -> list[float]:
    """When this rank has come to the barrier, and when it has left it."""
    bagua.init_process_group()
    bagua.barrier()
    time.sleep(0.5 * bagua.get_rank())
    come = time.monotonic()
    with torch.device("meta"):
        bagua.barrier()
    return [come, time.monotonic()]


def test_a_barrier_waits_whatever_the_default_device_is() -> None:
    times = run_ranks(2, wait_for_each_other)
    assert min(left for _, left in times) >= max(come for come, _ in times)
