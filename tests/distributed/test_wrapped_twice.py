"""A parameter has one owner: Bagua and torch's DDP, or two engines, never reduce the same gradient."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from support.forked_program import run_programs
from support.rank_tests import on_ranks
from support.training import (
    batches,
    check_ranks_equal,
    check_tensor_on_ranks,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    momentum,
    torch_ddp,
    train,
    with_algorithm,
)
from torch import nn

from bagua.comm_hooks import bytegrad
from bagua.torch_api.data_parallel import DistributedDataParallel

OURS = {"with_bagua": lambda net: with_algorithm(net, momentum(net)), "wrapper": DistributedDataParallel}


def _whole(net: Any) -> Any:
    return net


def _child(net: Any) -> Any:
    return net[0]


def _prepared(model: Any) -> Any:
    """As Accelerate's prepare() wraps it, on CPUs."""
    return nn.parallel.DistributedDataParallel(model, device_ids=None, output_device=None)


def _net(seed: int = 0) -> Any:
    """Two levels, of which either may be wrapped."""
    return nn.Sequential(mlp(seed), nn.Linear(4, 4))


@on_ranks(2)
def test_torchs_ddp_and_bagua_of_one_parameter_are_refused(rank: int, device: torch.device) -> None:
    for ours in OURS.values():
        for first_of, second_of in ((_whole, _whole), (_child, _whole), (_whole, _child)):
            # torch's DDP of what Bagua has, as Accelerate's prepare() makes it. Nothing is sent, and all goes on.
            net = _net(rank).to(device)
            first, second = first_of(net), second_of(net)
            wrapped = ours(first)
            for target in (second, wrapped) if first is second else (second,):
                with counted_all_reduces() as calls:
                    told = message_of(ValueError, lambda target=target: _prepared(target))  # type: ignore[misc]
                assert not calls
                assert "DistributedDataParallel" in told
                assert "synchronized by Bagua" in told
                assert "bagua_ddp.detach()" in told
            loss_of(net if first is not net else wrapped, batches(rank, 1, device)[0]).backward()
            check_tensor_on_ranks(next(first.parameters()).grad, "gradient")
            first.bagua_ddp.detach()
            _prepared(second)

            # And the other way round.
            net = _net(rank).to(device)
            first, second = first_of(net), second_of(net)
            wrapped = _prepared(first)
            kept = [parameter.clone() for parameter in net.parameters()]
            for target in (second, wrapped) if first is second else (second,):
                told = message_of(ValueError, lambda target=target: ours(target))  # type: ignore[misc] # noqa: B023
                assert "torch's DistributedDataParallel of Sequential" in told
                assert "Bagua" in told
                assert "comm_hooks" in told
                assert "bagua_ddp" not in target.__dict__
            assert all(map(torch.equal, kept, net.parameters()))
            del wrapped, target  # in cycles, which nobody needs to collect
            ours(second)


@on_ranks(2)
def test_who_owns_no_parameter_in_common_passes(rank: int, device: torch.device) -> None:
    data = batches(rank, 2, device)

    # A copy of what Bagua has, one that was detached, and one whose wrapper is gone.
    net = with_algorithm(_net(rank).to(device), momentum(_net()))
    duplicate = torch_ddp(copy.deepcopy(net))
    train(duplicate, momentum(duplicate), data)
    check_ranks_equal(duplicate)
    inner = torch_ddp(_net(rank).to(device)).module
    train(with_algorithm(inner, momentum(inner)), momentum(inner), data)
    check_ranks_equal(inner)
    # A copy of what torch has, while both are trained.
    ours = copy.deepcopy(duplicate).module
    optimizer = momentum(ours)
    train(with_algorithm(ours, optimizer), optimizer, data)
    train(duplicate, momentum(duplicate), data)

    # A child each, which torch's ignore list says, in either order.
    for torch_first in (True, False):
        net = _net(rank).to(device)
        names = [f"0.{name}" for name, _ in net[0].named_parameters()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        ddp = torch_ddp(net) if torch_first else None
        optimizer = momentum(net)
        with_algorithm(net[0], optimizer)
        model = ddp or torch_ddp(net)
        train(model, optimizer, data)
        check_ranks_equal(net)

    # Frozen parameters are reduced by nobody.
    trunk = mlp(rank).to(device).requires_grad_(False)
    heads = [nn.Sequential(trunk, nn.Linear(4, 4)).to(device) for _ in range(2)]
    optimizers = [momentum(head) for head in heads]
    models = [torch_ddp(heads[0]), with_algorithm(heads[1], optimizers[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data)
        check_ranks_equal(model)
    # Once it is trained, it has an owner.
    trunk.requires_grad_(True)
    assert "DistributedDataParallel" in message_of(ValueError, heads[1].bagua_ddp.replan)

    # Siblings, and torch's DDP with a hook of Bagua.
    pair = nn.ModuleList([mlp(rank), mlp(rank)]).to(device)
    other: Any = with_algorithm(pair[0], momentum(pair[0]))
    hooked = torch_ddp(pair[1])
    hooked.register_comm_hook(None, bytegrad)
    for model in (other, hooked):
        train(model, momentum(model), data)
    check_ranks_equal(pair)

    # One that torch refused is not torch's.
    refused = mlp(rank).to(device)
    message_of(ValueError, lambda: nn.parallel.DistributedDataParallel(refused, device_ids=[0, 1]))
    with_algorithm(refused, momentum(refused))
    # Of a module that is gone there is nothing to detach.
    shared = nn.Linear(2, 2, device=device)
    gone: Any = with_algorithm(nn.Sequential(shared), momentum(shared))
    del gone
    gc.collect()
    for wrap in (torch_ddp, lambda net: with_algorithm(net, momentum(net))):
        wrap(nn.Sequential(nn.Linear(2, 2, device=device), shared))
        gc.collect()


@on_ranks(1)
def test_groups_of_one_rank_are_no_exception(device: torch.device) -> None:
    """On one rank, too, so that a trial run shows what would be wrong on more."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    net = mlp().to(device)
    ddp = nn.parallel.DistributedDataParallel(net, process_group=group)
    message_of(ValueError, lambda: with_algorithm(net, momentum(net)))
    message_of(ValueError, lambda: with_algorithm(ddp, momentum(net)))
    copied = nn.Sequential(copy.deepcopy(torch_ddp(mlp().to(device))))
    message_of(ValueError, lambda: with_algorithm(copied, momentum(copied)))


_BEFORE_AN_ENGINE = """
import warnings
import torch.distributed as dist
from torch import nn, optim
import bagua.torch_api as bagua

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.Linear(2, 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ddp = nn.parallel.DistributedDataParallel(net, check_reduction=True)
(warning,) = (one for one in caught if "check_reduction" in str(one.message))
assert warning.filename == "<string>", warning
try:
    bagua.with_bagua(net, [optim.SGD(net.parameters(), lr=0.1)])
except ValueError as error:
    assert "is already in torch's DistributedDataParallel" in str(error), error
else:
    raise AssertionError("wrapped twice")
"""


def test_before_the_first_engine_torchs_ddp_is_torchs_own() -> None:
    """It is found all the same. What torch warns of names the caller's line, as without Bagua."""
    (done,) = run_programs(1, _BEFORE_AN_ENGINE)
    assert done.returncode == 0, done.stderr


@on_ranks(2)
def test_a_parent_of_a_wrapped_module_is_refused_before_anything_is_sent(rank: int, device: torch.device) -> None:
    """A refusal overwrites nothing: not even where replicas differ on purpose."""
    from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm

    net = _net(rank).to(device)
    net[0].with_bagua([momentum(net[0])], DecentralizedAlgorithm())
    with torch.no_grad():
        net[0][0].weight.add_(rank)
    kept = net[0][0].weight.clone()
    for ours in OURS.values():
        assert "Wrap one module that contains both" in message_of(ValueError, lambda ours=ours: ours(net))  # type: ignore[misc]
    assert torch.equal(net[0][0].weight, kept)
