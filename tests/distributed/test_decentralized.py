"""Decentralized training: x' = mix(x) - lr * g(x), against all ranks simulated in one process from the formula."""

from __future__ import annotations

import copy
import io
import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.replicas import (
    Replicas,
    SideBySide,
    every_rank,
    flat_weights,
    gathered,
    loss_of,
    momentum,
    sgd,
    train_step,
)
from support.training import (
    NODES_OF_TWO_AND_ONE,
    TWO_NODES_OF_TWO,
    Branches,
    MixedDtypes,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    launched_on,
    message_of,
    mlp,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.comm_ops.weight_exchange import MeanOfAll, MeanOfPairs
from bagua.engine import failure_report
from bagua.engine.failure_report import CollectiveError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.data_parallel import DistributedDataParallel

# --- the formula -----------------------------------------------------------------------------------------------------


def partner_of(rank: int, ranks: int, step: int) -> int:
    if ranks == 1:
        return rank
    half = ranks // 2
    return (step + rank) % half + half if rank < half else (rank - half - step) % half


def mixed(values: Sequence[Tensor], mode: str, step: int, nodes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """Of each rank's weights, in float64. `nodes`: which ranks share one; None: no hierarchy."""
    wide = torch.stack([value.double() for value in values])
    places = nodes if nodes is not None else [[rank] for rank in range(len(values))]
    means = [wide[list(place)].mean(dim=0) for place in places]
    if mode == "all":
        means = [wide.mean(dim=0)] * len(places)
    else:
        means = [(mean + means[partner_of(place, len(places), step)]) / 2 for place, mean in enumerate(means)]
    return [mean for rank in range(len(values)) for place, mean in zip(places, means, strict=True) if rank in place]


class Reference(Replicas):
    """Replicas that exchange weights."""

    def __init__(self, net: nn.Module, ranks: int, make_optimizers: Any, mode: str, nodes: Any = None) -> None:
        super().__init__(net, ranks, make_optimizers)
        self.mode, self.nodes, self.exchanges = mode, nodes, 0

    def exchange(self) -> list[Tensor]:
        """The weights of now, mixed. The caller puts them in place when it may."""
        means = mixed(self.weights(), self.mode, self.exchanges, self.nodes)
        self.exchanges += 1
        return means

    def round(self, data: Sequence[Any], exchange: bool = True, skip: Sequence[int] = ()) -> None:
        """A step of each rank, but for those of `skip`, from the mixed weights, with the gradient of the unmixed."""
        self.zero_grad()
        self.backward(data)
        if exchange:
            self.set_weights(self.exchange())
        self.step(skip)


def adam(net: nn.Module) -> list[torch.optim.Optimizer]:
    # A large eps: what rounding does to tiny gradients is no matter then.
    return [torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-2, weight_decay=0.1)]


def several(net: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.05, momentum=0.9)]


@dataclass(frozen=True)
class Case:
    mode: str = "all"
    interval: int = 1
    how: str = "with_bagua"
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = sgd
    dtype: torch.dtype = torch.float32
    hierarchical: bool = False
    steps: int = 10
    nodes: Any = field(default=None, hash=False)

    def build(self, rank: int, ranks: int, device: torch.device) -> tuple[Any, nn.Module, Any, Reference]:
        """(wrapped model, its module, optimizers, reference)."""
        start = mlp(0, device).to(self.dtype)
        reference = Reference(start, ranks, self.make_optimizers, self.mode, self.nodes)
        net = mlp(rank, device).to(self.dtype)  # other weights on each rank, until it is wrapped
        optimizers = self.make_optimizers(net)
        return self.wrap(net, optimizers), net, optimizers, reference

    def wrap(self, net: Any, optimizers: list[torch.optim.Optimizer]) -> Any:
        algorithm = DecentralizedAlgorithm(self.hierarchical, self.mode, self.interval)
        if self.how.startswith("with_bagua"):
            return net.with_bagua(optimizers, algorithm, do_flatten=self.how == "with_bagua")
        listed = [] if "unlisted" in self.how else optimizers
        return DistributedDataParallel(
            net, optimizers=listed, algorithm=algorithm, gradient_as_bucket_view="unflattened" not in self.how
        )


def check_peer_weights(net: Any, case: Case, rank: int, ranks: int, exchanges: int) -> None:
    """Those of all ranks, or of partners, are the same bits."""
    for bucket in net.bagua_buckets:
        if case.mode == "all":
            check_tensor_on_ranks(bucket._peer_weight, "peer weight")
            continue
        every = gathered(bucket._peer_weight)
        places = case.nodes if case.nodes is not None else [[one] for one in range(ranks)]
        mine = next(place for place, members in enumerate(places) if rank in members)
        for other in (*places[mine], *places[partner_of(mine, len(places), exchanges - 1)]):
            assert torch.equal(every[other], bucket._peer_weight), (rank, other)


def _cases(cases: Sequence[Case]) -> None:
    rank, device = begin()
    ranks = dist.get_world_size()
    for case in cases:
        model, net, optimizers, reference = case.build(rank, ranks, device)
        for step in range(case.steps):
            data = every_rank(step, ranks, device)
            train_step(model, optimizers, data[rank])
            reference.round(data, exchange=step % case.interval == 0)
            reference.check(net, rank, f"{case}, step {step}")
        assert len(net.bagua_buckets) == 1
        exchanges = -(-case.steps // case.interval)
        assert net.bagua_buckets[0].operation.exchanges == reference.exchanges == exchanges
        check_peer_weights(net, case, rank, ranks, exchanges)
        # What is not mixed differs: the reference would not notice a rank that only copies.
        if ranks > 1:
            every = gathered(flat_weights(net))
            assert not torch.equal(every[0], every[-1]), case


HOWS = ("with_bagua", "with_bagua unflattened", "wrapper", "wrapper unlisted", "wrapper unlisted unflattened")
BOTH = ("all", "shift_one")
OF_TWO = (
    *(Case(mode, interval) for mode in BOTH for interval in (1, 2, 3)),
    *(Case(mode, 2, how, several, steps=5) for mode, how in zip(itertools.cycle(BOTH), HOWS, strict=False)),
    *(Case(mode, make_optimizers=make, steps=5) for mode in BOTH for make in (momentum, adam)),
    *(Case(mode, dtype=dtype, steps=5) for mode in BOTH for dtype in (torch.bfloat16, torch.float16)),
)
OF_THREE = (
    *(Case("all", interval, make_optimizers=momentum) for interval in (1, 2)),
    *(Case("all", dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
)
OF_FOUR = (
    Case("all", 2),
    *(Case("shift_one", interval, make_optimizers=momentum) for interval in (1, 2, 3)),
    Case("shift_one", dtype=torch.bfloat16),
)


@pytest.mark.parametrize(("ranks", "cases"), [(2, OF_TWO), (3, OF_THREE), (4, OF_FOUR)])
def test_weights_and_peer_weights_are_those_of_the_formula(ranks: int, cases: Sequence[Case]) -> None:
    run_ranks(ranks, _cases, cases)


@pytest.mark.parametrize("hierarchical", [False, True])
def test_one_rank_alone_trains_as_without(hierarchical: bool) -> None:
    cases = [
        Case(mode, 2, how, momentum, hierarchical=hierarchical)
        for mode in BOTH
        for how in ("with_bagua", "wrapper unlisted")
    ]
    run_ranks(1, _cases, cases)


NODES = {
    "two nodes of two": (TWO_NODES_OF_TWO, [[0, 1], [2, 3]]),
    "nodes of two and one": (NODES_OF_TWO_AND_ONE, [[0, 1], [2]]),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_exchange_their_means(name: str) -> None:
    env, nodes = NODES[name]
    cases = [
        Case(mode, interval, how, momentum, dtype, hierarchical=True, steps=6, nodes=nodes)
        for mode in BOTH
        for interval, how, dtype in (
            (1, "with_bagua", torch.float32),
            (2, "wrapper unlisted unflattened", torch.float32),
            (1, "with_bagua", torch.bfloat16),
        )
    ]
    run_ranks(len(env), _cases, cases, env=env)


def test_all_ranks_on_one_node_are_one_node_also_if_they_are_odd() -> None:
    cases = [Case(mode, hierarchical=True, steps=4, nodes=[[0, 1, 2]]) for mode in BOTH]
    run_ranks(3, _cases, cases)


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


def _dtypes() -> None:
    rank, device = begin()
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


def test_a_bucket_for_every_dtype() -> None:
    run_ranks(3, _dtypes, env=NODES_OF_TWO_AND_ONE)


# --- rounds that are not one forward, one backward and one step ------------------------------------------------------


class Job(SideBySide):
    """Of two ranks."""

    def __init__(self, rank: int, device: torch.device, **options: Any) -> None:
        super().__init__(rank, device, Case(**options))


def _accumulation(job: Job) -> None:
    """In no_sync all gradients are those of the same weights, and there is one exchange."""
    for round_number in range(4):
        job.zero_grad()
        passes = [job.data() for _ in range(3)]
        with job.engine.no_sync():
            for data in passes[:2]:
                job.loss(data).backward()
        job.loss(passes[2]).backward()
        for data in passes:
            job.reference.backward(data)
        job.reference.set_weights(job.reference.exchange())
        job.step()
        job.reference.step()
        job.check(f"round {round_number} of three passes")


def _local_steps(job: Job) -> None:
    """All of it in no_sync: nothing is exchanged, and nothing is counted."""
    with job.engine.no_sync():
        for _ in range(3):
            data = job.data()
            train_step(job.model, job.optimizers, data[job.rank])
            job.reference.round(data, exchange=False)
            job.check("a local step")
    assert job.net.bagua_buckets[0].operation.exchanges == job.reference.exchanges


def _accumulation_with_communication(job: Job) -> None:
    """Each pass is a round; the second begins with the first one's mean."""
    for round_number in range(3):
        job.zero_grad()
        for data in (job.data(), job.data()):
            job.loss(data).backward()
            job.reference.backward(data)
            job.reference.set_weights(job.reference.exchange())
        job.step()
        job.reference.step()
        job.check(f"round {round_number} of two passes")


def _two_losses(job: Job) -> None:
    for round_number in range(3):
        job.zero_grad()
        data = job.data()
        loss = job.loss(data)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        for scale in (1, 2):
            for net, batch in zip(job.reference.nets, data, strict=True):
                (scale * loss_of(net, batch)).backward()
        job.reference.set_weights(job.reference.exchange())
        job.step()
        job.reference.step()
        job.check(f"two losses in round {round_number}")


def _gradient_penalty(job: Job) -> None:
    def penalised(net: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        output = net(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        again = net(batch[0])  # a forward pass after the inner backward pass
        return nn.functional.mse_loss(output + again, batch[1]) + gradient.square().mean()

    for round_number in range(3):
        job.zero_grad()
        data = job.data()
        penalised(job.model, data[job.rank]).backward()
        for net, batch in zip(job.reference.nets, data, strict=True):
            penalised(net, batch).backward()
        job.reference.set_weights(job.reference.exchange())
        job.step()
        job.reference.step()
        job.check(f"gradient penalty in round {round_number}")


def _forward_without_backward(job: Job) -> None:
    data = job.data()
    job.loss(data)  # begins an exchange, which nothing ends
    job.normal_round("after a forward pass alone")
    with torch.no_grad():
        job.loss(data)
    job.model.eval()
    job.loss(data)
    job.model.train()
    job.normal_round("after forward passes without gradients")
    job.loss(data)
    job.loss(data)
    job.normal_round("after two forward passes alone")


def _forward_on_one_rank(job: Job) -> None:
    """A trial on one rank does not make it count differently."""
    if job.rank == 0:
        job.loss(job.data())
    else:
        job.data()
    for _ in range(3):
        job.normal_round("after a forward pass on one rank")


def _loaded_after_a_trial(job: Job) -> None:
    """What was loaded after an exchange began is not overwritten by the mean of what it replaced."""
    job.loss(job.data())
    torch.manual_seed(9)
    other = [flat_weights(mlp(seed, job.device)) for seed in (20, 21)]
    state = mlp(20 + job.rank, job.device).state_dict()
    job.net.load_state_dict(state)
    job.reference.set_weights(other)
    # The exchange that was begun in vain counts.
    job.reference.exchanges += 1
    job.normal_round("after weights were loaded")


def _backward_in_no_sync(job: Job) -> None:
    """The mean is put in place before a step all the same, and the round goes on."""
    job.zero_grad()
    data = job.data()
    loss = job.loss(data)
    with job.engine.no_sync():
        loss.backward()
    job.reference.backward(data)
    job.reference.set_weights(job.reference.exchange())
    job.step()
    job.reference.step()
    job.check("backward in no_sync")
    data = job.data()
    train_step(job.model, job.optimizers, data[job.rank])
    job.reference.round(data, exchange=False)
    job.check("the end of that round")
    job.normal_round("the next round")


def _skipped_steps(job: Job) -> None:
    """A GradScaler skips the steps of one rank: all still exchange equally often."""
    scaler = torch.amp.GradScaler(job.device.type, init_scale=4.0, growth_interval=1000)
    for round_number in range(6):
        data = job.data()
        skip = {round_number % 3} & {0, 1} if round_number else {0, 1}
        job.zero_grad()
        scaler.scale(job.loss(data)).backward()
        if job.rank in skip:
            next(job.net.parameters()).grad[0] = torch.inf
        for optimizer in job.optimizers:
            scaler.step(optimizer)
        scaler.update()
        if skip:
            # Read by the next forward pass at the latest.
            with job.engine.no_sync(), torch.no_grad():
                job.loss(data)
        job.reference.round(data, skip=tuple(skip))
        job.check(f"round {round_number}, skipped on {skip}")


def _closures(job: Job) -> None:
    for round_number in range(3):
        data = job.data()

        def closure(data: Any = data) -> Tensor:
            job.net.zero_grad()
            loss = job.loss(data)
            loss.backward()
            return loss

        for optimizer in job.optimizers:
            optimizer.step(closure)
        job.reference.round(data)
        job.check(f"closure in round {round_number}")


def _clipping(job: Job) -> None:
    for _ in range(3):
        data = job.data()
        job.zero_grad()
        job.loss(data).backward()
        nn.utils.clip_grad_norm_(job.net.parameters(), 0.01)
        job.reference.backward(data)
        for net in job.reference.nets:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        job.reference.set_weights(job.reference.exchange())
        job.step()
        job.reference.step()
        job.check("clipped")


def _unseen_step(job: Job) -> None:
    """Something else than a listed optimizer changes the weights: an error, not an update that is lost."""
    data = job.data()
    job.loss(data).backward()
    with torch.no_grad():
        for parameter in job.net.parameters():
            parameter.add_(1.0)
    before = flat_weights(job.net)
    assert "give with_bagua those optimizers that are stepped" in message_of(RuntimeError, lambda: job.loss(data))
    assert torch.equal(flat_weights(job.net), before)
    job.net.load_state_dict(job.reference.nets[job.rank].state_dict())
    job.reference.exchanges += 1
    job.normal_round("after the error")


def _stale_graph(job: Job) -> None:
    """A graph of the weights before the mean cannot be used after it."""
    data = job.data()
    loss = job.loss(data)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        job.loss(data)  # puts the mean in place, as if the step had been skipped
    assert "modified by an inplace operation" in message_of(RuntimeError, loss.backward)


def _interrupted(job: Job) -> None:
    """A backward pass that raises leaves the exchange for the next one."""

    def stop(_: Any) -> None:
        raise KeyError("of the user")

    loss = job.loss(job.data())
    handle = job.net[0].weight.register_hook(stop)
    assert "of the user" in message_of(KeyError, loss.backward)
    handle.remove()
    job.normal_round("after an exception")


def _wrapped_again(job: Job) -> None:
    """A mean that is under way is put in place before all begin with rank 0's weights again."""
    for _ in range(2):
        job.normal_round("before")
    job.loss(job.data())
    weights = job.reference.exchange()[0]
    job.case.wrap(job.net, job.optimizers)
    job.reference = Reference(job.reference.nets[0], 2, job.case.make_optimizers, job.case.mode)
    job.reference.set_weights([weights, weights])
    job.model = job.net
    for _ in range(2):
        job.normal_round("after")


def _frozen_meanwhile(job: Job) -> None:
    """Freezing makes all begin with rank 0's weights again, but for those that are frozen: each rank keeps its own."""
    job.normal_round("before")
    job.net[0].requires_grad_(False)
    for net in job.reference.nets:
        net[0].requires_grad_(False)
    first = job.reference.weights()[0]
    job.reference.exchanges = 0
    frozen = flat_weights(job.net)[: 2 * 10 + 10].clone()
    trained = [name for name, parameter in job.net.named_parameters() if parameter.requires_grad]
    job.reference.set_weights([first[2 * 10 + 10 :]] * 2, trained)
    for _ in range(2):
        data = job.data()
        train_step(job.model, job.optimizers, data[job.rank])
        job.reference.zero_grad()
        job.reference.backward(data)
        means = mixed(job.reference.weights(trained), job.case.mode, job.reference.exchanges)
        job.reference.exchanges += 1
        job.reference.set_weights(means, trained)
        job.reference.step()
        job.check("with a frozen layer")
    assert torch.equal(flat_weights(job.net)[: 2 * 10 + 10], frozen)


SITUATIONS = (
    _accumulation,
    _local_steps,
    _accumulation_with_communication,
    _two_losses,
    _gradient_penalty,
    _forward_without_backward,
    _forward_on_one_rank,
    _loaded_after_a_trial,
    _backward_in_no_sync,
    _skipped_steps,
    _closures,
    _clipping,
    _unseen_step,
    _stale_graph,
    _interrupted,
    _wrapped_again,
    _frozen_meanwhile,
)
# Where the optimizers' steps are not seen, the mean is put in place at the end of the first backward pass.
NOT_UNLISTED = (_two_losses, _backward_in_no_sync, _unseen_step, _stale_graph, _wrapped_again, _frozen_meanwhile)


def _situations(mode: str, how: str) -> None:
    rank, device = begin()
    for situation in SITUATIONS:
        if "unlisted" in how and situation in NOT_UNLISTED:
            continue
        # After a round that is as all are, and before one.
        job = Job(rank, device, mode=mode, how=how)
        job.normal_round("the first round")
        situation(job)
        if situation not in (_stale_graph, _frozen_meanwhile):
            job.normal_round(f"after {situation.__name__}")


@pytest.mark.parametrize("how", ["with_bagua", "with_bagua unflattened", "wrapper unlisted"])
def test_unusual_rounds(how: str) -> None:
    run_ranks(2, _situations, "all" if how == "with_bagua" else "shift_one", how)


def _unused() -> None:
    """A parameter that the loss does not reach is mixed all the same, with and without looking for such ones."""
    rank, device = begin()
    for how in ("with_bagua", "wrapper", "looking for unused"):
        torch.manual_seed(0)
        net: Any = Branches().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        algorithm = DecentralizedAlgorithm(False)
        if how == "with_bagua":
            model = net.with_bagua([optimizer], algorithm)
        else:
            model = DistributedDataParallel(
                net, optimizers=[optimizer], algorithm=algorithm, find_unused_parameters=how != "wrapper"
            )
        with torch.no_grad():
            net.never.weight.add_(rank)
        expected = net.never.weight.detach() - rank + 0.5
        for step in range(3):
            x = batches(rank, 1, device, seed=step)[0][0]
            optimizer.zero_grad()
            model(x, take=("left",) if (rank + step) % 2 else ("right",)).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(net.never.weight.detach(), expected)
        # And the steps were made: each with its own gradient.
        assert net.left.weight.grad is not None or net.right.weight.grad is not None


def test_parameters_that_are_not_used_are_mixed() -> None:
    run_ranks(2, _unused)


# --- the exchange runs meanwhile -------------------------------------------------------------------------------------


def _overlap(mode: str) -> None:
    """It is not done before the backward pass has begun, and the pass does not wait for it."""
    rank, device = begin()
    kind = MeanOfPairs if mode == "shift_one" else MeanOfAll
    original = kind.mix
    backward_is_running = threading.Event()

    def mix(self: Any, values: Tensor, step: int) -> None:
        assert backward_is_running.wait(30), "the exchange was waited for before the backward pass"
        original(self, values, step)

    kind.mix = mix  # type: ignore[method-assign]
    job = Job(rank, device, mode=mode)
    job.net[0].weight.register_hook(lambda _: backward_is_running.set())
    for _ in range(3):
        backward_is_running.clear()
        job.normal_round("overlapped")


@pytest.mark.parametrize("mode", BOTH)
def test_forward_and_backward_run_while_weights_are_exchanged(mode: str) -> None:
    if os.environ.get("BAGUA_TEST_DEVICE") == "cuda":
        pytest.skip("with CUDA no thread of the host takes part in an exchange; this needs one to stop it")
    run_ranks(2, _overlap, mode)


def careful(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=1e-3)]


def _side_by_side() -> None:
    """Two modules, buffers that are broadcast, and a loss that the user averages, while weights are exchanged."""
    rank, device = begin()
    ranks = dist.get_world_size()
    jobs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net: Any = nn.Sequential(nn.Linear(2, 3000), nn.ReLU(), nn.Linear(3000, 4)).to(device)
        net.register_buffer("counter", torch.zeros(3, device=device))
        reference = Reference(net, ranks, careful, "all")
        optimizers = careful(net)
        model = DistributedDataParallel(net, optimizers=optimizers, algorithm=DecentralizedAlgorithm(False))
        jobs.append((model, net, optimizers, reference))
    for step in range(20):
        data = every_rank(step, ranks, device)
        total = 0.0
        for model, _, _, _ in jobs:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(data[rank][0]), data[rank][1])
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            total = total + loss
        total.backward()  # type: ignore[attr-defined]
        for _, net, optimizers, reference in jobs:
            for optimizer in optimizers:
                optimizer.step()
            # Buffers do not matter in training.
            reference.round(data)
            reference.check(net, rank, f"step {step}")


def test_other_communication_does_not_get_in_between() -> None:
    run_ranks(3, _side_by_side)


# --- state -----------------------------------------------------------------------------------------------------------


def _resumed(rank: int, device: torch.device, case: Case) -> None:
    ranks = dist.get_world_size()
    _, net, optimizers, _ = case.build(rank, ranks, device)
    data = batches(rank, 10, device)
    saved = io.BytesIO()
    for step, batch in enumerate(data):
        if step == 5:
            state = {"model": net.state_dict(), "engine": net.bagua_ddp.state_dict()}
            torch.save({**state, "optimizers": [one.state_dict() for one in optimizers]}, saved)
        train_step(net, optimizers, batch)

    other: Any = mlp(77 + rank, device).to(case.dtype)
    other_optimizers = case.make_optimizers(other)
    case.wrap(other, other_optimizers)
    other(data[0][0].to(case.dtype))  # begins an exchange, which is none of the state's
    saved.seek(0)
    loaded = torch.load(saved, map_location=device)
    other.load_state_dict(loaded["model"])
    for optimizer, one in zip(other_optimizers, loaded["optimizers"], strict=True):
        optimizer.load_state_dict(one)
    other.bagua_ddp.load_state_dict(loaded["engine"])
    for batch in data[5:]:
        train_step(other, other_optimizers, batch)
    check_equal(other, net, f"resumed {case}")
    assert other.bagua_train_step_counter == net.bagua_train_step_counter == 10
    for ours, theirs in zip(other.bagua_buckets, net.bagua_buckets, strict=True):
        assert torch.equal(ours._peer_weight, theirs._peer_weight)
        assert ours.operation.exchanges == theirs.operation.exchanges == -(-10 // case.interval)


def _all_resumed(cases: Sequence[Case]) -> None:
    rank, device = begin()
    for case in cases:
        _resumed(rank, device, case)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    cases = [
        Case(mode, interval, make_optimizers=momentum, dtype=dtype)
        for mode, interval, dtype in (
            ("all", 2, torch.float32),
            ("shift_one", 1, torch.bfloat16),
            ("shift_one", 3, torch.float32),
        )
    ]
    run_ranks(4, _all_resumed, cases)
    run_ranks(4, _all_resumed, [Case("shift_one", 2, hierarchical=True)], env=TWO_NODES_OF_TWO)


def _saved_while_under_way() -> None:
    """A state that is saved between forward and backward has the mean, and the next round uses it."""
    rank, device = begin()
    case = Case("all")
    _, net, optimizers, _ = case.build(rank, 2, device)
    first, second = batches(rank, 2, device)
    train_step(net, optimizers, first)
    net.zero_grad()
    loss = loss_of(net, second)
    state = copy.deepcopy((net.state_dict(), net.bagua_ddp.state_dict()))
    loss.backward()
    optimizers[0].step()

    _, other, other_optimizers, _ = case.build(rank, 2, device)
    other.load_state_dict(state[0])
    other.bagua_ddp.load_state_dict(state[1])
    train_step(other, other_optimizers, second)
    check_equal(other, net)


def test_a_state_of_an_exchange_that_is_under_way() -> None:
    run_ranks(2, _saved_while_under_way)


def _wrong_states() -> None:
    rank, device = begin()
    case = Case("all")
    _, net, _, _ = case.build(rank, 1, device)
    engine = net.bagua_ddp
    good = engine.state_dict()
    told = message_of(ValueError, lambda: engine.load_state_dict({**good, "algorithm": {}}))
    assert "peer_weights" in told
    larger = {**good["algorithm"], "peer_weights": [torch.zeros(3)]}
    told = message_of(ValueError, lambda: engine.load_state_dict({**good, "algorithm": larger}))
    assert "another model" in told
    plain: Any = mlp(0, device)
    plain.with_bagua([], GradientAllReduceAlgorithm())
    told = message_of(ValueError, lambda: plain.bagua_ddp.load_state_dict(good))
    assert "with the same algorithm" in told


def test_states_of_something_else_are_refused() -> None:
    run_ranks(1, _wrong_states)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_of_the_algorithm() -> None:
    algorithm: Any = Algorithm.init("decentralized")
    assert isinstance(algorithm, DecentralizedAlgorithm)
    assert (algorithm.hierarchical, algorithm.peer_selection_mode, algorithm.communication_interval) == (True, "all", 1)
    with pytest.raises(ValueError, match=r"'ring' is unknown; it is one of 'all', 'shift_one'"):
        DecentralizedAlgorithm(peer_selection_mode="ring")
    with pytest.raises(ValueError, match="communication_interval=0: must be at least 1"):
        DecentralizedAlgorithm(communication_interval=0)


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


def _operation_arguments() -> None:
    _, device = begin()
    bucket = _bucket(torch.zeros(6, device=device))
    flat = bucket.flattened_tensor()
    for wrong in (flat.clone()[:5], flat.double(), flat.view(2, 3).clone(), torch.zeros(12, device=device)[::2]):
        assert "peer_weight" in message_of(ValueError, lambda w=wrong: bucket.append_decentralized_synchronous_op(w))
    told = message_of(
        ValueError, lambda: bucket.append_decentralized_synchronous_op(flat.clone(), peer_selection_mode="one")
    )
    assert "'shift_one'" in told
    assert not bucket.ops


def test_arguments_of_the_operation() -> None:
    run_ranks(1, _operation_arguments)


# --- failure ---------------------------------------------------------------------------------------------------------


def _partner_dies() -> tuple[int, ...]:
    rank, device = begin()
    failure_report.ROLL_CALL_S = 1.0
    job = Job(rank, device, mode="shift_one")
    job.normal_round("all are there")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            job.normal_round("one is gone")
    except CollectiveError as error:
        return error.missing_ranks
    raise AssertionError("went on without the rank that died")


def test_a_partner_that_dies_is_named() -> None:
    if os.environ.get("BAGUA_TEST_DEVICE") == "cuda":
        pytest.skip("NCCL notices on the GPU, and torch's watchdog ends the process: nothing is raised")
    assert run_ranks(2, _partner_dies, expect_death={1}) == [(1,), None]
