"""`module.with_bagua`: what it puts on a module, calling it again, and which parameters take part."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from support.ports import take_another_port
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    batches,
    begin,
    check_close,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    torch_ddp,
    train,
    with_algorithm,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
import bagua.torch_api.communication as communication
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


# --- what a wrapped module has ---------------------------------------------------------------------------------------


def _attributes() -> str:
    rank, device = begin()
    net = mlp(rank, device)
    for name in ("bagua_module_name", "bagua_algorithm", "bagua_optimizers", "bagua_buckets"):
        assert not hasattr(net, name), name
    assert "with_bagua" in message_of(RuntimeError, net.bagua_build_params)
    optimizer = _sgd(net)
    assert with_algorithm(net, optimizer) is net
    assert isinstance(net.bagua_ddp, BaguaDistributedDataParallel)
    assert isinstance(net.bagua_algorithm, GradientAllReduceAlgorithmImpl)
    assert net.bagua_optimizers == [optimizer]
    assert [bucket.name for bucket in net.bagua_buckets] == ["0"]
    assert net.parameters_to_ignore == []
    names = [name for name, _ in net.bagua_build_params()]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert net.bagua_train_step_counter == 0
    train(net, optimizer, batches(rank, 3, device))
    net.eval()
    net(batches(rank, 1, device)[0][0])
    assert net.bagua_train_step_counter == 3
    second = with_algorithm(mlp(rank, device), _sgd(net))
    assert second.bagua_module_name != net.bagua_module_name
    assert communication.get_backend(net.bagua_module_name) is net.bagua_ddp.scheduler
    named = nn.Linear(2, 2).to(device)
    named.bagua_module_name = "chosen"
    with_algorithm(named, _sgd(named))
    assert named.bagua_module_name == named.bagua_ddp.bagua_module_name == "chosen"
    with_algorithm(named, _sgd(named))
    twin = nn.Linear(2, 2).to(device)
    twin.bagua_module_name = "chosen"
    assert "also has the bagua_module_name 'chosen'" in message_of(
        UserWarning, lambda: with_algorithm(twin, _sgd(twin))
    )
    return str(net.bagua_module_name)


def test_what_a_wrapped_module_has() -> None:
    names = run_ranks(2, _attributes)
    assert names[0] == names[1]


class Crowded(nn.Module):
    """Has attributes of its own with the names of ours."""

    bagua_buckets = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.parameters_to_ignore = nn.Linear(2, 4)
        self.bagua_optimizers = 5
        self.register_buffer("bagua_train_step_counter", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.parameters_to_ignore(x) * self.bagua_optimizers


@on_ranks(2)
def test_attributes_of_the_module_itself_win(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    net: Any = Crowded().to(device)
    twin = copy.deepcopy(net)
    optimizer, other = _sgd(net), _sgd(twin)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 5, device))
    train(torch_ddp(twin), other, batches(rank, 5, device))
    check_equal(net, twin)
    assert net.bagua_buckets == "mine"
    assert net.bagua_optimizers == 5
    assert isinstance(net.parameters_to_ignore, nn.Linear)
    assert net.bagua_train_step_counter.tolist() == [0]


# --- again -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_second_call_replaces_the_first(rank: int, device: torch.device) -> None:
    net, twin = mlp(rank, device), mlp(rank, device)
    optimizer, other = _sgd(net), _sgd(twin)
    data = batches(rank, 6, device)
    for _ in range(3):
        with_algorithm(net, optimizer)
    reference = torch_ddp(twin)
    with counted_all_reduces() as calls:
        train(net, optimizer, data[:3])
    assert len(calls) == 3, calls
    with_algorithm(net, optimizer)
    assert net.bagua_train_step_counter == 0
    with counted_all_reduces() as calls:
        train(net, optimizer, data[3:])
    assert len(calls) == 3, calls
    train(reference, other, data)
    check_equal(net, twin)


@on_ranks(2)
def test_another_optimizer_on_the_way(rank: int, device: torch.device) -> None:
    net, twin = mlp(rank, device), mlp(rank, device)
    first, second = _sgd(net), torch.optim.Adam(net.parameters(), lr=0.01)
    with_algorithm(net, first)
    train(net, first, batches(rank, 3, device))
    with_algorithm(net, second)
    train(net, second, batches(rank, 3, device, seed=1))
    first.step()  # of no concern to us any more, also in the middle of a step
    other = _sgd(twin)
    reference = torch_ddp(twin)
    train(reference, other, batches(rank, 3, device))
    train(reference, torch.optim.Adam(twin.parameters(), lr=0.01), batches(rank, 3, device, seed=1))
    other.step()
    check_equal(net, twin)
    assert not first._optimizer_step_pre_hooks
    assert not first._optimizer_step_post_hooks


@on_ranks(2)
def test_a_wrapped_module_is_freed_with_its_last_reference(rank: int, device: torch.device) -> None:
    for how in ("with_bagua", "wrapper"):
        net = mlp(rank, device)
        optimizer = _sgd(net)
        model: Any = with_algorithm(net, optimizer) if how == "with_bagua" else DistributedDataParallel(net)
        train(model, optimizer, batches(rank, 2, device))
        traces = [weakref.ref(one) for one in (net, net[0].weight, net.bagua_ddp, net.bagua_ddp.scheduler)]
        del net, model, optimizer
        gc.collect()
        assert [trace() for trace in traces] == [None] * 4, how


@on_ranks(2, fresh=True)
def test_the_group_is_destroyed_and_made_again(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = _sgd(net)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    take_another_port()
    dist.barrier()
    dist.destroy_process_group()
    message_of(RuntimeError, lambda: train(net, optimizer, batches(rank, 1, device)), "has been destroyed")
    bagua.init_process_group()
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    check_ranks_equal(net)


@on_ranks(2)
def test_nothing_is_broadcast_without_optimizers(rank: int, device: torch.device) -> None:
    net: Any = nn.Linear(2, 2).to(device)
    nn.init.constant_(net.weight, rank)
    message_of(ValueError, lambda: net.with_bagua([], GradientAllReduceAlgorithm()))
    assert net.weight.unique().tolist() == [rank]


@on_ranks(2)
def test_a_call_that_is_refused_leaves_the_module_usable(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = _sgd(net)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    # Refused before anything is touched:
    for kind, call in (
        (TypeError, lambda: net.with_bagua(optimizer, GradientAllReduceAlgorithm())),
        (TypeError, lambda: net.with_bagua([optimizer, None], GradientAllReduceAlgorithm())),
        (TypeError, lambda: net.with_bagua([optimizer], GradientAllReduceAlgorithm)),
        (ValueError, lambda: net.with_bagua([optimizer], "gradient_all_reduce")),
        (TypeError, lambda: net.with_bagua([optimizer], GradientAllReduceAlgorithm(), process_group="world")),
    ):
        message_of(kind, call)
    train(net, optimizer, batches(rank, 2, device, seed=1))
    check_ranks_equal(net)
    # Refused once the ranks have compared what they were given: the earlier call stays in effect.
    engine = net.bagua_ddp
    lbfgs = torch.optim.LBFGS(net.parameters())
    assert "LBFGS" in message_of(ValueError, lambda: with_algorithm(net, lbfgs))
    assert "optimizers is empty" in message_of(ValueError, lambda: net.with_bagua([], GradientAllReduceAlgorithm()))
    differing: Any = [optimizer] * (1 + rank)
    assert "rank 1 has 2" in message_of(RuntimeError, lambda: net.with_bagua(differing, GradientAllReduceAlgorithm()))
    assert net.bagua_ddp is engine
    train(net, optimizer, batches(rank, 2, device, seed=3))
    check_ranks_equal(net)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device, seed=2))
    check_ranks_equal(net)


@on_ranks(2)
def test_ranks_divide_the_steps_of_an_optimizer_only_where_gradients_are_averaged(
    rank: int, device: torch.device
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it uses itself
        from torch.distributed.optim import ZeroRedundancyOptimizer

    alone = [dist.new_group([member]) for member in range(2)][rank]

    def train_with(name: str, group: Any, is_divided: bool, options: dict[str, Any]) -> list[Tensor]:
        net: Any = mlp(rank, device)
        optimizer: Any = _sgd(net)
        if is_divided:
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
        for seed in range(2):  # wrapped again, too
            net.with_bagua([optimizer], Algorithm.init(name, **options))
            train(net, optimizer, batches(rank, 2, device, seed=seed))
        return [one.detach() for one in net.parameters()]

    for name, options in (
        ("local_sgd", {"sync_every": 1}),
        ("diloco", {"sync_every": 2, "warmup_steps": 2}),
        ("decentralized", {"hierarchical": False}),
        ("low_precision_decentralized", {"hierarchical": False}),
        ("async", {}),
    ):
        told = message_of(ValueError, functools.partial(train_with, name, None, True, options))
        first, _, remedy = told.splitlines()
        assert first.startswith(f"ZeroRedundancyOptimizer divides its step among ranks 0 and 1, and {name} does not")
        assert remedy.startswith("Use SGD without ZeroRedundancyOptimizer, or an algorithm that averages gradients")
    for name, group, options in (
        ("gradient_allreduce", None, {}),
        ("bytegrad", None, {"hierarchical": False}),
        ("powersgd", None, {"rank": 1}),  # what ranks owe differs, their weights do not
        ("local_sgd", alone, {"sync_every": 2}),  # divided among no other ranks
    ):
        plain, divided = (train_with(name, group, one, options) for one in (False, True))
        assert all(torch.equal(one, other) for one, other in zip(plain, divided, strict=True)), name


@on_ranks(2)
def test_what_cannot_be_trained_is_refused_on_every_rank(rank: int, device: torch.device) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False).to(device)
    net: Any = nn.Linear(2, 2 + rank).to(device)
    for module, kind, parts in (
        (frozen, ValueError, ["Linear has no parameters to synchronize"]),
        (net, RuntimeError, ["weight", "rank 1 has"]),
    ):
        message_of(kind, functools.partial(with_algorithm, module, _sgd(module)), *parts)


def _without_a_group() -> str:
    net: Any = nn.Linear(2, 2)
    return message_of(
        RuntimeError, lambda: net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    )


def test_without_a_process_group() -> None:
    assert "init_process_group" in run_ranks(1, _without_a_group)[0]


def _member_or_not() -> str:
    rank, device = begin()
    pair = communication.new_group([0, 2])
    net = mlp(rank, device)
    optimizer = _sgd(net)
    algorithm = Algorithm.init("gradient_allreduce")
    if rank == 1:
        return message_of(ValueError, lambda: net.with_bagua([optimizer], algorithm, process_group=pair))
    net.with_bagua([optimizer], algorithm, process_group=pair)
    train(net, optimizer, batches(rank, 3, device))
    return str(sum(parameter.sum().item() for parameter in net.parameters()))


def test_only_members_of_the_group_can_wrap() -> None:
    zero, one, two = run_ranks(3, _member_or_not)
    assert "not a member" in one
    assert "[0, 2]" in one
    assert zero == two


# --- several models --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_two_models_by_turns_and_one_through_the_other(rank: int, device: torch.device) -> None:
    ours = [mlp(rank, device), mlp(rank + 10, device)]
    theirs = copy.deepcopy(ours)
    our_optimizers, their_optimizers = [_sgd(net) for net in ours], [_sgd(net) for net in theirs]
    for net, optimizer in zip(ours, our_optimizers, strict=True):
        with_algorithm(net, optimizer)
    references = [torch_ddp(net) for net in theirs]
    for nets, optimizers in ((ours, our_optimizers), (references, their_optimizers)):
        for step, batch in enumerate(batches(rank, 10, device, (8, 2))):
            for number in (step % 2, 1 - step % 2):
                train(nets[number], optimizers[number], [batch])
            for optimizer in optimizers:
                optimizer.zero_grad()
            # One through the other, as in adversarial training.
            hidden = nets[0](batch[0])
            (loss_of(nets[1], (hidden[:, :2], batch[1])) + hidden.square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        check_equal(ours_one, theirs_one)


@on_ranks(2)
def test_a_parameter_on_an_unsupported_device_is_refused_by_name(device: torch.device) -> None:
    messages = []
    for is_frozen in (False, True):
        net = nn.Sequential(nn.Linear(2, 2, device=device), nn.Linear(2, 2, device="meta"))
        net[1].requires_grad_(not is_frozen)
        optimizer = _sgd(net)
        wrap = functools.partial(with_algorithm, net, optimizer)
        messages.append(message_of(NotImplementedError, wrap))
    net._bagua_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    with_algorithm(net, optimizer)
    for message in messages:
        assert message.startswith("'1.weight' is on device 'meta'; Bagua trains on cpu and cuda.\n")
        assert "to_empty(device=...)" in message


@on_ranks(2, joined=False)
def test_on_a_group_that_torch_made() -> None:
    """Without bagua.init_process_group: torch's default group is adopted."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = mlp(rank)
    optimizer = _sgd(net)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 3))
    check_ranks_equal(net)
    bagua.init_process_group()
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 3))
    check_ranks_equal(net)
    check_close(net, net)
