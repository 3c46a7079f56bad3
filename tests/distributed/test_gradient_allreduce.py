"""Gradient all-reduce gives the weights of torch's DistributedDataParallel, to the bit where sums have one order."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import each_value_once
from support.training import (
    NODES,
    OPTIMIZERS,
    WRAPPERS,
    ConvNet,
    MixedDtypes,
    Scaled,
    batches,
    begin,
    check_close,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    mlp,
    torch_ddp,
    train,
    with_algorithm,
    wrap,
)
from torch import nn

from bagua.comm_ops import all_reduce
from bagua.torch_api.data_parallel import DistributedDataParallel


def _built(model: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if model == "mlp":
        return mlp(seed)
    if model == "channels_last":
        net: nn.Module = ConvNet().to(memory_format=torch.channels_last)
        return net
    return {"conv": ConvNet, "mixed": MixedDtypes, "scaled": Scaled}[model]()


def _against_ddp(model: str, how: str, optimizer: str, exact: bool) -> None:
    rank, device = begin()
    ours = _built(model, seed=rank).to(device)
    theirs = copy.deepcopy(ours)
    our_optimizer = OPTIMIZERS[optimizer](ours.parameters())
    their_optimizer = OPTIMIZERS[optimizer](theirs.parameters())
    wrapped = wrap(how, ours, our_optimizer)
    reference = torch_ddp(theirs)
    shape = (4, 2) if model in ("mlp", "mixed", "scaled") else (2, 3, 8, 8)
    ends = (3, 10)
    data = batches(rank, ends[-1], device, shape)
    if model == "channels_last":
        data = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in data]
    for start, end in itertools.pairwise((0, *ends)):
        train(wrapped, our_optimizer, data[start:end])
        train(reference, their_optimizer, data[start:end])
        if exact:
            check_equal(ours, theirs, f"after {end} steps")
        else:
            check_close(ours, theirs, f"after {end} steps", 1e-4)
        check_ranks_equal(nn.ParameterList(ours.parameters()), f"after {end} steps")


@pytest.mark.parametrize(("how", "optimizer"), each_value_once([*WRAPPERS], [*OPTIMIZERS]))
def test_two_ranks_have_the_weights_of_torch_ddp(how: str, optimizer: str) -> None:
    run_ranks(2, _against_ddp, "mlp", how, optimizer, True, reuse=True)


@pytest.mark.skipif(os.environ.get("BAGUA_TEST_DEVICE") == "cuda", reason="on GPUs NCCL's all-reduce is always used")
@pytest.mark.parametrize(("ranks", "how"), each_value_once([2, 3], ["with_bagua", "wrapper"]))
@on_ranks()
def test_buckets_that_go_by_messages_give_the_weights_of_torch_ddp(how: str, ranks: int) -> None:
    before = all_reduce.DIRECT_BYTES, all_reduce.SLICE_BYTES
    all_reduce.DIRECT_BYTES, all_reduce.SLICE_BYTES = 0, 64
    try:
        _against_ddp("mlp", how, "momentum", ranks == 2)  # Adam would hide a factor
    finally:
        all_reduce.DIRECT_BYTES, all_reduce.SLICE_BYTES = before
    assert any(thread.name == "bagua-comm" for thread in threading.enumerate()), "which sends them"


@pytest.mark.parametrize(
    ("how", "model"), each_value_once(["wrapper", "wrapper without views"], ["mixed", "scaled", "channels_last"])
)
def test_unusual_parameters_have_the_weights_of_torch_ddp(how: str, model: str) -> None:
    run_ranks(2, _against_ddp, model, how, "momentum", True, reuse=True)


@pytest.mark.parametrize(("ranks", "how"), each_value_once([3, 4], ["with_bagua", "wrapper"]))
def test_more_ranks_agree_with_each_other_and_torch_ddp(ranks: int, how: str) -> None:
    run_ranks(ranks, _against_ddp, "mlp", how, "adam", False, reuse=True)


def test_one_rank_alone() -> None:
    run_ranks(1, _against_ddp, "conv", "wrapper", "adam", True, reuse=True)


# --- layouts ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_are_views_of_their_bucket_with_the_strides_of_the_parameter(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    net = ConvNet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with_algorithm(net, optimizer)
    for set_to_none in (True, False, True):
        train(net, optimizer, batches(rank, 2, device, (2, 3, 8, 8)), set_to_none)
        for bucket in net.bagua_buckets:
            assert bucket.check_flatten(), set_to_none
        for name, parameter in net.named_parameters():
            assert parameter.grad.stride() == parameter.stride(), name


# --- the algorithm's options -----------------------------------------------------------------------------------------


def _integers(rank: int, device: torch.device) -> tuple[nn.Linear, torch.Tensor]:
    """A layer and an input whose gradient is an integer, so that sums are exact in every order."""
    net = nn.Linear(3, 2, bias=False).to(device)
    return net, torch.arange(6.0, device=device).view(2, 3) + 10 * rank


def _sum_of_gradients(hierarchical: bool, do_flatten: bool) -> None:
    rank, device = begin()
    net, x = _integers(rank, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    algorithm = _algorithm(hierarchical=hierarchical, average=False)
    net.with_bagua([optimizer], algorithm, do_flatten=do_flatten)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).sum().backward()
        ranks = dist.get_world_size()
        expected = sum(_integers(other, device)[1].sum(dim=0) for other in range(ranks))
        assert torch.equal(net.weight.grad, expected.expand(2, 3)), net.weight.grad


def _algorithm(**options: Any) -> Any:
    from bagua.torch_api.algorithms import Algorithm

    return Algorithm.init("gradient_allreduce", **options)


@pytest.mark.parametrize("do_flatten", [True, False])
def test_the_sum_instead_of_the_mean(do_flatten: bool) -> None:
    run_ranks(3, _sum_of_gradients, False, do_flatten, reuse=True)


@pytest.mark.parametrize("nodes", NODES)
def test_the_sum_over_nodes(nodes: str) -> None:
    run_ranks(len(NODES[nodes]), _sum_of_gradients, True, True, env=NODES[nodes])


def _hierarchical(*ways: str) -> list[int]:
    """For each way to wrap a module, how often this rank takes part in a sum over nodes."""
    return [_hierarchical_calls(how) for how in ways]


def _hierarchical_calls(how: str) -> int:
    rank, device = begin()
    ours, theirs = mlp(rank, device), mlp(rank, device)
    our_optimizer, their_optimizer = (OPTIMIZERS["adamw"](net.parameters()) for net in (ours, theirs))
    wrapped = wrap(how, ours, our_optimizer, hierarchical=True)
    reference = torch_ddp(theirs)
    data = batches(rank, 8, device)
    train(wrapped, our_optimizer, data[:7])
    with counted_all_reduces() as calls:
        train(wrapped, our_optimizer, data[7:])
    train(reference, their_optimizer, data)
    # The mean over ranks, not of the nodes' means: on nodes of different sizes these differ.
    check_close(ours, theirs, f"hierarchical, {how}", 1e-4)
    check_ranks_equal(ours)
    return len(calls)


@pytest.mark.parametrize("nodes", NODES)
def test_only_one_rank_of_a_node_talks_to_other_nodes(nodes: str) -> None:
    calls = run_ranks(len(NODES[nodes]), _hierarchical, *WRAPPERS, env=NODES[nodes])
    for place, counts in zip(NODES[nodes], calls, strict=True):
        assert [count > 0 for count in counts] == [place["LOCAL_RANK"] == "0"] * len(WRAPPERS)


def test_a_hierarchy_of_one_node_is_one_all_reduce() -> None:
    assert run_ranks(3, _hierarchical, "with_bagua", reuse=True) == [[1], [1], [1]]


@pytest.mark.parametrize("make_group", ["bagua", "torch"])
@on_ranks(4)
def test_groups_train_apart(rank: int, device: torch.device, make_group: str) -> None:
    import bagua.torch_api.communication as communication

    make: Callable[[list[int]], Any] = communication.new_group if make_group == "bagua" else dist.new_group
    pairs = [make([0, 1]), make([2, 3])]
    mine = pairs[rank // 2]
    ours, theirs = mlp(rank, device), mlp(rank, device)
    our_optimizer, their_optimizer = (OPTIMIZERS["adam"](net.parameters()) for net in (ours, theirs))
    wrapped = DistributedDataParallel(ours, process_group=mine)
    reference = torch_ddp(theirs, process_group=mine if make_group == "torch" else mine.torch_group)
    data = batches(rank, 10, device)
    train(wrapped, our_optimizer, data)
    train(reference, their_optimizer, data)
    check_equal(ours, theirs)


@on_ranks(3)
def test_a_run_can_be_repeated_bit_for_bit(rank: int, device: torch.device) -> None:
    nets = []
    for _ in range(2):
        net = mlp(0, device)
        optimizer = OPTIMIZERS["adam"](net.parameters())
        train(with_algorithm(net, optimizer), optimizer, batches(rank, 20, device))
        nets.append(net)
    check_equal(*nets, "the second run")
