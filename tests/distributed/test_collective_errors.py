"""Wrong arguments are errors before anything is sent, on the rank that gives them; others go on undisturbed. And what
an abort does."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_until
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks
from support.training import begin

import bagua.torch_api as bagua
from bagua.collectives import byte_transport, collectives
from bagua.collectives.process_group import BaguaProcessGroup, duplicate_group
from bagua.job.job_thread import current_job_thread
from bagua.job.torch_internals import default_store
from bagua.torch_api import communication

F = torch.zeros
Call = Callable[[torch.device], None]

# One group of two ranks. name -> (call, error, what the message names). `d` is the device.
WRONG: dict[str, tuple[Call, type[Exception], str]] = {
    "send to itself": (lambda d: bagua.send(F(1, device=d), bagua.get_rank()), ValueError, "is this process itself"),
    "recv from itself": (lambda d: bagua.recv(F(1, device=d), bagua.get_rank()), ValueError, "is this process itself"),
    "rank too high": (lambda d: bagua.broadcast(F(1, device=d), 2), ValueError, "src=2 must be between 0 and 1"),
    "rank negative": (lambda d: bagua.gather(F(1, device=d), F(2, device=d), -1), ValueError, "dst=-1"),
    "rank no integer": (lambda d: bagua.send(F(1, device=d), 0.5), TypeError, "dst is 0.5"),  # type: ignore[arg-type]
    "no tensor": (lambda _: bagua.broadcast([1.0]), TypeError, "list, must be a torch.Tensor"),  # type: ignore[arg-type]
    "no communicator": (lambda _: bagua.barrier(dist.group.WORLD), TypeError, "comm is"),  # type: ignore[arg-type]
    "not contiguous": (lambda d: bagua.allreduce_inplace(F(3, 2, device=d).t()), ValueError, r"tensor.contiguous\(\)"),
    "expanded": (lambda d: bagua.broadcast(F(1, device=d).expand(4)), ValueError, "not contiguous"),
    "conjugated": (lambda d: bagua.broadcast(F(2, dtype=torch.cfloat, device=d).conj()), ValueError, "resolve_conj"),
    "sparse": (lambda d: bagua.broadcast(torch.eye(2, device=d).to_sparse()), TypeError, "dense"),
    "device without backend": (lambda _: bagua.broadcast(F(2, device="meta")), ValueError, "is on meta"),
    "two devices": (lambda d: bagua.allreduce(F(2, device=d), F(2, device="meta")), ValueError, "meta"),
    "two dtypes": (lambda d: bagua.allreduce(F(2, device=d), F(2, device=d).half()), TypeError, "float16"),
    "allreduce sizes": (lambda d: bagua.allreduce(F(2, device=d), F(3, device=d)), ValueError, "recv_tensor has 3"),
    "reduce sizes": (lambda d: bagua.reduce(F(2, device=d), F(3, device=d), 0), ValueError, "must have 2"),
    "allgather sizes": (lambda d: bagua.allgather(F(2, device=d), F(3, device=d)), ValueError, "must have 4"),
    "alltoall sizes": (lambda d: bagua.alltoall(F(2, device=d), F(4, device=d)), ValueError, "must have 2"),
    "alltoall parts": (lambda d: bagua.alltoall(F(3, device=d), F(3, device=d)), ValueError, "multiple of the 2"),
    "reduce_scatter sizes": (lambda d: bagua.reduce_scatter(F(3, device=d), F(1, device=d)), ValueError, "must have 2"),
    "allgather_inplace": (lambda d: bagua.allgather_inplace(F(3, device=d)), ValueError, "multiple of the 2"),
    "reduce_scatter_inplace": (lambda d: bagua.reduce_scatter_inplace(F(3, device=d)), ValueError, "multiple"),
    "gather on the root": (
        lambda d: bagua.gather(F(2, device=d), F(3, device=d), bagua.get_rank()),
        ValueError,
        "must have 4",
    ),
    "scatter on the root": (
        lambda d: bagua.scatter(F(3, device=d), F(2, device=d), bagua.get_rank()),
        ValueError,
        "send_tensor has 3",
    ),
    "gather_inplace on the root": (
        lambda d: bagua.gather_inplace(F(2, device=d), 2, bagua.get_rank()),
        ValueError,
        "tensor has 2 elements, must have 4",
    ),
    "scatter_inplace elsewhere": (
        lambda d: bagua.scatter_inplace(F(4, device=d), 2, 1 - bagua.get_rank()),
        ValueError,
        "tensor has 4 elements, must have 2",
    ),
    "unknown op": (lambda d: bagua.allreduce_inplace(F(2, device=d), 5), ValueError, r"SUM \(0\)"),  # type: ignore[arg-type]
    "premultiplied sum": (
        lambda d: bagua.allreduce_inplace(F(2, device=d), dist.ReduceOp.PREMUL_SUM),  # type: ignore[arg-type]
        ValueError,
        "op is",
    ),
    "bits of floats": (
        lambda d: bagua.allreduce_inplace(F(2, device=d), bagua.ReduceOp.BOR),
        TypeError,
        "BOR of torch.float32 is not defined",
    ),
    "average of bool": (
        lambda d: bagua.allreduce_inplace(F(2, device=d).bool(), bagua.ReduceOp.AVG),
        TypeError,
        "AVG of torch.bool",
    ),
    "order of complex": (
        lambda d: bagua.allreduce_inplace(F(2, device=d).cfloat(), bagua.ReduceOp.MAX),
        TypeError,
        "there is SUM, PRODUCT, AVG",
    ),
    "sum of uint16": (
        lambda d: bagua.allreduce_inplace(torch.zeros(2, dtype=torch.uint16, device=d)),
        TypeError,
        "no reduction",
    ),
    "number of counts": (
        lambda d: bagua.alltoall_v(F(2, device=d), [2], [0], F(2, device=d), [1, 1], [0, 1]),
        ValueError,
        "one for each of the 2 ranks",
    ),
    "segment outside": (
        lambda d: bagua.alltoall_v(F(2, device=d), [1, 2], [0, 1], F(3, device=d), [1, 2], [0, 1]),
        ValueError,
        r"send_counts\[1\]=2 at send_displs\[1\]=1 is outside the buffer of 2",
    ),
    "negative count": (
        lambda d: bagua.alltoall_v_inplace(F(2, device=d), [1, -1], [0, 1]),
        ValueError,
        r"counts\[1\]=-1",
    ),
    "received twice": (
        lambda d: bagua.alltoall_v(F(4, device=d), [2, 2], [0, 2], F(4, device=d), [2, 2], [0, 1]),
        ValueError,
        "ranks 0 and 1 send would be received into the same elements",
    ),
    "own part of two sizes": (
        lambda d: bagua.alltoall_v(F(4, device=d), [2, 2], [0, 2], F(4, device=d), [1, 1], [0, 1]),
        ValueError,
        "sends to itself",
    ),
    "coalesced dtype": (
        lambda d: communication.allreduce_coalesced_inplace([F(1, device=d), F(1, device=d, dtype=torch.uint16)]),
        TypeError,
        "uint16",
    ),
    "coalesced device": (
        lambda d: communication.broadcast_coalesced([F(1, device=d), F(1, device="meta")]),
        ValueError,
        r"tensors\[1\] is on meta",
    ),
    "coalesced what": (
        lambda d: communication.allreduce_coalesced_inplace([F(1, device=d), None]),  # type: ignore[list-item]
        TypeError,
        r"tensors\[1\] is NoneType",
    ),
    "source of an object": (lambda _: communication.broadcast_object(1, 2), ValueError, "src=2"),
}


@pytest.mark.parametrize("guilty", [None, 0, 1])
@on_ranks(2)
def test_wrong_arguments_are_errors_before_anything_is_sent(
    rank: int, device: torch.device, guilty: int | None
) -> None:
    """`guilty` alone, or None for all. If anything were sent, the sum at the end would meet it."""
    for name, (call, error, message) in WRONG.items():
        if guilty in (rank, None):
            try:
                with pytest.raises(error, match=message):
                    call(device)
            except BaseException as failure:
                raise AssertionError(f"case {name!r}") from failure
        tensor = torch.ones(1, device=device)
        bagua.allreduce_inplace(tensor)
        assert tensor.item() == 2, name


def do_nothing_outside() -> str:
    """A rank that is no member may call any collective, even with arguments that would be wrong."""
    bagua.init_process_group()
    comm = communication.new_group([1]).get_global_communicator()
    if bagua.get_rank() == 1:
        return "member"
    junk = torch.ones(3)
    bagua.send(junk, 7, comm)
    bagua.recv(junk, 7, comm)
    bagua.broadcast(junk, 7, comm)
    bagua.reduce(junk, junk[:1], 7, comm=comm)
    bagua.allreduce(junk, junk[:1], comm=comm)
    bagua.allgather(junk, junk, comm)
    bagua.gather(junk, junk, 7, comm)
    bagua.scatter(junk, junk, 7, comm)
    bagua.reduce_scatter(junk, junk, comm=comm)
    bagua.alltoall(junk, junk[:1], comm)
    bagua.alltoall_v(junk, [], [], junk, [], [], comm)
    bagua.reduce_inplace(junk, 7, comm=comm)
    bagua.allreduce_inplace(junk, comm=comm)
    bagua.allgather_inplace(junk, comm)
    bagua.gather_inplace(junk, 7, 7, comm)
    bagua.scatter_inplace(junk, 7, 7, comm)
    bagua.reduce_scatter_inplace(junk, comm=comm)
    bagua.alltoall_inplace(junk, comm)
    bagua.alltoall_v_inplace(junk, [], [], comm)
    bagua.barrier(comm)
    communication.broadcast_coalesced([junk], 7, comm)
    communication.allreduce_coalesced_inplace([junk], comm=comm)
    assert communication.broadcast_object("mine", 7, comm) == "mine"
    assert junk.tolist() == [1.0] * 3
    return "not a member"


def test_collectives_do_nothing_on_ranks_outside_the_group() -> None:
    assert run_ranks(2, do_nothing_outside) == ["not a member", "member"]


@on_ranks(1, joined=False)
def test_without_a_default_group_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first"):
        bagua.allreduce_inplace(torch.ones(1))


def abort_what_waits() -> list[str]:
    """Rank 1 never joins; rank 0 waits in a thread until it gives up."""
    device_for(bagua.get_rank())
    bagua.init_process_group()
    comm = communication.new_group([0, 1]).get_global_communicator()
    bagua.allreduce_inplace(torch.ones(1), comm=comm)
    messages: list[str] = []
    if bagua.get_rank() == 0:

        def wait_for_ever() -> None:
            for call in (lambda: bagua.recv(torch.ones(1), 1, comm), lambda: collectives.barrier(comm)):
                try:
                    call()
                except RuntimeError as error:
                    messages.append(str(error))

        thread = threading.Thread(target=wait_for_ever)
        thread.start()
        wait_until(lambda: bool(current_job_thread().waits), "the reception")
        assert not comm.check_abort()
        comm.abort()
        assert comm.check_abort()
        thread.join(60)
        assert not thread.is_alive()
        assert current_job_thread().roll_call._joined == 0, "an abort explains by itself why nothing works"
    bagua.barrier()  # the default group is another one, and works
    return messages


def test_abort_ends_what_waits_and_what_follows() -> None:
    messages, none = run_ranks(2, abort_what_waits)
    assert none == []
    assert len(messages) == 2
    assert all("was aborted" in message for message in messages), messages


def abort_what_buckets_wait_for() -> list[str]:
    """Rank 1 leaves out its backward passes. Rank 0 waits for a sum that is built from messages, on the thread of the
    group, then for an all-reduce, then for an exchange in a group of the same ranks."""
    rank, _ = begin()
    messages: list[str] = []
    for number, width in enumerate((512, 4)):
        group = communication.new_group([0, 1])
        net = torch.nn.Linear(width, width, bias=False)
        algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce")
        model = net.with_bagua([torch.optim.SGD(net.parameters(), lr=1.0)], algorithm, process_group=group)
        duplicate = duplicate_group(group)

        def train(model: Any = model, width: int = width) -> None:
            model(torch.ones(1, width)).sum().backward()

        def exchange(group: BaguaProcessGroup = duplicate) -> None:
            comm = group.get_global_communicator()
            byte_transport.exchange(comm, comm.peers(), [torch.ones(1)], [torch.ones(1)])

        if rank == 0:
            for call in (train, exchange):
                thread = threading.Thread(target=lambda call=call: messages.append(_error_of(call)))
                thread.start()
                if call is train:
                    wait_until(lambda: bool(current_job_thread().waits), "the collective")
                    group.get_global_communicator().abort()
                thread.join(60)
                assert not thread.is_alive()
            assert group.get_background_communicator().check_abort()
            messages.append(_error_of(group.get_intra_node_communicator))
            messages.append(_error_of(lambda group=group: duplicate_group(group)))
        default_store().set(f"done {number} {rank}", "")
        default_store().wait([f"done {number} 0"], datetime.timedelta(seconds=60))
    bagua.barrier()
    return messages


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "it returned"


def test_abort_reaches_what_buckets_wait_for() -> None:
    messages, none = run_ranks(2, abort_what_buckets_wait_for)
    assert none == []
    assert len(messages) == 8
    assert all("was aborted" in message for message in messages), messages
