"""Parts of a model that are trained in turn, the others frozen meanwhile, with every algorithm that exchanges weights:
an exchange covers what was trained since it was last exchanged, frozen at that moment or not. Orders of parts, steps in
hooks and states are drawn: test_step_programs.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.local_steps import RATE, batch, loss_of, make_step, model_of
from support.rank_tests import on_ranks
from support.sweeps import rest_is_deep
from support.training import gathered, message_of
from support.weight_exchanges import PARTS, RoundsByHand, Turns, freeze_all_but
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

FIRST, MIDDLE, LAST = PARTS
RING = ("low_precision_decentralized", {"hierarchical": False})
MEANS = ("decentralized", {"hierarchical": False})
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("local_sgd", {"sync_every": 2}),
    ("diloco", {"sync_every": 4}),
    ("streaming_diloco", {"sync_every": 4}),
    ("streaming_diloco", {"sync_every": 6, "fragments": 2, "delay": 1, "alpha": 0.25}),
    MEANS,
    ("decentralized", {"hierarchical": False, "communication_interval": 2}),
    RING,
    ("low_precision_decentralized", {"hierarchical": False, "communication_interval": 2}),
)
# One of each kind: rounds, rounds of fragments, means and the ring; of the last two one with an interval.
CHOSEN = (CASES[0], CASES[3], CASES[5], CASES[6])
cases = pytest.mark.parametrize("cases", rest_is_deep([(CHOSEN,), (tuple(c for c in CASES if c not in CHOSEN),)], 0))


def spread(net: nn.Module, part: str) -> float:
    """How far the ranks' replicas of a part are apart."""
    flats = gathered(torch.cat([one.detach().reshape(-1) for one in getattr(net, part).parameters()]))
    return max((one - flats[0]).abs().max().item() for one in flats)


@on_ranks(2)
def test_steps_in_hooks_while_gradients_are_sent(rank: int, device: torch.device) -> None:
    """Refused, by hooks before and after wrapping, also while an algorithm warms up. Nothing blames an exception."""
    for name, options in (
        ("gradient_allreduce", {}),
        ("bytegrad", {"hierarchical": False}),
        ("local_sgd", {"sync_every": 2, "warmup_steps": 2}),
    ):
        for is_before in (True, False):
            model: Any = model_of(rank).to(device)
            optimizers = {one: torch.optim.SGD([one], lr=RATE) for one in model.parameters()}

            def register(model: Any = model, optimizers: Any = optimizers) -> None:
                for one in model.parameters():
                    one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())

            if is_before:
                register()
            group = bagua.communication.new_group([0, 1])  # what a refused pass leaves behind ends with it
            bagua.with_bagua(model, [*optimizers.values()], Algorithm.init(name, **options), process_group=group)
            if not is_before:
                register()
            told = message_of(RuntimeError, lambda: make_step(model, [], 0, rank))  # noqa: B023
            assert "stepped within the backward pass" in told
            assert "exception" not in told
            dist.barrier()


@on_ranks(2)
def test_a_step_within_the_backward_pass_of_another_module(rank: int, device: torch.device) -> None:
    """Nothing of it is being sent."""
    model: Any = model_of(rank).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    bagua.with_bagua(model, [optimizer], Algorithm.init("gradient_allreduce"))
    outer: Any = model_of(3).to(device)
    bagua.with_bagua(outer, [torch.optim.SGD(outer.parameters(), lr=RATE)], Algorithm.init("gradient_allreduce"))
    loss = loss_of(outer, batch(0, rank).to(device))

    def train(_: Tensor) -> None:
        with torch.enable_grad():
            make_step(model, [optimizer], 1, rank)

    loss.register_hook(train)
    loss.backward()
    for net in (model, outer):
        every = gathered(torch.cat([one.detach().reshape(-1) for one in net.parameters()]))
        assert torch.equal(*every)
    assert not torch.equal(model[0].weight, outer[0].weight)


@cases
@on_ranks(2)
def test_what_is_frozen_for_good_is_left_alone(cases: tuple[Any, ...]) -> None:
    """After the exchange of its last training, it is bitwise what it was, on all ranks, whatever momentum is left."""
    for case in cases:
        turns = Turns(case)
        for _ in range(3):
            turns.turn(PARTS)
        for _ in range(6):
            turns.turn([LAST])
        frozen = copy.deepcopy(turns.net.first.state_dict())
        if case[0] in ("local_sgd", "diloco") or case == MEANS:
            assert spread(turns.net, FIRST) == 0
        for _ in range(6):
            turns.turn([LAST])
            assert all(torch.equal(one, frozen[name]) for name, one in turns.net.first.named_parameters()), case
        turns.finish()
        if isinstance(turns.hand, RoundsByHand):
            assert turns.net.bagua_ddp.stats().steps == turns.hand.exchanges, "freezing begins or ends no round"
        else:
            for _ in range(4):
                turns.turn([LAST])
            names = {record.name for bucket in turns.net.bagua_buckets for record in bucket.records}
            assert names == {"last.weight", "last.bias"}, "nothing else is sent"


@cases
@on_ranks(2)
def test_a_part_that_is_replaced_or_converted_before_it_was_trained(
    rank: int, device: torch.device, cases: tuple[Any, ...]
) -> None:
    """Nothing of it is due. What was trained and does not fit any more is an error."""
    for name, options in cases:
        for change in ("convert", "delete"):
            model: Any = nn.ModuleDict({"one": model_of(0), "other": model_of(1)}).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            model.forward = lambda x, model=model: model["one"](x)
            bagua.with_bagua(model, [optimizer], Algorithm.init(name, **options), find_unused_parameters=True)
            model["other"].requires_grad_(False)
            if change == "convert":
                model["other"].half()
            else:
                del model["other"]
            for number in range(8):
                make_step(model, [optimizer], number, rank)
            flats = gathered(torch.cat([one.detach().reshape(-1) for one in model["one"].parameters()]))
            assert (flats[0] - flats[1]).abs().max() < 0.5, (name, change)
    for name, options in (("local_sgd", {"sync_every": 2}), MEANS, RING):
        model = nn.ModuleDict({"one": model_of(0), "other": model_of(1)}).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        model.forward = lambda x, model=model: model["one"](x)
        group = bagua.communication.new_group([0, 1])
        bagua.with_bagua(model, [optimizer], Algorithm.init(name, **options), process_group=group)
        make_step(model, [optimizer], 0, rank)
        if name == RING[0]:
            loss_of(model, batch(1, rank).to(device)).backward()
        model["other"].double().requires_grad_(False)
        told = message_of(RuntimeError, lambda: make_step(model, [optimizer], 1, rank))  # noqa: B023
        assert "other.4.bias" in told
        assert "float64" in told


@on_ranks(2)
def test_ranks_that_freeze_different_parts(rank: int, device: torch.device) -> None:
    """Named before weights are mixed."""
    group = bagua.communication.new_group([0, 1])
    model: Any = model_of(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    bagua.with_bagua(model, [optimizer], Algorithm.init("diloco", sync_every=1), process_group=group)
    model[2 * rank].requires_grad_(False)
    told = message_of(RuntimeError, lambda: make_step(model, [optimizer], 0, rank))
    assert f"Ranks [{1 - rank}] exchange other parameters than this rank" in told


def _older(state: dict[str, Any]) -> dict[str, Any]:
    """As it was saved before states had names."""
    algorithm = {key: value for key, value in state["algorithm"].items() if key not in ("names", "unexchanged")}
    for key in ("kept", "pending"):
        algorithm.pop(key, None)
    if algorithm.get("under_way") is not None:
        algorithm["under_way"] = []
    return {**state, "algorithm": algorithm}


@cases
@on_ranks(2)
def test_states_of_earlier_versions(cases: tuple[Any, ...]) -> None:
    for case in cases:
        turns = Turns(case)
        for _ in range(4):
            turns.turn(PARTS)
        turns.save()
        *rest, hand, (engine, *states) = turns.saved
        hand.unexchanged = set(hand.weights[0])  # nobody knows
        older = _older(engine)
        if getattr(hand, "means", None):
            older["algorithm"]["under_way"] = [
                bucket.flattened_tensor().clone() for bucket in turns.net.bagua_algorithm._fragment.buckets
            ]
        turns.saved = *rest, hand, (older, *states)
        turns.load()
        turns.finish()
        # The plan was that of what was trained.
        freeze_all_but(turns.net, (LAST,))
        if case[0] in ("diloco", "low_precision_decentralized", "decentralized"):
            fresh = Turns(case, frozen=(FIRST, MIDDLE))
            told = message_of(ValueError, lambda: fresh.net.bagua_ddp.load_state_dict(older))  # noqa: B023
            assert "where the same parameters are frozen as when it was saved" in told


@on_ranks(2)
def test_async_averages_both_parts(rank: int, device: torch.device) -> None:
    """Freezing in turn ends no averaging; what is frozen when it is resumed is left out."""
    model: Any = model_of(0).to(device)
    halves = (model[:2], model[2:])
    optimizers = [torch.optim.SGD(half.parameters(), lr=RATE) for half in halves]
    bagua.with_bagua(model, optimizers, Algorithm.init("async", sync_interval_ms=1))
    plan = list(model.bagua_buckets)

    def train(turns: int) -> None:
        for number in range(turns):
            for index, half in enumerate(halves):
                half.requires_grad_(index == number % 2)
            make_step(model, [optimizers[number % 2]], number, rank)

    train(6)
    assert all(one is other for one, other in zip(model.bagua_buckets, plan, strict=True))
    model.bagua_algorithm.abort(model)
    flats = gathered(torch.cat([one.detach().reshape(-1) for one in model.parameters()]))
    assert torch.equal(*flats)
    frozen = model[2].weight.clone()
    for index, half in enumerate(halves):
        half.requires_grad_(index == 0)
    model.bagua_algorithm.resume(model)
    names = {record.name for bucket in model.bagua_buckets for record in bucket.records}
    assert names == {"0.weight", "0.bias"}
    make_step(model, [optimizers[0]], 7, rank)
    model.bagua_algorithm.abort(model)
    assert torch.equal(model[2].weight, frozen)
    model.bagua_algorithm.resume(model)
    train(4)
    model.bagua_algorithm.abort(model)
    assert torch.equal(*gathered(torch.cat([one.detach().reshape(-1) for one in model.parameters()])))
