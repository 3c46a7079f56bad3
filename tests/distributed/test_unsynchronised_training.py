"""Ways to train that would let the ranks differ in silence: each is either synchronised or refused, by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    Branches,
    algorithm_of,
    batches,
    begin,
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

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _missing_in_the_last_step(listed: bool) -> str | None:
    """Rank 1 leaves a layer out, and no forward pass comes after."""
    rank, device = begin()
    net = Branches().to(device)
    for name in ("right", "never"):
        getattr(net, name).requires_grad_(False)
    optimizer = _sgd(net)
    model = DistributedDataParallel(net, optimizers=[optimizer] if listed else [], bucket_cap_mb=1e-6)
    train(model, optimizer, batches(rank, 2, device))
    if rank == 0:
        return None  # it would wait for rank 1, which ends
    loss_of(net.trunk, (batches(rank, 1, device)[0][0], torch.zeros(4, 6, device=device))).backward()
    return message_of(RuntimeError, optimizer.step)


@pytest.mark.parametrize("listed", [True, False])
def test_a_missing_gradient_in_the_last_step(listed: bool) -> None:
    message = run_ranks(2, _missing_in_the_last_step, listed, reuse=True)[1]
    assert "before optimizer.step()" in message
    assert "left.weight" in message


# --- in eval() mode, and through other methods than forward ----------------------------------------------------------


class TwoLayers(nn.Module):
    """With a loss of its own, which does not call forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))

    def loss(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


@on_ranks(2)
def test_a_missing_gradient_is_noticed_in_eval_mode(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    net = Branches().to(device)
    model = DistributedDataParallel(net).eval()
    first, second = batches(rank, 2, device)
    loss_of(model, first).backward()
    with torch.no_grad():
        model(first[0])  # an evaluation is not asked
    message_of(RuntimeError, lambda: loss_of(model, second), "never.weight")


@pytest.mark.parametrize("how", ["eval", "method"])
@on_ranks(2)
def test_a_parameter_that_is_unfrozen_where_nobody_looks(rank: int, device: torch.device, how: str) -> None:
    torch.manual_seed(rank)
    net: Any = TwoLayers().to(device)
    net.first.requires_grad_(False)
    optimizer = _sgd(net)
    model: Any = net
    if how == "eval":
        model = DistributedDataParallel(net, optimizers=[optimizer]).eval()
    else:
        with_algorithm(net, optimizer)
    x = batches(rank, 1, device)[0][0]

    def step() -> None:
        optimizer.zero_grad()
        (model(x).square().mean() if how == "eval" else net.loss(x)).backward()
        optimizer.step()

    step()
    net.first.requires_grad_(True)
    with net.bagua_ddp.no_sync():
        (net.loss(x) * 0).backward()  # sends nothing, and so promises nothing
    message = message_of(RuntimeError, step)
    # The remedy that it names:
    model.train()
    with torch.no_grad():
        model(x)
    model.eval()
    for _ in range(3):
        step()
    check_ranks_equal(net.first)
    check_ranks_equal(net.second)
    assert "'first." in message
    assert "not synchronized" in message
    assert "train() mode" in message


@on_ranks(2)
def test_a_parameter_that_is_frozen_in_eval_mode(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = _sgd(net)
    model = DistributedDataParallel(net, optimizers=[optimizer]).eval()
    data = batches(rank, 3, device)
    train(model, optimizer, data[:1])
    net[0].requires_grad_(False)
    message = message_of(RuntimeError, lambda: train(model, optimizer, data[1:]))
    model.train()
    train(model, optimizer, data)
    check_ranks_equal(net)
    assert message.startswith("before optimizer.step()")
    assert "0.weight, 0.bias: frozen since" in message


@on_ranks(2)
def test_a_parameter_that_another_module_synchronises(rank: int, device: torch.device) -> None:
    """What is frozen in one module may be trained as part of another one, which synchronises it."""
    net: Any = mlp(rank, device)
    net[0].requires_grad_(False)
    with_algorithm(net, _sgd(net))
    part: Any = nn.Sequential(net[0].requires_grad_(True))
    optimizer = _sgd(part)
    with_algorithm(part, optimizer)
    for batch in batches(rank, 3, device):
        optimizer.zero_grad()
        part(batch[0]).square().mean().backward()
        optimizer.step()
    check_ranks_equal(part)


# --- the whole module frozen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_eval", [False, True])
@pytest.mark.parametrize("how", ["with_bagua", "wrapper", "find unused"])
@on_ranks(2)
def test_a_discriminator_that_is_frozen_in_the_step_of_the_generator(
    rank: int, device: torch.device, how: str, is_eval: bool
) -> None:
    torch.manual_seed(rank)
    generator, discriminator = nn.Linear(3, 2).to(device), mlp(rank + 10, device)
    twins = copy.deepcopy((generator, discriminator))
    states = []
    for kind, nets in (("ours", (generator, discriminator)), ("torch", twins)):
        optimizers = [_sgd(net) for net in nets]
        if kind == "torch":
            models: list[Any] = [torch_ddp(net) for net in nets]
        elif how == "with_bagua":
            models = [with_algorithm(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
        else:
            models = [DistributedDataParallel(net, find_unused_parameters=how == "find unused") for net in nets]
        make, judge = models
        judge.train(not is_eval)
        for number, (x, _) in enumerate(batches(rank, 4, device, (4, 3))):
            optimizers[1].zero_grad()
            (judge(x[:, :2]).square().mean() - judge(make(x).detach()).square().mean()).backward()
            optimizers[1].step()
            nets[1].requires_grad_(False)
            optimizers[0].zero_grad()
            with counted_all_reduces() as calls:
                output = judge(make(x))
                if number % 2:
                    nets[1].requires_grad_(True)  # before the backward pass: it does not reach them all the same
                output.square().mean().backward()
            optimizers[0].step()
            nets[1].requires_grad_(True)
            if how == "with_bagua" and kind == "ours":
                assert calls == [8], "only the generator's gradients"
        states.append(nets)
    for ours, theirs in zip(*states, strict=True):
        check_equal(ours, theirs)


class RenewingImpl(GradientAllReduceAlgorithmImpl):
    asks = False
    beginnings = 0

    def need_reset(self) -> bool:
        asks, self.asks = self.asks, False
        return asks

    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        self.beginnings += 1
        return super().init_tensors(bagua_ddp)


@on_ranks(2)
def test_what_is_due_while_all_is_frozen_comes_later(rank: int, device: torch.device) -> None:
    net: Any = mlp(rank, device)
    optimizer = _sgd(net)
    net.with_bagua([optimizer], algorithm_of(RenewingImpl))
    data = batches(rank, 3, device)
    net.requires_grad_(False)
    net.bagua_algorithm.asks = True
    for _ in range(2):
        net(data[0][0])
    assert net.bagua_algorithm.beginnings == 1
    net.requires_grad_(True)
    train(net, optimizer, data)
    assert net.bagua_algorithm.beginnings == 2
    check_ranks_equal(net)
    # Others than before:
    net.requires_grad_(False)
    net(data[0][0])
    net[4].requires_grad_(True)
    train(net, optimizer, data)
    assert [name for name, _ in net.bagua_build_params()] == ["4.weight", "4.bias"]
    check_ranks_equal(net)


@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
@on_ranks(2)
def test_a_new_beginning_that_fails_ends_training(rank: int, device: torch.device, how: str) -> None:
    net: Any = mlp(rank, device)
    optimizer = _sgd(net)
    model: Any = with_algorithm(net, optimizer) if how == "with_bagua" else DistributedDataParallel(net)
    data = batches(rank, 2, device)
    train(model, optimizer, data)
    net[2 * rank].requires_grad_(False)
    messages = [message_of(RuntimeError, lambda: train(model, optimizer, data))]
    net.requires_grad_(True)
    messages.append(message_of(RuntimeError, lambda: train(model, optimizer, data)))
    if how == "with_bagua":
        messages.append(message_of(RuntimeError, optimizer.step))
        with torch.no_grad():
            model(data[0][0])
    model = with_algorithm(net, optimizer) if how == "with_bagua" else DistributedDataParallel(net)
    train(model, optimizer, data)
    check_ranks_equal(net)
    (first, *later) = messages
    assert "The ranks have different parameters" in first
    for message in later:
        assert "not synchronized any more" in message
        assert "wrap the module again" in message
        assert first in message, "the cause"


# --- other parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "how", "name"),
    [
        ("all", "with_bagua", "0.weight"),
        ("all", "find unused", "0.weight"),
        ("late", "with_bagua", "0.weight"),
        ("late", "find unused", "0.weight"),
        ("head", "with_bagua", "2.weight"),
        ("one more", "wrapper", "6.weight"),
        ("one more", "find unused", "6.weight"),
    ],
)
@on_ranks(2)
def test_parameters_that_the_module_did_not_have(
    rank: int, device: torch.device, what: str, how: str, name: str
) -> None:
    net: Any = mlp(rank, device)
    net[0].requires_grad_(what != "head")
    options = {"find_unused_parameters": how == "find unused"}
    model: Any = with_algorithm(net, _sgd(net)) if how == "with_bagua" else DistributedDataParallel(net, **options)
    data = batches(rank, 4, device)
    if what == "late":
        train(model, _sgd(net), data)
    if what in ("all", "late"):
        net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    elif what == "head":
        net[2], net[4] = nn.Linear(10, 50).to(device), nn.Linear(50, 4).to(device)
    else:
        net.append(nn.Linear(4, 4).to(device))
    optimizer = _sgd(net)
    message = message_of(RuntimeError, lambda: train(model, optimizer, data[:1]))
    model = with_algorithm(net, optimizer) if how == "with_bagua" else DistributedDataParallel(net, **options)
    train(model, optimizer, data)
    check_ranks_equal(net[1:])
    assert "did not have them when it was wrapped" in message
    assert name in message
    assert "Wrap it again" in message


@on_ranks(2)
def test_parameters_of_one_call(rank: int, device: torch.device) -> None:
    """Parameters that a call alone has instead of the module's are its own affair, and so are those left out."""
    net: Any = TwoLayers().to(device)
    net._bagua_params_and_buffers_to_ignore = ["extra.weight", "extra.bias"]
    optimizer = _sgd(net)
    with pytest.warns(UserWarning, match=r"no parameter or buffer 'extra\."):  # not yet
        with_algorithm(net, optimizer)
    net.extra = nn.Linear(2, 2).to(device)
    own = {name: nn.Parameter(value.detach().clone()) for name, value in net.named_parameters()}
    data = batches(rank, 3, device)
    for x, _ in data:
        torch.func.functional_call(net, own, (x,)).sum().backward()
        assert own["first.weight"].grad is not None
    train(net, optimizer, data)
    check_ranks_equal(net.first)
