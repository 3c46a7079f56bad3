"""Ranks that run out of inputs before others, against torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import (
    Branches,
    NormNet,
    batches,
    begin,
    check_close,
    check_equal,
    check_ranks_equal,
    loss_of,
    message_of,
    mlp,
    torch_ddp,
    train,
)
from torch import nn
from torch.distributed.algorithms.join import Join

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

# Batches of each rank.
COUNTS = {"more by rank": [1, 3], "fewer by rank": [4, 1], "none": [0, 2], "alike": [3, 3]}


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def _pair(make: Callable[[], nn.Module], rank: int, device: torch.device, **options: Any) -> list[tuple[Any, Any]]:
    """Ours and torch's, each with its optimizer."""
    torch.manual_seed(rank)
    ours = make().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = _sgd(ours), _sgd(theirs)
    wrapped = DistributedDataParallel(ours, optimizers=[optimizer], **options)
    return [(wrapped, optimizer), (torch_ddp(theirs, **options), other)]


def _uneven(make: Callable[[], nn.Module], counts: list[int]) -> None:
    rank, device = begin()
    for by_initial_size in (True, False):
        _joined(rank, device, make, counts, by_initial_size)


def _joined(
    rank: int, device: torch.device, make: Callable[[], nn.Module], counts: list[int], by_initial_size: bool
) -> None:
    # A gradient that is no view of its bucket is rescaled, too.
    pair = _pair(make, rank, device, gradient_as_bucket_view=by_initial_size)
    exact = by_initial_size and len(counts) == 2
    check = check_equal if exact else check_close

    def join(seed: int) -> None:
        for model, optimizer in pair:
            with model.join(divide_by_initial_world_size=by_initial_size):
                train(model, optimizer, batches(rank, counts[rank], device, seed=seed))
        check_ranks_equal(pair[0][0])

    join(seed=0)
    check(pair[0][0], pair[1][0], "after join")
    for model, optimizer in pair:
        train(model, optimizer, batches(rank, 2, device, seed=1))
    # From here on without buffers: torch goes on taking them from the last rank, we take them from the first again.
    check(*(nn.ParameterList(model.parameters()) for model, _ in pair), "after plain training")
    join(seed=2)
    check(*(nn.ParameterList(model.parameters()) for model, _ in pair), "after another join")


@pytest.mark.parametrize(
    ("make", "counts"), rest_is_deep([*itertools.product((NormNet, mlp), COUNTS.values())], *range(5))
)
def test_two_ranks_end_where_torch_ddp_does(make: Callable[[], nn.Module], counts: list[int]) -> None:
    """With buffers, and without any."""
    run_ranks(2, _uneven, make, counts, reuse=True)


def test_four_ranks_end_where_torch_ddp_does() -> None:
    run_ranks(4, _uneven, NormNet, [2, 5, 1, 3], reuse=True)


@pytest.mark.parametrize("counts", [[1, 4], [3, 2]])
@on_ranks(2)
def test_branches_by_rank(rank: int, device: torch.device, counts: list[int]) -> None:
    pair = _pair(Branches, rank, device, find_unused_parameters=True)
    never = copy.deepcopy(pair[0][0].module.never)
    for model, optimizer in pair:
        with model.join():
            for number, batch in enumerate(batches(rank, counts[rank], device)):
                optimizer.zero_grad()
                loss_of(model, batch, take=("left", "right")[(number + rank) % 2 :][:1]).backward()
                optimizer.step()
    check_equal(pair[0][0], pair[1][0])
    dist.broadcast(never.weight.data, 0)
    assert torch.equal(pair[0][0].module.never.weight, never.weight)


class _TwoHalves(nn.Module):
    """Two results, each of parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 4), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


@on_ranks(2)
def test_a_bucket_is_rescaled_only_in_the_pass_that_sends_it(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    net = _TwoHalves().to(device)
    alone = copy.deepcopy(net)
    model = DistributedDataParallel(net, optimizers=[_sgd(net)], bucket_cap_mb=1e-5)
    assert len(model.bagua_buckets) >= 2
    with model.join(divide_by_initial_world_size=False):
        for inputs, _ in batches(rank, [1, 3][rank], device):
            for module in (model, alone):
                module.zero_grad()
                for half in reversed(module(inputs)):  # in launch order
                    half.square().mean().backward()
    if rank == 1:  # the only one in the last two steps, so that the mean is its own gradient
        for (name, parameter), other in zip(net.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_sums_are_not_divided(rank: int, device: torch.device) -> None:
    for name in ("gradient_allreduce", "bytegrad"):
        for by_initial_size in (True, False):
            net = nn.Linear(1, 1, bias=False).to(device)
            model = DistributedDataParallel(net, algorithm=Algorithm.init(name, average=False))
            sums = []
            with model.join(divide_by_initial_world_size=by_initial_size):
                for _ in range([1, 3][rank]):
                    model.zero_grad()
                    model(torch.ones(1, 1, device=device)).sum().backward()
                    assert net.weight.grad is not None
                    sums.append(round(net.weight.grad.item(), 3))
            assert sums == [2.0, 1.0, 1.0][: len(sums)], (name, by_initial_size, sums)


@pytest.mark.parametrize("counts", [[2, 6], [6, 4]])
@on_ranks(2)
def test_accumulation_within(rank: int, device: torch.device, counts: list[int]) -> None:
    pair = _pair(NormNet, rank, device)
    for model, optimizer in pair:
        with model.join():
            for number, batch in enumerate(batches(rank, counts[rank], device)):
                quiet = number % 2 == 0
                with model.no_sync() if quiet else nullcontext():
                    loss_of(model, batch).backward()
                if not quiet:
                    optimizer.step()
                    optimizer.zero_grad()
    check_equal(pair[0][0], pair[1][0])


@pytest.mark.parametrize("counts", [[2, 4], [3, 1]])
@on_ranks(2)
def test_evaluation_within(rank: int, device: torch.device, counts: list[int]) -> None:
    """Forward passes without gradients in between, which torch's DDP has no answer for."""
    (ours, optimizer), (reference, other) = _pair(NormNet, rank, device)
    data = batches(rank, counts[rank], device)
    with reference.join():
        train(reference, other, data)
    with ours.join():
        for batch in data:
            train(ours, optimizer, [batch])
            ours.eval()
            with torch.no_grad():
                ours(batch[0])
            ours.train()
    check_equal(*(nn.ParameterList(model.parameters()) for model in (ours, reference)))


@on_ranks(2)
def test_after_the_context_a_rank_may_go_forward_alone(rank: int, device: torch.device) -> None:
    model = DistributedDataParallel(mlp(rank, device))
    optimizer = _sgd(model)
    with model.join():
        train(model, optimizer, batches(rank, 1 + rank, device))
    if rank == 0:
        with torch.no_grad():
            model(batches(rank, 1, device)[0][0])
    # Rank 1 would meet rank 0's collective here.
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert int(total.item()) == 2


@pytest.mark.parametrize("counts", [[1, 3], [3, 2]])
@on_ranks(2)
def test_an_optimizer_that_joins_as_well(rank: int, device: torch.device, counts: list[int]) -> None:
    """With an optimizer of which each rank has a part, so that ranks without inputs step, too. With torch's DDP
    they do so with an old gradient; it has to be as if one rank had the whole optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it uses itself
        from torch.distributed.optim import ZeroRedundancyOptimizer

    (ours, _), (reference, _) = _pair(mlp, rank, device)
    data = batches(rank, counts[rank], device)
    sharded: Any = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.01)
    with Join([ours, sharded]):
        train(ours, sharded, data)
    with reference.join():
        train(reference, torch.optim.Adam(reference.parameters(), lr=0.01), data)
    check_equal(ours, reference)


@pytest.mark.parametrize("drops", [False, True])
@on_ranks(2)
def test_gradients_are_the_same_afterwards(rank: int, device: torch.device, drops: bool) -> None:
    """After the last batch all ranks have its gradient, with inputs or without; or none has, as the optimizer of the
    last rank has dropped it. The default device is the user's."""
    model = DistributedDataParallel(mlp(rank, device))
    optimizer = _sgd(model)
    data = batches(rank, 1 + 2 * rank, device)
    with torch.device("meta"), model.join():
        for batch in data:
            train(model, optimizer, [batch])
            if drops:
                optimizer.zero_grad()
    assert {parameter.grad is None for parameter in model.parameters()} == {drops}
    optimizer.step()
    check_ranks_equal(model)


@on_ranks(2)
def test_disabled_it_does_nothing(rank: int, device: torch.device) -> None:
    pair = _pair(mlp, rank, device)
    for model, optimizer in pair:
        with model.join(enable=False):
            train(model, optimizer, batches(rank, 3, device))
    check_equal(pair[0][0], pair[1][0])


def _thrown() -> str:
    rank, device = begin()
    model = DistributedDataParallel(mlp(rank, device))
    optimizer = _sgd(model)

    def run() -> None:
        with model.join(throw_on_early_termination=True):
            train(model, optimizer, batches(rank, 2 + rank, device))

    return message_of(RuntimeError, run)


def test_all_ranks_can_be_made_to_stop() -> None:
    zero, one = run_ranks(2, _thrown, reuse=True)
    assert "exhausted" in zero
    assert "exhausted inputs" in one


@on_ranks(2)
def test_experts_and_ignored_buffers_stay_with_their_rank(rank: int, device: torch.device) -> None:
    """What is not synchronised is not overwritten at the end either."""
    net: Any = mlp(0, device)
    net.loose = nn.Parameter(torch.full((1,), float(rank), device=device))
    net.loose.expert = True
    net.register_buffer("own", torch.full((1,), float(rank), device=device))
    net._bagua_params_and_buffers_to_ignore = ["own"]
    model = DistributedDataParallel(net)
    with model.join():
        train(model, _sgd(model), batches(rank, 1 + rank, device))
    assert net.loose.item() == rank
    assert net.own.item() == rank
