"""Decentralized training: memory, rounding, arguments, the operation, and rounds that go wrong. What is exchanged, and
when: test_weight_exchanges.py and test_step_programs.py."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
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
    train,
    wrap_with,
)
from support.weight_exchanges import PARTS, MeansByHand, Turns, backward
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.comm_ops.decentralized import PeerWeightAverage
from bagua.comm_ops.weight_exchange import MeanOfAll, MeanOfPairs
from bagua.engine.bucket import Bucket
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.data_parallel import DistributedDataParallel

MODES = ("all", "shift_one")


def sgd(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1)]


@on_ranks(2)
def test_weights_lie_in_reverse_order_as_in_bagua_0_9(rank: int, device: torch.device) -> None:
    for how in ("with_bagua", "with_bagua unflattened"):
        net = mlp(0, device)
        wrap_with(how, net, sgd(net), DecentralizedAlgorithm(False))
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
            version = bucket.tensors[0]._version
            op.copy_back_peer_weight(bucket.backend_bucket)
            assert bucket.tensors[0]._version > version, "a graph of the former weights would be used"
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
    train(net, optimizers[0], batches(rank, 1, device))


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


# --- rounds that go wrong --------------------------------------------------------------------------------------------


class Rounds(Turns):
    """Of two ranks."""

    hand: MeansByHand

    def forward(self) -> Tensor:
        """A forward pass alone."""
        return backward(self.model, self.number + 500, self.rank, "forward")

    def turn_without_an_exchange(self) -> None:
        with mock.patch.object(self.hand, "before_pass"):
            self.turn(PARTS)

    def weights(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.net.named_parameters()}


def _loaded_after_a_trial(turns: Rounds) -> None:
    """What was loaded after an exchange began is not overwritten by the mean of what it replaced. The exchange that was
    begun in vain is that of the round."""
    turns.forward()
    turns.hand.before_pass()
    turns.hand.means = {}
    for rank, net in enumerate(turns.hand.nets):
        torch.manual_seed(20 + rank)
        net.load_state_dict({name: torch.randn_like(one) for name, one in net.state_dict().items()})
    turns.net.load_state_dict(turns.hand.nets[turns.rank].state_dict())
    turns.turn_without_an_exchange()


def _changed_and_restored_on_one_rank(turns: Rounds) -> None:
    """What swapping in averaged weights does: this rank goes without the mean, and nobody waits. Its peers get the mean
    of the weights of the forward pass, however late the exchange begins."""
    changed, exchanged = threading.Event(), threading.Event()
    run = PeerWeightAverage.run

    def run_late(operation: PeerWeightAverage, bucket: Bucket) -> None:
        changed.wait()
        run(operation, bucket)
        exchanged.set()

    with mock.patch.object(PeerWeightAverage, "run", run_late):
        if turns.rank != 0 or turns.device.type == "cuda":  # there it is queued by this thread, at once
            changed.set()
        turns.forward()
        if turns.rank == 0:
            kept = turns.weights()
            with torch.no_grad():
                for parameter in turns.net.parameters():
                    parameter.zero_()
            changed.set()
            exchanged.wait()
            turns.net.load_state_dict(kept)
    turns.hand.before_pass()
    own = turns.hand.weights[0]
    turns.hand.means = {name: [own[name].detach().clone(), one[1]] for name, one in turns.hand.means.items()}
    turns.turn_without_an_exchange()


def _backward_in_no_sync(turns: Rounds) -> None:
    """The mean is put in place before a step all the same, and the round goes on."""
    turns.net.zero_grad()
    loss = turns.forward()
    with turns.net.bagua_ddp.no_sync():
        loss.backward()
    for optimizer in turns.optimizers.values():
        optimizer.step()
    turns.hand.turn(turns.number + 500, [[*turns.optimizers]] * 2, "plain")
    turns.compare()
    turns.turn_without_an_exchange()


def _unseen_step(turns: Rounds) -> None:
    """Something else than a listed optimizer changes the weights: an error, not an update that is lost."""
    turns.forward().backward()
    with torch.no_grad():
        for parameter in turns.net.parameters():
            parameter.add_(1.0)
    before = turns.weights()
    assert "exactly the optimizers that you step" in message_of(RuntimeError, turns.forward)
    assert all(torch.equal(one, before[name]) for name, one in turns.weights().items())
    turns.net.load_state_dict(turns.hand.nets[turns.rank].state_dict())
    turns.hand.exchanges += 1


def _stale_graph(turns: Rounds) -> None:
    """A graph of the weights before the mean cannot be used after it."""
    loss = turns.forward()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        turns.forward()  # puts the mean in place, as if the step had been skipped
    assert "modified by an inplace operation" in message_of(RuntimeError, loss.backward)
    turns.hand.before_pass()
    turns.hand.before_steps()


def _interrupted(turns: Rounds) -> None:
    """A backward pass that raises leaves the exchange for the next one."""

    def stop(_: Any) -> None:
        raise KeyError("of the user")

    loss = turns.forward()
    handle = turns.net.first.weight.register_hook(stop)
    assert "of the user" in message_of(KeyError, loss.backward)
    handle.remove()


def _wrapped_again(turns: Rounds) -> None:
    """A mean that is under way is put in place before all begin with rank 0's weights again."""
    turns.forward()
    turns.hand.before_pass()
    turns.hand.before_steps()
    turns.wrap_again()


SITUATIONS = (
    _loaded_after_a_trial,
    _changed_and_restored_on_one_rank,
    _backward_in_no_sync,
    _unseen_step,
    _stale_graph,
    _interrupted,
    _wrapped_again,
)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_rounds_that_go_wrong(mode: str) -> None:
    """After a round that is as all are, and before one."""
    for situation in SITUATIONS:
        turns = Rounds(("decentralized", {"hierarchical": False, "peer_selection_mode": mode}))
        turns.turn(PARTS)
        situation(turns)
        turns.turn(PARTS)


# --- the exchange runs meanwhile -------------------------------------------------------------------------------------


@pytest.mark.skipif(
    os.environ.get("BAGUA_TEST_DEVICE") == "cuda",
    reason="with CUDA no thread of the host takes part in an exchange; this needs one to stop it",
)
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, fresh=True)
def test_forward_and_backward_run_while_weights_are_exchanged(mode: str) -> None:
    """It is not done before the backward pass has begun, and the pass does not wait for it."""
    kind = MeanOfPairs if mode == "shift_one" else MeanOfAll
    original = kind.mix
    backward_is_running = threading.Event()

    def mix(self: Any, values: Tensor, step: int) -> None:
        assert backward_is_running.wait(30), "the exchange was waited for before the backward pass"
        original(self, values, step)

    kind.mix = mix  # type: ignore[method-assign]
    turns = Turns(("decentralized", {"hierarchical": False, "peer_selection_mode": mode}))
    turns.net.first.weight.register_hook(lambda _: backward_is_running.set())
    for _ in range(3):
        backward_is_running.clear()
        turns.turn(PARTS)


@on_ranks(3)
def test_other_communication_does_not_get_in_between(rank: int, device: torch.device) -> None:
    """Two modules, buffers that are broadcast, and a loss that the user averages, while weights are exchanged."""
    models: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 3000), nn.ReLU(), nn.Linear(3000, 4)).to(device)
        net.register_buffer("counter", torch.zeros(3, device=device))
        optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3)]
        models.append(DistributedDataParallel(net, optimizers=optimizers, algorithm=DecentralizedAlgorithm(False)))
    for x, y in batches(rank, 8, device):
        means = [[one.detach().clone() for one in model.parameters()] for model in models]
        for mean in (one for of_model in means for one in of_model):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        total = torch.zeros((), device=device)
        for model in models:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            total = total + loss
        total.backward()
        for model, of_model in zip(models, means, strict=True):
            model.bagua_optimizers[0].step()
            for one, mean in zip(model.parameters(), of_model, strict=True):
                torch.testing.assert_close(one.detach(), mean - 1e-3 * one.grad)
