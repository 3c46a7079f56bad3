"""Low-precision decentralized training, against all ranks simulated in one process from the formula, with the reference
quantiser; and the copies of the neighbours' weights, which are theirs to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.decentralized import check_formula, several
from support.low_precision_ring import Case, Job, bucket_names, check_replicas
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.replicas import flat_weights, gathered, momentum, sgd, train_step
from support.round_situations import SITUATIONS
from support.sweeps import rest_is_deep
from support.training import (
    NODES_OF_TWO_AND_ONE,
    TWO_NODES_OF_TWO,
    MixedDtypes,
    batches,
    launched_on,
    message_of,
    mlp,
)
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import LowPrecisionDecentralizedAlgorithm
from bagua.torch_api.bucket import BaguaBucket

SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "1000"}


HOWS = ("with_bagua", "with_bagua unflattened", "wrapper", "wrapper unflattened")
CASES = {
    1: (Case(make_optimizers=momentum), Case("", 2, "wrapper unflattened", several, hierarchical=True)),
    2: (
        *(Case("", interval) for interval in (1, 3)),
        *(Case("", 2, how, several, steps=5) for how in HOWS[1:3]),
        *(Case(dtype=dtype, steps=5) for dtype in (torch.bfloat16, torch.float16)),
    ),
    3: (Case(make_optimizers=momentum), Case("", 2, "with_bagua unflattened")),
    4: (Case(make_optimizers=momentum), Case("", 3, "wrapper")),
}
OTHERS = {
    2: (Case("", 2), *(Case("", 2, how, several, steps=5) for how in (HOWS[0], *HOWS[3:]))),
    3: (Case(dtype=torch.bfloat16, steps=5),),
    4: (Case(dtype=torch.float16, steps=5),),
}


@pytest.mark.deep
@pytest.mark.parametrize("ranks", OTHERS)
def test_other_combinations_follow_the_formula(ranks: int) -> None:
    run_ranks(ranks, check_formula, OTHERS[ranks], env=SMALL_BUCKETS)


@pytest.mark.parametrize("ranks", rest_is_deep([*CASES], 0, 1, 3))
def test_weights_are_those_of_the_formula_and_replicas_those_of_the_neighbours(ranks: int) -> None:
    buckets = run_ranks(ranks, check_formula, CASES[ranks], env=SMALL_BUCKETS)
    assert min(buckets) > 1


NODES = {
    "two nodes of two": (TWO_NODES_OF_TWO, [[0, 1], [2, 3]]),
    "nodes of two and one": (NODES_OF_TWO_AND_ONE, [[0, 1], [2]]),
    "four nodes": (launched_on(1, 1, 1, 1), [[0], [1], [2], [3]]),
    "one node": (launched_on(3), [[0, 1, 2]]),
}


@pytest.mark.parametrize("name", rest_is_deep([*NODES], 1, 2))
def test_nodes_form_the_ring(name: str) -> None:
    env, nodes = NODES[name]
    cases = [
        Case("", interval, how, momentum, dtype, hierarchical=True, steps=5, nodes=nodes)
        for interval, how, dtype in (
            (1, "with_bagua", torch.float32),
            (2, "with_bagua unflattened", torch.float32),
            (1, "with_bagua", torch.bfloat16),
        )
    ]
    run_ranks(len(env), check_formula, cases, env=env)


@on_ranks(3)
def test_dtypes_that_cannot_be_compressed_are_exchanged_as_differences_too(rank: int, device: torch.device) -> None:
    """float64 and complex numbers travel as bytes as well, and are added as they are."""
    torch.manual_seed(0)
    net: Any = MixedDtypes().to(device)
    net.empty = nn.Parameter(torch.zeros(0, 3, device=device))
    before = flat_weights(net, [name for name, _ in net.named_parameters()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net.with_bagua([optimizer], LowPrecisionDecentralizedAlgorithm(False))
    for step in range(3):
        optimizer.zero_grad()
        net(batches(rank, 1, device, seed=step)[0][0]).square().mean().backward()
        optimizer.step()
        check_replicas(net, [[0], [1], [2]], f"step {step}")
    assert {bucket.dtype for bucket in net.bagua_buckets} >= {torch.float64, torch.complex64, torch.bfloat16}
    for bucket in net.bagua_buckets:
        if bucket.dtype != torch.bfloat16 and bucket._weight.numel():
            assert not torch.equal(*gathered(bucket._weight)[:2]), bucket.dtype
    assert not torch.equal(before, flat_weights(net))


# --- rounds that are not one forward, one backward and one step ------------------------------------------------------


def _accumulation_with_communication(job: Job) -> None:
    """Each pass is a round; what a pass owes is made up for when the next begins."""
    for _ in range(3):
        job.zero_grad()
        first, second = job.data(), job.data()
        job.loss(first).backward()
        job.reference.backward(first)
        job.reference.exchange()
        job.loss(second).backward()
        job.reference.backward(second)
        job.step()
        job.reference.step()
        job.reference.exchange()
        job.check("two passes")


def _one_of_two_optimizers(job: Job) -> None:
    """The exchange comes with the next round then; and not before the last optimizer's step otherwise."""
    for number in range(3):
        data = job.data()
        job.zero_grad()
        job.loss(data).backward()
        job.reference.zero_grad()
        job.reference.backward(data)
        before = [bucket._weight.clone() for bucket in job.net.bagua_buckets]
        job.optimizers[number % 2].step()
        for optimizers in job.reference.optimizers:
            optimizers[number % 2].step()
        for bucket, weight in zip(job.net.bagua_buckets, before, strict=True):
            assert torch.equal(bucket._weight, weight), "an exchange before the other optimizer's step"
        with torch.no_grad():
            job.loss(data)
        job.reference.exchange()
        job.check("one of two")
    job.optimizers.reverse()
    job.normal_round("in the other order")
    job.optimizers.reverse()


def _step_twice(job: Job) -> None:
    """A second step of the same gradients is no round."""
    data = job.data()
    train_step(job.model, job.optimizers, data[job.rank])
    job.reference.round(data)
    job.step()
    job.reference.step()
    job.reference.check(job.net, job.rank, "a second step")


def _rebuilt(job: Job) -> None:
    """Other buckets without a broadcast: what is known of the neighbours is kept."""
    job.engine.rebuild_buckets(dataclasses.replace(job.engine.setup, bucket_bytes=400, first_bucket_bytes=None))
    _share_out(job, _kept(job))
    check_replicas(job.net, job.reference.nodes, "rebuilt")
    for _ in range(2):
        job.normal_round("after buckets were rebuilt")


def _kept(job: Job) -> dict[str, Sequence[Tensor]]:
    """The reference's replicas of each parameter."""
    return {
        name: part
        for names, replicas in zip(job.reference.buckets, job.reference.replicas, strict=True)
        for name, part in _parts(job.net, names, replicas)
    }


def _share_out(job: Job, kept: dict[str, Sequence[Tensor]]) -> None:
    """Gives the reference the buckets that there are now, with these replicas."""
    job.reference.buckets = bucket_names(job.net)
    job.reference.replicas = [
        [torch.cat([kept[name][place] for name in names]) for place in range(2)] for names in job.reference.buckets
    ]


def _parts(net: nn.Module, names: Sequence[str], replicas: Sequence[Tensor]) -> Any:
    parameters = dict(net.named_parameters())
    sizes = [parameters[name].numel() for name in names]
    return zip(names, zip(*(torch.split(replica, sizes) for replica in replicas), strict=True), strict=True)


def _wrapped_again(job: Job) -> None:
    """All begin with rank 0's weights; an exchange that is owed is made before."""
    job.zero_grad()
    data = job.data()
    job.loss(data).backward()
    job.reference.exchange()
    job.model = job.case.wrap(job.net, job.optimizers)
    job.reference.set_weights([job.reference.weights()[0]] * 2)
    job.reference.seed(bucket_names(job.net))
    for _ in range(2):
        job.normal_round("after")


def _frozen_meanwhile(job: Job) -> None:
    job.net[0].requires_grad_(False)
    for net in job.reference.nets:
        net[0].requires_grad_(False)
    trained = [name for name, parameter in job.net.named_parameters() if parameter.requires_grad]
    kept = _kept(job)
    data = job.data()
    train_step(job.model, job.optimizers, data[job.rank])  # in which buckets are made anew
    assert sorted(name for names in bucket_names(job.net) for name in names) == sorted(trained)
    _share_out(job, kept)
    job.reference.round(data)
    job.check("with a frozen layer")
    job.normal_round("with a frozen layer")
    kept |= _kept(job)
    for net in (job.net, *job.reference.nets):
        net[0].requires_grad_(True)
    with torch.no_grad():
        job.loss(job.data())
    _share_out(job, kept)
    job.normal_round("unfrozen again")


OWN = (
    (_accumulation_with_communication, sgd),
    (_one_of_two_optimizers, several),
    (_step_twice, several),
    (_rebuilt, momentum),
    (_wrapped_again, sgd),
    (_frozen_meanwhile, sgd),
)


@pytest.mark.parametrize("how", rest_is_deep(HOWS, 1))
@on_ranks(2)
def test_unusual_rounds(rank: int, device: torch.device, how: str) -> None:
    for situation, make in (*((situation, sgd) for situation in SITUATIONS), *OWN):
        job = Job(rank, device, how=how, make_optimizers=make)
        job.normal_round("the first round")
        situation(job)
        job.normal_round(f"after {situation.__name__}")


@on_ranks(2)
def test_weights_that_are_not_finite_are_seen(rank: int, device: torch.device) -> None:
    """A weight that is not finite makes its range so, here and in time everywhere: nothing hides it."""
    job = Job(rank, device)
    with torch.no_grad():
        if rank == 1:
            next(job.net.parameters()).view(-1)[0] = torch.inf
    for _ in range(2):
        train_step(job.model, job.optimizers, job.data()[rank])
    assert not torch.isfinite(flat_weights(job.net)).all()


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
    train_step(net, optimizers, batches(rank, 1, device)[0])
    check_replicas(net, [[0], [1]], "one layer")
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
