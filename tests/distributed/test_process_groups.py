"""Process groups: members, communicators between and within nodes, torch groups that are adopted, and their end.

Nodes are emulated by what a launcher would say in the environment.
"""

from __future__ import annotations

import datetime
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks
from support.training import launched_on

import bagua.torch_api as bagua
from bagua.collectives import process_group
from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.process_group import to_bagua_process_group
from bagua.job.torch_internals import default_store
from bagua.torch_api import communication
from bagua.torch_api.algorithms import gradient_allreduce


def total(comm: BaguaCommunicator, device: torch.device) -> float | None:
    """The sum of 10**rank over the members, which says who they are. None outside."""
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    tensor = torch.tensor([10.0 ** dist.get_rank()], device=device)
    dist.all_reduce(tensor, group=comm.torch_group)
    assert comm.torch_group.size() == comm.nranks() == len(comm.ranks)
    assert comm.torch_group.rank() == comm.rank() == comm.ranks.index(dist.get_rank())
    return tensor.item()


def sums(ranks: list[list[int] | None]) -> list[tuple[Any, ...]]:
    """Of each group: over its global, intra-node and inter-node communicator."""
    device = device_for(bagua.get_rank())
    bagua.init_process_group()
    result = []
    for members in ranks:
        group = communication.new_group(members)
        intra, inter = group.get_intra_node_communicator(), group.get_inter_node_communicator()
        assert group.get_intra_node_communicator() is intra
        assert group.get_inter_node_communicator() is inter
        assert (intra is CommMember.NON_COMM_MEMBER) == (not group.is_member)
        # Whoever leads its node takes part between the nodes.
        assert (inter is CommMember.NON_COMM_MEMBER) == (not group.is_member or intra.rank() != 0)
        result.append((total(group.get_global_communicator(), device), total(intra, device), total(inter, device)))
    return result


@pytest.mark.parametrize(
    ("sizes", "members", "expected"),
    [
        ((2, 2), None, [(1111, 11, 101), (1111, 11, None), (1111, 1100, 101), (1111, 1100, None)]),
        ((1, 3), None, [(1111, 1, 11), (1111, 1110, 11), (1111, 1110, None), (1111, 1110, None)]),
        ((4,), None, [(1111, 1111, 1), *[(1111, 1111, None)] * 3]),
        # Rank 0, the first of its node, is not in the group: rank 1 leads the node there.
        ((2, 2), [3, 1, 2], [(None, None, None), (1110, 10, 110), (1110, 1100, 110), (1110, 1100, None)]),
        ((3, 1), [1, 2], [(None, None, None), (110, 110, 10), (110, 110, None), (None, None, None)]),
    ],
)
def test_communicators_of_nodes(sizes: tuple[int, ...], members: list[int] | None, expected: list[Any]) -> None:
    assert run_ranks(4, sums, [members], env=launched_on(*sizes)) == [[one] for one in expected]


def test_several_groups_with_different_members() -> None:
    """After them the processes have different numbers of torch groups, and still meet."""
    members: list[list[int] | None] = [[0, 1, 3], [1, 2], None, [0, 2, 3]]
    results = run_ranks(4, sums, members, env=launched_on(2, 2))
    assert results[0] == [(1011, 11, 1001), (None, None, None), (1111, 11, 101), (1101, 1, 101)]
    assert results[1] == [(1011, 11, None), (110, 10, 110), (1111, 11, None), (None, None, None)]
    assert results[2] == [(None, None, None), (110, 100, 110), (1111, 1100, 101), (1101, 1100, 101)]
    assert results[3] == [(1011, 1000, 1001), (None, None, None), (1111, 1100, None), (1101, 1100, None)]


@on_ranks(2)
def test_ranks_that_are_no_integers_are_refused() -> None:
    for ranks, named in (([0.5], r"\[0\.5\]"), ("01", "'01'"), (1, "1"), ([None], r"\[None\]")):
        with pytest.raises(TypeError, match=rf"ranks is {named}, must be a list of integers"):
            communication.new_group(ranks)  # type: ignore[arg-type]
    assert communication.new_group(torch.tensor([1, 0])).ranks == [0, 1]  # type: ignore[arg-type]


@on_ranks(3)
def test_members_with_different_numbers_of_torch_groups(rank: int, device: torch.device) -> None:
    """Rank 0 has torch groups that the others lack, made by itself; torch alone would wait indefinitely then."""
    if rank == 0:
        for _ in range(3):
            dist.new_group([0], use_local_synchronization=True)
    before = dist.get_pg_count()
    comm = communication._get_default_group().get_intra_node_communicator()
    assert dist.get_pg_count() == before
    assert total(comm, device) == 111
    # Later ones name the groups of all ranks by a count that those of rank 0 have raised: no further one can be made.
    if torch.__version__ < (2, 14):
        assert total(communication.new_group().get_intra_node_communicator(), device) == 111


@on_ranks(2)
def test_the_same_members_again_after_a_group_was_destroyed(device: torch.device) -> None:
    """A group of the same members after one that was destroyed must not meet what that left in the store."""
    results = []
    for _ in range(3):
        group = communication.new_group()
        comm = group.get_intra_node_communicator()
        results.append(total(comm, device))
        bagua.barrier()
        dist.destroy_process_group(comm.torch_group)
        dist.destroy_process_group(group.torch_group)
    assert results == [11, 11, 11]


@on_ranks(4, env=launched_on(2, 2))
def test_a_communicator_needs_nobody_but_its_members(rank: int, device: torch.device) -> None:
    """Only those that are in a communicator between nodes ask for it, at a time of their own."""
    result = None
    if rank in (0, 2):
        result = total(communication._get_default_group().get_inter_node_communicator(), device)
    bagua.barrier()
    assert result == [101, None, 101, None][rank]


def contradict() -> str:
    bagua.init_process_group()
    with pytest.raises(ValueError, match="share a node") as caught:
        communication._get_default_group().get_intra_node_communicator()
    return str(caught.value)


def test_contradicting_launcher_variables_are_named() -> None:
    env = [{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}] * 2
    for message in run_ranks(2, contradict, env=env):
        assert "rank 1: node 0, LOCAL_RANK 0, LOCAL_WORLD_SIZE 2" in message


@on_ranks(2, joined=False)
def test_a_member_that_bagua_has_not_heard_from_is_named() -> None:
    """Rank 1 takes part in the torch group, but Bagua has never heard from it."""
    dist.init_process_group("gloo")
    if bagua.get_rank() == 0:
        # Real time, of this wait alone: that nobody says it has no event. A slow machine tells it later.
        default_store().set_timeout(datetime.timedelta(seconds=2))
        group = to_bagua_process_group()
        with pytest.raises(RuntimeError, match="rank 1 has not said on which node it runs; it has to call"):
            group.get_intra_node_communicator()


def describe_groups() -> list[Any]:
    device_for(bagua.get_rank())
    bagua.init_process_group()
    default = communication._get_default_group()
    group = communication.new_group([2, 0])
    assert group.ranks == [0, 2]
    assert group.size == 2
    assert default.size == 3
    assert group.group_name != default.group_name
    assert communication._rank_not_in_group(group) is (not group.is_member)
    assert communication._rank_not_in_comm(group.get_global_communicator()) is (not group.is_member)
    assert communication.get_communicator(group.group_name, "global") is group.get_global_communicator()
    with pytest.raises(ValueError, match="no Bagua process group named 'x'"):
        communication.get_communicator("x", "global")
    with pytest.raises(ValueError, match="one of global, inter, intra"):
        communication.get_communicator(group.group_name, "node")
    assert (group.stream is None) == (not torch.cuda.is_available())
    assert group.timeout.total_seconds() == 1800
    if not group.is_member:
        assert group.torch_group is None
        sentinel = group.get_global_communicator()
        with pytest.raises(AttributeError, match="no member of the communicator"):
            sentinel.nranks()
        return [repr(sentinel)]
    assert group.torch_group is not None
    return [repr(group.get_global_communicator()).replace(f"group {group.group_name},", "group N,")]


def test_attributes() -> None:
    assert run_ranks(3, describe_groups) == [
        ["BaguaCommunicator(global of group N, rank 0 of (0, 2))"],
        ["CommMember.NON_COMM_MEMBER"],
        ["BaguaCommunicator(global of group N, rank 1 of (0, 2))"],
    ]


@on_ranks(2, joined=False)
def test_wrong_arguments_and_a_torch_group_of_others() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        communication.new_group([0])
    with pytest.raises(RuntimeError, match="init_process_group"):
        to_bagua_process_group()
    bagua.init_process_group()
    for ranks, message in [([0, 2], "between 0 and 1"), ([-1], "between"), ([1, 1], "more than once")]:
        with pytest.raises(ValueError, match=message):
            communication.new_group(ranks)
    with pytest.raises(TypeError, match="Bagua or torch process group"):
        to_bagua_process_group("world")  # type: ignore[arg-type]
    group = dist.new_group([0])
    if bagua.get_rank() == 0:
        assert communication.from_torch_group(group).ranks == [0]
    else:
        assert communication._rank_not_in_group(group)
        outside = communication.from_torch_group(group)
        assert (outside.ranks, outside.is_member) == ([], False)
        assert communication._rank_not_in_group(outside)
        assert outside.get_global_communicator() is CommMember.NON_COMM_MEMBER
    for wrong in (None, 0, "world", bagua):
        with pytest.raises(TypeError, match=r"must be a torch\.distributed\.ProcessGroup"):
            communication.from_torch_group(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch\.distributed does not know this ProcessGroup of 2 ranks"):
        communication.from_torch_group(dist.ProcessGroup(0, 2))
    bagua.barrier()


@on_ranks(2)
def test_a_group_may_have_no_members(device: torch.device) -> None:
    empty, later = communication.new_group([]), communication.new_group([0, 1])
    assert (empty.ranks, empty.size, empty.is_member, empty.torch_group) == ([], 0, False, None)
    assert communication._rank_not_in_group(empty)
    for comm in (
        empty.get_global_communicator(),
        empty.get_intra_node_communicator(),
        empty.get_inter_node_communicator(),
        empty.get_background_communicator(),
    ):
        assert comm is CommMember.NON_COMM_MEMBER
        tensor = torch.ones(2, device=device)
        bagua.allreduce_inplace(tensor, comm=comm)
        assert tensor.tolist() == [1, 1]
    assert total(later.get_global_communicator(), device) == 11
    with pytest.raises(ValueError, match="member"):
        torch.nn.Linear(1, 1).to(device).with_bagua(
            [], gradient_allreduce.GradientAllReduceAlgorithm(), process_group=empty
        )


@on_ranks(3, joined=False)
def test_torch_groups_are_adopted_by_their_members_alone() -> None:
    """Without Bagua's own initialization."""
    device = device_for(rank := bagua.get_rank())
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    world = dist.group.WORLD
    assert world is not None
    default = to_bagua_process_group(None)
    assert default is to_bagua_process_group(world)
    assert default is to_bagua_process_group(default)
    assert not communication.is_initialized()
    assert default.ranks == [0, 1, 2]
    assert total(default.get_global_communicator(), device) == 111

    torch_group = dist.new_group([0, 2])
    if rank == 1:
        return
    patched = torch_group.bagua_patch()
    assert patched is torch_group
    group = torch_group.bagua_pg
    assert group is torch_group.bagua_patch().bagua_pg
    assert group is communication.from_torch_group(torch_group)
    assert group.ranks == [0, 2]
    assert group.torch_group is torch_group
    assert torch_group.bagua_get_global_communicator() is group.get_global_communicator()
    assert torch_group.bagua_get_intra_node_communicator() is group.get_intra_node_communicator()
    assert torch_group.bagua_get_inter_node_communicator() is group.get_inter_node_communicator()
    assert total(torch_group.bagua_get_global_communicator(), device) == 101
    assert total(torch_group.bagua_get_intra_node_communicator(), device) == 101
    tensor = torch.tensor([rank], device=device)
    bagua.broadcast(tensor, 1, group.get_global_communicator())
    assert tensor.item() == 2


@on_ranks(2, joined=False)
def test_the_map_of_adopted_groups_empties() -> None:
    device = device_for(bagua.get_rank())
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    known = communication._torch_to_bagua_pg_map
    assert len(known) == 0
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    bagua_groups = [group.bagua_pg for group in groups]
    comm = groups[1].bagua_get_intra_node_communicator()
    assert len(known) == 3

    dist.destroy_process_group(groups[1])
    del groups[1]
    gc.collect()
    assert len(known) == 2
    with pytest.raises(RuntimeError, match="has been destroyed"):
        bagua.barrier(bagua_groups[1].get_global_communicator())
    assert total(comm, device) == 11  # a group of its own

    bagua.barrier(bagua_groups[0].get_global_communicator())
    dist.destroy_process_group()
    groups.clear()
    gc.collect()
    assert len(known) == 0


@on_ranks(2, fresh=True)
def test_only_what_is_asked_for_is_created() -> None:
    """Groups that nobody asks for nodes make no torch groups."""
    communication._get_default_group().get_global_communicator()
    assert len(process_group.torch_internals.distributed_c10d._world.pg_names) == 1


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="needs ProcessGroup.reconfigure, of torch 2.14")
@on_ranks(2, joined=False)
def test_a_group_that_torch_gives_other_ranks_is_refused() -> None:
    """One that has the same number of them is not."""
    dist.init_process_group("gloo", enable_reconfigure=True)
    rank, store = dist.get_rank(), default_store()

    def reconfigure(uuid: int, ranks: list[int]) -> None:
        store.set(f"{uuid} {rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{uuid} {one}").decode() for one in ranks]
        dist._reconfigure(uuid, handles).wait()

    reconfigure(1, [0, 1])
    bagua.init_process_group()
    for uuid in (2, 3):
        tensor = torch.full((4,), rank + 1.0)
        bagua.allreduce_inplace(tensor, op=bagua.ReduceOp.SUM)
        assert tensor.tolist() == [3.0] * 4
        reconfigure(uuid, [0, 1])
    store.set(f"ended {rank}", b"")
    store.wait(["ended 0", "ended 1"])
    reconfigure(4 + rank, [rank])
    with pytest.raises(RuntimeError, match=r"has 1 ranks now. It had 2 when Bagua took it"):
        bagua.allreduce_inplace(torch.zeros(4))
