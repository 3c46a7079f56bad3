"""Low-precision decentralized training: dtypes, states, arguments and the operation. What is exchanged, and when:
test_weight_exchanges.py and test_step_programs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import MixedDtypes, batches, gathered, message_of, mlp, train
from support.weight_exchanges import bucket_names, check_replicas
from torch import nn

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import LowPrecisionDecentralizedAlgorithm
from bagua.torch_api.bucket import BaguaBucket


def sgd(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1)]


@on_ranks(3)
def test_dtypes_that_cannot_be_compressed_are_exchanged_as_differences_too(rank: int, device: torch.device) -> None:
    """float64 and complex numbers travel as bytes as well, and are added as they are."""
    torch.manual_seed(0)
    net: Any = MixedDtypes().to(device)
    net.empty = nn.Parameter(torch.zeros(0, 3, device=device))
    before = [one.detach().clone() for one in net.parameters() if one.numel()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net.with_bagua([optimizer], LowPrecisionDecentralizedAlgorithm(False))
    for step in range(3):
        optimizer.zero_grad()
        net(batches(rank, 1, device, seed=step)[0][0]).square().mean().backward()
        optimizer.step()
        check_replicas(net.bagua_buckets, [[0], [1], [2]])
    assert {bucket.dtype for bucket in net.bagua_buckets} >= {torch.float64, torch.complex64, torch.bfloat16}
    for bucket in net.bagua_buckets:
        if bucket.dtype != torch.bfloat16 and bucket._weight.numel():
            assert not torch.equal(*gathered(bucket._weight)[:2]), bucket.dtype
    trained = [one for one in net.parameters() if one.numel()]
    assert not all(torch.equal(one, other) for one, other in zip(before, trained, strict=True))


@on_ranks(2)
def test_weights_that_are_not_finite_are_seen(rank: int, device: torch.device) -> None:
    """A weight that is not finite makes its range so, here and in time everywhere: nothing hides it."""
    net: Any = mlp(rank, device)
    optimizers = sgd(net)
    net.with_bagua(optimizers, LowPrecisionDecentralizedAlgorithm(False))
    with torch.no_grad():
        if rank == 1:
            net[0].weight[0, 0] = torch.inf
    train(net, optimizers[0], batches(rank, 2, device))
    assert not all(one.isfinite().all() for one in net.parameters())


# --- state -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_of_other_neighbors_is_refused(rank: int, device: torch.device) -> None:
    states = []
    for hierarchical in (False, True):
        net: Any = mlp(rank, device)
        net.with_bagua(sgd(net), LowPrecisionDecentralizedAlgorithm(hierarchical))
        states.append(net.bagua_ddp.state_dict())
    assert "hierarchical=True" in message_of(ValueError, lambda: net.bagua_ddp.load_state_dict(states[0]))
    net.bagua_ddp.load_state_dict(states[1])


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_of_the_algorithm() -> None:
    algorithm: Any = Algorithm.init("low_precision_decentralized")
    assert isinstance(algorithm, LowPrecisionDecentralizedAlgorithm)
    assert (algorithm.hierarchical, algorithm.communication_interval) == (True, 1)
    with pytest.raises(ValueError, match="communication_interval=-1: must be at least 1"):
        LowPrecisionDecentralizedAlgorithm(communication_interval=-1)


@on_ranks(2)
def test_a_parameter_that_is_in_no_optimizer_is_named(rank: int, device: torch.device) -> None:
    net: Any = mlp(rank, device)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(net[0].parameters(), lr=0.1)]
    algorithm = LowPrecisionDecentralizedAlgorithm(False)
    told = message_of(RuntimeError, lambda: net.with_bagua(optimizers, algorithm))
    assert "4 of 6" in told
    assert "2.weight, 2.bias, 4.weight, 4.bias" in told
    # Two ways out of it, after which others can be wrapped and trained.
    net[2].requires_grad_(False)
    net._bagua_params_and_buffers_to_ignore = ["4.weight", "4.bias"]
    net.with_bagua(optimizers, algorithm)
    train(net, optimizers[0], batches(rank, 1, device))
    check_replicas(net.bagua_buckets, [[0], [1]])
    assert bucket_names(net) == [["0.bias", "0.weight"]]


@on_ranks(1)
def test_arguments_of_the_operation(device: torch.device) -> None:
    values: Any = torch.zeros(6, device=device)
    bucket = BaguaBucket([values.ensure_bagua_tensor("x", "module")], "bucket")
    flat = bucket.flattened_tensor().clone()
    append = bucket.append_low_precision_decentralized_synchronous_op
    assert "int8" in message_of(ValueError, lambda: append(flat, flat, flat, compression="gzip"))
    assert "right_peer_weight" in message_of(ValueError, lambda: append(flat, flat, flat[:5]))
    assert not bucket.ops


@on_ranks(2)
def test_an_operation_of_weights_in_the_bucket(rank: int, device: torch.device) -> None:
    """The weights lie in the bucket, which flattens."""
    weights: Any = torch.linspace(0, 1, 7, device=device)
    bucket = BaguaBucket([weights.ensure_bagua_tensor("x", "module")], "bucket")
    own, left, right = (bucket.flattened_tensor().clone() for _ in range(3))
    op = bucket.append_low_precision_decentralized_synchronous_op(own, left, right, hierarchical=False)
    expected = torch.stack([torch.linspace(0, 1, 7) + rank for rank in (0.25, 0.5)]).to(device)
    for _ in range(20):
        weights.copy_(expected[rank])  # what a rank steps to, whatever it is given
        op.run(bucket)
        assert torch.equal(weights, own)
        for neighbor in (left, right):  # of two ranks each is the other's on both sides
            assert torch.equal(gathered(own)[1 - rank], neighbor)
