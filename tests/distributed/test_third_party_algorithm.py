"""Algorithms as others write them: a short one of today, and one in the style of the old core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import (
    algorithm_of,
    batches,
    check_close,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    momentum,
    torch_ddp,
    train,
    wrap_with,
)
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.data_parallel import DistributedDataParallel

# --- a short one: the sign of each gradient, and a vote --------------------------------------------------------------


class SignVoteImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, scale: float) -> None:
        super().__init__(process_group)
        self.scale = scale

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        def vote(_: str) -> None:
            flat = bucket.flattened_tensor()
            flat.sign_()
            dist.all_reduce(flat, group=self.process_group.torch_group)
            flat.sign_().mul_(self.scale)

        bucket.append_python_op(vote)


class SignVote(Algorithm):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def reify(self, process_group: Any) -> SignVoteImpl:
        return SignVoteImpl(process_group, self.scale)


@pytest.mark.parametrize("how", ["with_bagua", "with_bagua unflattened", "wrapper"])
@on_ranks(3, fresh=True)
def test_a_short_algorithm_by_its_name(rank: int, device: torch.device, how: str) -> None:
    GlobalAlgorithmRegistry.register("sign_vote", SignVote, "a vote on the sign")
    assert "sign_vote" in GlobalAlgorithmRegistry.available_algorithms()
    algorithm = Algorithm.init("sign_vote", scale=0.5)
    net, alone = mlp(0, device), mlp(0, device)
    optimizer, other = momentum(net), momentum(alone)
    model = wrap_with(how, net, [optimizer], algorithm, bucket_cap_mb=1e-4)
    every = [batches(one, 10, device) for one in range(3)]
    for step in range(10):
        train(model, optimizer, [every[rank][step]])
        # The same, computed by one process.
        votes = [torch.zeros_like(parameter) for parameter in alone.parameters()]
        for one in range(3):
            alone.zero_grad()
            loss_of(alone, every[one][step]).backward()
            for total, parameter in zip(votes, alone.parameters(), strict=True):
                total += parameter.grad.sign()
        for total, parameter in zip(votes, alone.parameters(), strict=True):
            parameter.grad = total.sign() * 0.5
        other.step()
        check_equal(net, alone, f"step {step}")


# --- in the style of the old core ------------------------------------------------------------------------------------


class OldStyleImpl(AlgorithmImpl):
    """Says everything itself: tensors with closures, marks, waiting, buckets with a padding."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.events: list[str] = []

    def need_reset(self) -> bool:
        self.events.append("need_reset")
        return False

    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        tensors = []
        for name, param in reversed(bagua_ddp.bagua_build_params()):
            param = param.bagua_ensure_grad().ensure_bagua_tensor(
                name,
                bagua_ddp.bagua_module_name,
                getter_closure=lambda param: param.grad,
                setter_closure=lambda param, t: setattr(param, "grad", t),
            )
            tensors.append(param)
        self._communication_tensor_names = {name for name, _ in bagua_ddp.bagua_build_params()}
        assert len(self._communication_tensor_names) == len(tensors)
        return tensors

    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        return [
            BaguaBucket(group, flatten=do_flatten, name=str(index), alignment=self.process_group.size)
            for index, group in enumerate(tensors)
        ]

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(input: Any) -> None:  # noqa: A002 - as it was
            assert isinstance(input[0], Tensor)
            self.events.append("forward")

        return hook

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, Tensor], None]:
        def hook(parameter_name: str, parameter: Any) -> None:
            if parameter_name in self._communication_tensor_names:
                assert parameter.bagua_backend_tensor().data_ptr() == parameter.grad.data_ptr()
                parameter.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        def hook() -> None:
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            self.events.append("backward")

        return hook

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(optimizer: Any) -> None:
            assert optimizer in bagua_ddp.bagua_optimizers
            self.events.append("step")

        return hook

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()

        def halve(*_: Any) -> None:
            bucket.flattened_tensor().div_(2)

        def double(*_: Any) -> None:
            bucket.flattened_tensor().mul_(2)

        bucket.append_python_op(halve, group=self.process_group)
        bucket.append_centralized_synchronous_op(average=True, scattergather=True, group=self.process_group)
        bucket.append_python_op(double)


@pytest.mark.parametrize("how", ["with_bagua", "with_bagua unflattened", "wrapper"])
@on_ranks(3)
def test_an_algorithm_for_the_old_core(rank: int, device: torch.device, how: str) -> None:
    net, twin = mlp(rank, device), mlp(rank, device)
    optimizer, other = momentum(net), momentum(twin)
    model = wrap_with(how, net, [optimizer], algorithm_of(OldStyleImpl))
    data = batches(rank, 10, device)
    reference = torch_ddp(twin)
    for number, batch in enumerate(data):
        train(model, optimizer, [batch], set_to_none=number % 2 == 0)
        train(reference, other, [batch])
    check_close(net, twin)
    check_ranks_equal(net)
    assert model.bagua_algorithm.events == ["need_reset", "forward", "backward", "step"] * 10
    for bucket in model.bagua_buckets:
        assert bucket.flattened_tensor().numel() % 3 == 0
        assert bucket.check_flatten() == (how != "with_bagua unflattened")


# --- weights instead of gradients ------------------------------------------------------------------------------------


class WeightMeanImpl(AlgorithmImpl):
    """Averages the parameters themselves: marked before forward, mixed while it runs, used after backward."""

    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        return [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in bagua_ddp.bagua_build_params()
        ]

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            for _, parameter in bagua_ddp.bagua_build_params():
                parameter.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, Tensor], None]:
        return lambda *_: None

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(group=self.process_group)


@on_ranks(2)
def test_weights_can_be_communicated_as_well(rank: int, device: torch.device) -> None:
    net, twin = mlp(rank, device), mlp(0, device)
    optimizer, other = momentum(net), momentum(twin)
    net.with_bagua([optimizer], algorithm_of(WeightMeanImpl))
    for batch in batches(rank, 5, device):
        train(net, optimizer, [batch])
        for parameter in twin.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= 2
        train(twin, other, [batch])
    check_equal(net, twin)
    assert net.bagua_buckets[0].check_flatten()
    assert not net.bagua_buckets[0].holds_gradients
    refused = DistributedDataParallel(mlp(rank, device), algorithm=algorithm_of(WeightMeanImpl))
    assert "join: Own communicates something else" in message_of(NotImplementedError, refused.join)
    # The module is ordinary when it is done: its parameters have memory of their own again.
    memory = net.bagua_buckets[0].flattened_tensor()
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    memory.zero_()
    for parameter, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


# --- beginning anew --------------------------------------------------------------------------------------------------


class ResettingImpl(GradientAllReduceAlgorithmImpl):
    """Asks for it in every third forward pass."""

    asked = 0
    begun = 0

    def need_reset(self) -> bool:
        self.asked += 1
        return self.asked % 3 == 0

    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        self.begun += 1
        return super().init_tensors(bagua_ddp)


@on_ranks(2)
def test_an_algorithm_that_begins_anew(rank: int, device: torch.device) -> None:
    net, twin = mlp(rank, device), mlp(rank, device)
    optimizer, other = momentum(net), momentum(twin)
    net.with_bagua([optimizer], algorithm_of(ResettingImpl))
    for number, batch in enumerate(batches(rank, 10, device)):
        with counted_all_reduces() as calls:
            train(net, optimizer, [batch], set_to_none=number % 2 == 0)
        assert len(calls) == 1
    assert net.bagua_algorithm.begun == 1 + 3
    assert net.bagua_train_step_counter == 10
    train(torch_ddp(twin), other, batches(rank, 10, device))
    check_equal(net, twin)
    hooks = (net._forward_hooks, net._forward_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert [len(one) for one in hooks] == [1, 1, 1]
    net.eval()
    with torch.no_grad():
        for _ in range(3):
            net(batches(rank, 1, device)[0][0])
    assert net.bagua_algorithm.asked == 13
    assert net.bagua_algorithm.begun == 4


# --- errors ----------------------------------------------------------------------------------------------------------


class FailingImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        def fail(name: str) -> None:
            raise KeyError(f"bucket {name} of the algorithm")

        bucket.append_python_op(fail)


@on_ranks(2)
def test_an_error_of_an_operation_ends_the_backward_pass(rank: int, device: torch.device) -> None:
    net: Any = nn.Linear(2, 4).to(device)
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], algorithm_of(FailingImpl))
    message_of(KeyError, lambda: loss_of(net, batches(rank, 1, device)[0]).backward(), "bucket 0 of the algorithm")
    # With another algorithm it works at once.
    optimizer = momentum(net)
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    train(net, optimizer, batches(rank, 3, device))
    check_ranks_equal(net)


class UnfinishedImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        raise KeyError("not written yet")


@on_ranks(2)
def test_a_module_is_free_again_if_an_algorithm_cannot_begin(rank: int, device: torch.device) -> None:
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    for _ in range(2):
        message_of(KeyError, lambda: net.with_bagua([optimizer], algorithm_of(UnfinishedImpl)))
        message_of(KeyError, lambda: DistributedDataParallel(net, algorithm=algorithm_of(UnfinishedImpl)))
    assert not net[0].weight.is_bagua_tensor()
    assert not net._forward_pre_hooks
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    train(net, optimizer, batches(rank, 3, device))
    check_ranks_equal(net)


class EndlessImpl(GradientAllReduceAlgorithmImpl):
    def finish(self, bagua_ddp: Any) -> None:
        raise KeyError("cannot be ended")


@on_ranks(2)
def test_a_module_is_free_again_if_an_algorithm_cannot_end(rank: int, device: torch.device) -> None:
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], algorithm_of(EndlessImpl))
    train(net, optimizer, batches(rank, 2, device))
    message_of(KeyError, lambda: net.with_bagua([optimizer], Algorithm.init("gradient_allreduce")))
    assert not net[0].weight.is_bagua_tensor()
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    train(net, optimizer, batches(rank, 3, device))
    check_ranks_equal(net)


@on_ranks(1)
def test_the_registry() -> None:
    assert GlobalAlgorithmRegistry.get("gradient_allreduce") is not None
    assert GlobalAlgorithmRegistry.description("gradient_allreduce")
    message_of(ValueError, lambda: GlobalAlgorithmRegistry.register("gradient_allreduce", SignVote))
    message_of(TypeError, lambda: GlobalAlgorithmRegistry.register(3, SignVote))  # type: ignore[arg-type]
    assert "gradient_allreduce" in message_of(KeyError, lambda: Algorithm.init("no such"))
    net: Any = nn.Linear(2, 2)
    unfinished = message_of(
        NotImplementedError, lambda: net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], Algorithm())
    )
    assert "reify" in unfinished
