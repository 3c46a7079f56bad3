"""Decentralized training: x' = mix(x) - lr * g(x), against all ranks simulated in one process from the formula."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.decentralized import BOTH, Case, adam, check_formula, several
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.replicas import (
    momentum,
    sgd,
    train_step,
)
from support.training import (
    NODES_OF_TWO_AND_ONE,
    TWO_NODES_OF_TWO,
    MixedDtypes,
    batches,
    begin,
    check_ranks_equal,
    launched_on,
    message_of,
    mlp,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.bucket import BaguaBucket

# --- the formula -----------------------------------------------------------------------------------------------------


HOWS = ("with_bagua", "with_bagua unflattened", "wrapper", "wrapper unlisted", "wrapper unlisted unflattened")
OF_TWO = (
    *(Case("all", interval) for interval in (1, 3)),
    Case("shift_one", 2),
    *(Case(mode, 2, how, several, steps=5) for mode, how in zip(itertools.cycle(BOTH), HOWS, strict=False)),
    *(Case(mode, make_optimizers=make, steps=5) for mode, make in zip(BOTH, (momentum, adam), strict=True)),
    *(Case(mode, dtype=one, steps=5) for mode, one in zip(BOTH, (torch.bfloat16, torch.float16), strict=True)),
)
OF_THREE = (Case("all", 2, make_optimizers=momentum), Case("all", dtype=torch.bfloat16))
OF_FOUR = (
    Case("all", 2),
    *(Case("shift_one", interval, make_optimizers=momentum) for interval in (1, 3)),
)

OTHERS = {
    2: (
        Case("all", 2),
        *(Case("shift_one", interval) for interval in (1, 3)),
        *(Case(mode, make_optimizers=make, steps=5) for mode, make in zip(BOTH, (adam, momentum), strict=True)),
        *(Case(mode, dtype=one, steps=5) for mode, one in zip(BOTH, (torch.float16, torch.bfloat16), strict=True)),
    ),
    3: (Case("all", 1, make_optimizers=momentum), Case("all", dtype=torch.float16)),
    4: (Case("shift_one", 2, make_optimizers=momentum), Case("shift_one", dtype=torch.bfloat16)),
}


@pytest.mark.parametrize(("ranks", "cases"), [(2, OF_TWO), (3, OF_THREE), (4, OF_FOUR)])
def test_weights_and_peer_weights_are_those_of_the_formula(ranks: int, cases: Sequence[Case]) -> None:
    run_ranks(ranks, check_formula, cases)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", OTHERS)
def test_other_combinations_follow_the_formula(ranks: int) -> None:
    run_ranks(ranks, check_formula, OTHERS[ranks])


@pytest.mark.parametrize("hierarchical", [False, True])
def test_one_rank_alone_trains_as_without(hierarchical: bool) -> None:
    cases = [
        Case(mode, 2, how, momentum, hierarchical=hierarchical)
        for mode in BOTH
        for how in ("with_bagua", "wrapper unlisted")
    ]
    run_ranks(1, check_formula, cases)


NODES = {
    "two nodes of two": (TWO_NODES_OF_TWO, [[0, 1], [2, 3]]),
    "nodes of two and one": (NODES_OF_TWO_AND_ONE, [[0, 1], [2]]),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_exchange_their_means(name: str) -> None:
    env, nodes = NODES[name]
    cases = [
        Case(mode, interval, how, momentum, dtype, hierarchical=True, steps=6, nodes=nodes)
        for mode, interval, how, dtype in (
            ("shift_one", 1, "with_bagua", torch.float32),
            ("all", 2, "wrapper unlisted unflattened", torch.float32),
            ("all", 1, "with_bagua", torch.bfloat16),
        )
    ]
    run_ranks(len(env), check_formula, cases, env=env)


def test_all_ranks_on_one_node_are_one_node_also_if_they_are_odd() -> None:
    cases = [Case(mode, hierarchical=True, steps=4, nodes=[[0, 1, 2]]) for mode in BOTH]
    run_ranks(3, check_formula, cases)


@on_ranks(2)
def test_weights_lie_in_reverse_order_as_in_bagua_0_9(rank: int, device: torch.device) -> None:
    for how in ("with_bagua", "with_bagua unflattened"):
        net = mlp(0, device)
        Case(how=how).wrap(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
        (bucket,) = net.bagua_buckets
        names = [name for name, _ in net.named_parameters()]
        assert [tensor.bagua_tensor_name for tensor in bucket.tensors] == names[::-1]
        # Without an exchange yet, the peer weight has the weights, the last parameter first.
        expected = torch.cat([parameter.detach().flatten() for parameter in reversed(list(net.parameters()))])
        assert torch.equal(bucket._peer_weight, expected), (how, rank)
    net = mlp(0, device)
    algorithm = Algorithm.init("low_precision_decentralized", hierarchical=False)
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], algorithm)
    replicas = [torch.cat(parts) for parts in zip(*(bucket.replicas for bucket in net.bagua_buckets), strict=True)]
    for replica in replicas:
        assert torch.equal(replica, expected)
    # Of sizes that are no multiples of 16 bytes.
    odd: list[Any] = [torch.full((size,), 1.0 + size, device=device) for size in (3, 1, 5)]
    tensors = [one.ensure_bagua_tensor(f"t{number}", "odd") for number, one in enumerate(odd)]
    for alignment, zeros in ((1, 0), (4, 3)):
        flat = BaguaBucket(tensors, "odd", True, alignment).flattened_tensor()
        assert flat.tolist() == [4.0] * 3 + [2.0] + [6.0] * 5 + [0.0] * zeros


# --- rounding --------------------------------------------------------------------------------------------------------


def _rounded_once() -> None:
    rank, device = begin()
    ranks = dist.get_world_size()
    group = bagua.communication._get_default_group()
    for dtype, numel in ((torch.bfloat16, 1001), (torch.float16, 1), (torch.float16, 1001)):
        generator = torch.Generator().manual_seed(0)
        every = [(torch.randn(numel, generator=generator) * 100).to(dtype).to(device) for _ in range(ranks)]
        for hierarchical in (False, True):
            bucket = _bucket(every[rank].clone())
            peer_weight = torch.empty_like(bucket.flattened_tensor())
            op = bucket.append_decentralized_synchronous_op(peer_weight, hierarchical, "all", group)
            op.run(bucket)
            assert torch.equal(bucket.flattened_tensor(), every[rank])  # in use, until it is copied back
            exact = torch.stack(every).double().mean(dim=0)
            # Half a step of numbers of this size. With nodes, their means are rounded before that.
            rounded = exact.abs() + (torch.stack(every).double().abs().amax(dim=0) if hierarchical else 0)
            bound = torch.finfo(dtype).eps / 2 * rounded + 1e-4
            assert ((peer_weight.double() - exact).abs() <= bound).all()
            op.copy_back_peer_weight(bucket.backend_bucket)
            assert torch.equal(bucket.flattened_tensor(), peer_weight)
            # Replicas that are equal stay as they are.
            alike = _bucket(every[0].clone())
            op = alike.append_decentralized_synchronous_op(peer_weight, hierarchical, "all", group)
            op.run(alike)
            assert torch.equal(peer_weight, every[0])
    # Halves do not overflow where the sum would.
    if ranks % 2 == 0:
        largest = torch.full((3,), torch.finfo(torch.float16).max, dtype=torch.float16, device=device)
        bucket = _bucket(largest.clone())
        peer_weight = torch.empty_like(largest)
        bucket.append_decentralized_synchronous_op(peer_weight, False, "shift_one", group).run(bucket)
        assert torch.equal(peer_weight, largest)


def _bucket(values: Tensor) -> BaguaBucket:
    return BaguaBucket([values.ensure_bagua_tensor("x", "module")], "bucket")  # type: ignore[attr-defined]


def test_short_dtypes_are_rounded_once() -> None:
    run_ranks(3, _rounded_once, env=NODES_OF_TWO_AND_ONE)
    run_ranks(4, _rounded_once, env=TWO_NODES_OF_TWO)


@on_ranks(3, env=NODES_OF_TWO_AND_ONE)
def test_a_bucket_for_every_dtype(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    net: Any = MixedDtypes().to(device)
    net.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float16, device=device))
    optimizers = sgd(net)
    for hierarchical in (False, True):
        net.with_bagua(optimizers, DecentralizedAlgorithm(hierarchical))
        assert len(net.bagua_buckets) == len({parameter.dtype for parameter in net.parameters()}) == 5
        before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        for parameter in net.parameters():
            with torch.no_grad():
                parameter.add_(rank)
        net(batches(rank, 1, device)[0][0]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
        for name, parameter in net.named_parameters():
            mean = torch.stack([(before[name] + one) for one in range(3)]).mean(dim=0)
            torch.testing.assert_close(parameter.detach(), mean, msg=name)
        check_ranks_equal(net)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_of_the_algorithm() -> None:
    algorithm: Any = Algorithm.init("decentralized")
    assert isinstance(algorithm, DecentralizedAlgorithm)
    assert (algorithm.hierarchical, algorithm.peer_selection_mode, algorithm.communication_interval) == (True, "all", 1)
    with pytest.raises(ValueError, match=r"'ring' is unknown; it is one of 'all', 'shift_one'"):
        DecentralizedAlgorithm(peer_selection_mode="ring")
    with pytest.raises(ValueError, match="communication_interval=0: must be at least 1"):
        DecentralizedAlgorithm(communication_interval=0)
    fraction: Any = 1.5  # of which only whole multiples would have been exchanged
    with pytest.raises(ValueError, match=r"communication_interval=1\.5: must be at least 1, and whole"):
        DecentralizedAlgorithm(communication_interval=fraction)


def _odd(hierarchical: bool) -> None:
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizers = sgd(net)
    told = message_of(ValueError, lambda: net.with_bagua(optimizers, DecentralizedAlgorithm(hierarchical, "shift_one")))
    assert f"3 {'nodes' if hierarchical else 'ranks'}" in told
    assert "peer_selection_mode='all'" in told
    # Nothing is left behind: it can be wrapped by what works.
    net.with_bagua(optimizers, DecentralizedAlgorithm(hierarchical))
    train_step(net, optimizers, batches(rank, 1, device)[0])


THREE_NODES = launched_on(1, 1, 1)


def test_pairs_of_an_odd_number_are_refused_when_a_module_is_wrapped() -> None:
    run_ranks(3, _odd, False)
    run_ranks(3, _odd, True, env=THREE_NODES)


@on_ranks(1)
def test_arguments_of_the_operation(device: torch.device) -> None:
    bucket = _bucket(torch.zeros(6, device=device))
    flat = bucket.flattened_tensor()
    for wrong in (flat.clone()[:5], flat.double(), flat.view(2, 3).clone(), torch.zeros(12, device=device)[::2]):
        assert "peer_weight" in message_of(ValueError, lambda w=wrong: bucket.append_decentralized_synchronous_op(w))
    told = message_of(
        ValueError, lambda: bucket.append_decentralized_synchronous_op(flat.clone(), peer_selection_mode="one")
    )
    assert "'shift_one'" in told
    assert not bucket.ops
