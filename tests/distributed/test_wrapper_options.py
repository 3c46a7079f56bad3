"""Arguments of torch's DistributedDataParallel: what each changes, and for which algorithms.

torch's own tests of them run with this wrapper in judges/test_torch_ddp.py. Here is what they leave out.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    message_of,
    mlp,
    momentum,
    torch_ddp,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bagua.torch_api.data_parallel import DistributedDataParallel


@on_ranks(2)
def test_what_an_algorithm_cannot_do_is_refused(rank: int, device: torch.device) -> None:
    hook = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
    first = mlp(rank, device)
    named = list(first.named_parameters())
    options: list[tuple[str, dict[str, Any]]] = [
        ("static_graph=True", {"static_graph": True}),
        ("skip_all_reduce_unused_params=True", {"skip_all_reduce_unused_params": True}),
        ("init_sync=False", {"init_sync": False}),
        ("mixed_precision", {"mixed_precision": hook}),
        ("bucket_cap_mb_list", {"bucket_cap_mb_list": [1]}),
        (
            "delay_all_reduce_named_params",
            {"delay_all_reduce_named_params": named[:1], "param_to_hook_all_reduce": named[1][1]},
        ),
    ]
    for name, given in options:
        text = message_of(
            NotImplementedError,
            lambda given=given: DistributedDataParallel(first, algorithm="decentralized", **given),  # type: ignore[misc]
        )
        assert text.startswith(f"{name}: DecentralizedAlgorithm")
        assert "GradientAllReduceAlgorithm" in text
    model: Any = DistributedDataParallel(first, algorithm="decentralized")
    for call in (
        lambda: model.register_comm_hook(None, lambda _, bucket: bucket),
        model._set_static_graph,
    ):
        assert "DecentralizedAlgorithm" in message_of(NotImplementedError, call)
    one: Any = DistributedDataParallel(mlp(rank, device), mixed_precision=hook)
    assert "mixed_precision" in message_of(NotImplementedError, lambda: one.register_comm_hook(None, _half))
    parameters = list(one.parameters())
    for given in (
        {"delay_all_reduce_named_params": [("a", parameters[0])]},
        {"param_to_hook_all_reduce": parameters[0]},
    ):
        assert "at the same time" in message_of(
            ValueError,
            lambda given=given: DistributedDataParallel(mlp(rank, device), **given),  # type: ignore[misc]
        )
    strange = nn.Parameter(torch.zeros(1))
    assert "'x' is not a parameter" in message_of(
        ValueError,
        lambda: DistributedDataParallel(
            mlp(rank, device), delay_all_reduce_named_params=[("x", strange)], param_to_hook_all_reduce=strange
        ),
    )
    assert "bucket_cap_mb_list=0" in message_of(
        ValueError, lambda: DistributedDataParallel(mlp(rank, device), bucket_cap_mb_list=[1, 0])
    )


def _half(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """Half of the sum."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda one: one.value()[0] / 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@on_ranks(2)
def test_the_graph_of_algorithms_that_average_gradients_may_be_static(
    rank: int, device: torch.device, algorithm: str
) -> None:
    """Arguments that any averaging of gradients allows."""
    made: Any = DistributedDataParallel(
        mlp(rank, device), algorithm=algorithm, static_graph=True, skip_all_reduce_unused_params=True
    )
    train(made, momentum(made), batches(rank, 3, device))
    check_ranks_equal(made)


class _Reused(nn.Module):
    """Reentrant checkpoints of one layer, each of which makes its gradient, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=True)
        return x


@on_ranks(2)
def test_a_static_graph_may_make_a_gradient_in_several_parts(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    ours_net = _Reused().to(device)
    theirs_net = copy.deepcopy(ours_net)
    ours: Any = DistributedDataParallel(ours_net, static_graph=True, gradient_as_bucket_view=False)
    theirs: Any = torch_ddp(theirs_net, static_graph=True)
    for step in range(3):
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        for model in (ours, theirs):
            model.zero_grad()
            model(data).square().sum().backward()
        for (name, mine), other in zip(ours_net.named_parameters(), theirs_net.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None and other.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)


class _Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.one(x)
        return self.other(x) if both else x


def _changing(both: list[bool]) -> list[str]:
    _, device = begin()
    model: Any = DistributedDataParallel(_Switched().to(device), static_graph=True)
    x = torch.ones(1, 2, device=device)
    said = []
    for one in both:
        model.zero_grad()
        try:
            model(x, one).sum().backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("both", [[True, False], [False, True]])
def test_a_static_graph_that_changes_is_an_error(both: list[bool]) -> None:
    for said in run_ranks(2, _changing, both):
        (text,) = said
        assert "graph has changed" in text
        assert "'other." in text
    assert run_ranks(2, _changing, [True] * 3) == [[], []]


@on_ranks(2)
def test_ranks_that_do_not_all_have_a_static_graph_are_refused(rank: int, device: torch.device) -> None:
    """One would wait for the agreement on unused parameters that the other leaves out."""
    text = message_of(
        RuntimeError,
        lambda: DistributedDataParallel(mlp(rank, device), static_graph=rank == 0, find_unused_parameters=True),
    )
    assert "static_graph=" in text


def _agreements(static: bool) -> int:
    """All-reduces of the fourth step: one for the bucket, and one by which ranks agree on unused parameters."""
    _, device = begin()
    model: Any = DistributedDataParallel(_Switched().to(device), find_unused_parameters=not static, static_graph=static)
    x = torch.ones(1, 2, device=device)
    for _ in range(3):
        model(x, False).sum().backward()
    with counted_all_reduces() as counts:
        model(x, False).sum().backward()
    return len(counts)


def test_a_static_graph_costs_no_agreement() -> None:
    assert run_ranks(2, _agreements, False) == [2, 2]
    assert run_ranks(2, _agreements, True) == [1, 1]


def _used_by_one_rank() -> list[float]:
    rank, device = begin()
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(
        _Switched().to(device), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    averages = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2, device=device), rank == 1).sum().backward()
        averages.append(float(model.module.other.weight.grad.sum()))
    return averages


def test_what_one_rank_uses_is_not_left_out() -> None:
    first, second = run_ranks(2, _used_by_one_rank)
    assert first == second == [first[0]] * 3
    assert first[0] != 0


@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
@on_ranks(2)
def test_unused_parameters_are_left_out_of_the_communication(device: torch.device, how: str) -> None:
    model: Any = DistributedDataParallel(_Switched().to(device), skip_all_reduce_unused_params=True, **{how: True})
    x = torch.ones(1, 2, device=device)
    for _ in range(3):
        model.zero_grad()
        model(x, False).sum().backward()
    assert model.module.other.weight.grad is None
    sent = [record.name for bucket in model.bagua_buckets for record in bucket.records]
    check_ranks_equal(model)
    message_of(RuntimeError, lambda: model(x, True).sum().backward(), "'other.", "skip_all_reduce_unused_params")
    assert sorted(sent) == ["one.bias", "one.weight"]


def _in_order() -> list[list[str]]:
    _, device = begin()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(device)  # 1 MiB each
    named = dict(net.named_parameters())
    model: Any = DistributedDataParallel(
        net,
        bucket_cap_mb_list=[1, 2],
        delay_all_reduce_named_params=[("3.weight", named["3.weight"])],
        param_to_hook_all_reduce=named["1.weight"],
    )
    train(model, momentum(model), [(torch.ones(1, 512, device=device), torch.ones(1, 512, device=device))] * 2)
    check_ranks_equal(model)
    return [[record.name for record in bucket.records] for bucket in model.bagua_buckets]


def test_buckets_have_the_order_and_the_sizes_that_are_asked_for() -> None:
    expected = [["2.weight"], ["1.weight", "3.weight"], ["0.weight"]]
    assert run_ranks(2, _in_order) == [expected] * 2


@on_ranks(2)
def test_nothing_is_communicated_before_training_if_that_is_not_wanted(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)  # another one on each rank
    before = copy.deepcopy(net.state_dict())
    with counted_all_reduces() as counts:
        model: Any = DistributedDataParallel(net, init_sync=False)
    assert not counts
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    model(batches(rank, 1, device)[0][0]).sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        mine = parameter.grad.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, parameter.grad)


@on_ranks(2)
def test_a_hook_communicates_instead_of_the_algorithm(rank: int, device: torch.device) -> None:
    model: Any = DistributedDataParallel(mlp(rank, device))
    reference: Any = DistributedDataParallel(copy.deepcopy(model.module))
    model.register_comm_hook(None, _half)
    assert "only be called once" in message_of(RuntimeError, lambda: model.register_comm_hook(None, _half))
    for one in (model, reference):
        train(one, momentum(one), batches(rank, 3, device))
    check_equal(model, reference)
    copied = copy.deepcopy(model)
    copied(batches(rank, 1, device)[0][0]).sum().backward()
    check_ranks_equal(copied)
    late: Any = DistributedDataParallel(mlp(rank, device))
    late(batches(rank, 1, device)[0][0]).sum().backward()
    assert "before training loop starts" in message_of(RuntimeError, lambda: late.register_comm_hook(None, _half))
    assert "callable" in message_of(TypeError, lambda: late.register_comm_hook(None, None))


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        assert self.head.weight.dtype == torch.bfloat16
        assert x.dtype == torch.bfloat16
        if self._reentrant is None:
            return self.head(self.block(x))  # type: ignore[no-any-return]
        x.requires_grad_()
        return self.head(checkpoint(self.block, x, use_reentrant=self._reentrant))  # type: ignore[no-any-return]


class _Held(nn.Module):
    """Keeps its parameters in other places, too; `how` says from where the forward pass takes them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.lstm = nn.LSTM(6, 2, batch_first=True)
        self.numbers = list(range(1000))
        self.how = how
        self.weights = [self.first.weight, self.second.weight]
        self.biases = {"all": (self.first.bias, [self.second.bias])}
        vars(self)["last"] = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.first.weight, self.second.weight, self.second.weight
        bias, (other,) = self.first.bias, [self.second.bias]
        if self.how == "held":
            (first, second), (bias, (other,)), last = self.weights, self.biases["all"], vars(self)["last"]
        x = nn.functional.linear(nn.functional.linear(x, first, bias), second, other) @ last
        return self.lstm(x)[0]  # type: ignore[no-any-return]


@on_ranks(2)
def test_mixed_precision_of_parameters_in_lists(rank: int, device: torch.device) -> None:
    """As with torch's DDP, which replaces their data. After the pass all are what they were."""
    config = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for how in ("registered", "held"):
        torch.manual_seed(0)
        net = _Held(how).to(device)
        weights = net.weights
        model: Any = DistributedDataParallel(net, mixed_precision=config)
        optimizer = momentum(model)
        for step in range(3):
            data = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            optimizer.zero_grad()
            model(data).float().square().sum().backward()
            optimizer.step()
            held = [*net.weights, net.biases["all"][0], *net.biases["all"][1], vars(net)["last"]]
            own = [net.first.weight, net.second.weight, net.first.bias, net.second.bias, net.second.weight]
            assert all(one is other for one, other in zip(held, own, strict=True))
            assert all(isinstance(one, nn.Parameter) for one in net.lstm._flat_weights)
        assert net.weights is weights
        check_ranks_equal(model)
        found.append([one.detach().clone() for one in copy.deepcopy(net).parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@on_ranks(2)
def test_mixed_precision_and_activation_checkpointing(rank: int, device: torch.device) -> None:
    config = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(_Checkpointed(reentrant).to(device), mixed_precision=config)
        optimizer = momentum(model)
        for step in range(3):
            data = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            optimizer.zero_grad()
            model(data).float().square().sum().backward()
            assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in model.parameters())
            optimizer.step()
        assert all(one.dtype == torch.float32 for one in model.parameters())
        check_ranks_equal(model)
        found.append([one.detach().clone() for one in model.parameters()])
    for other in found[1:]:
        for mine, same in zip(found[0], other, strict=True):
            assert torch.equal(mine, same), "a forward pass that is repeated computes with the same casts"
