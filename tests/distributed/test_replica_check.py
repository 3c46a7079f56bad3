"""Ranks whose models or optimizers differ are told so, all of them, and where."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import device_for, run_ranks
from torch import nn
from torch.optim import SGD, Adam, AdamW

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.initialization import init_process_group
from bagua.collectives.process_group import new_group, to_bagua_process_group
from bagua.replicas.replica_check import Replica
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

WORLD_SIZE = 5
Named = list[tuple[str, torch.Tensor]]


def renamed(place: int, name: str, ranks: tuple[int, ...]) -> Callable[[int, Named], None]:
    def change(rank: int, named: Named) -> None:
        if rank in ranks:
            named[place] = (name, named[place][1])

    return change


def replaced(place: int, parameter: torch.Tensor, ranks: tuple[int, ...]) -> Callable[[int, Named], None]:
    def change(rank: int, named: Named) -> None:
        if rank in ranks:
            named[place] = (named[place][0], parameter)

    return change


def freeze_on_3(rank: int, named: Named) -> None:
    named[1][1].requires_grad_(rank != 3)


def shorten_on_2(rank: int, named: Named) -> None:
    if rank == 2:
        del named[-1]


def lengthen_on_1(rank: int, named: Named) -> None:
    if rank == 1:
        named.append(("head.weight", nn.Parameter(torch.zeros(1))))


def swap_on_all_but_0(rank: int, named: Named) -> None:
    if rank:
        named[0], named[1] = named[1], named[0]


def empty_on_0(rank: int, named: Named) -> None:
    if rank == 0:
        named.clear()


def name_by_rank(rank: int, named: Named) -> None:
    named[1] = (f"rank{rank}." + "x" * 10_000, named[1][1])


# What is changed, and what the message has to say of it.
CASES: dict[str, tuple[Callable[[int, Named], None], str]] = {
    "name": (
        renamed(2, "other", (1,)),
        r"position 2, rank 0 has '1\.weight' \(float32 \[5, 4\], trainable, on \w+\); rank 1 has 'other' \(float32",
    ),
    "shape": (
        replaced(0, nn.Parameter(torch.zeros(4, 1)), (2, 3)),
        r"position 0, rank 0 has '0\.weight' \(float32 \[4, 3\].*; ranks 2 and 3 have '0\.weight' \(float32 \[4, 1\]",
    ),
    "dtype": (replaced(3, nn.Parameter(torch.zeros(5).half()), (1,)), r"position 3.*float32 \[5\].*float16 \[5\]"),
    "lazy": (
        replaced(3, nn.parameter.UninitializedParameter(), (1,)),
        r"position 3.*; rank 1 has '1\.bias' \(float32 not initialized",
    ),
    "device": (replaced(3, nn.Parameter(torch.zeros(5, device="meta")), (1,)), r"position 3.*; rank 1 .*on meta"),
    "requires_grad": (freeze_on_3, r"position 1, .*trainable.*; rank 3 has '0\.bias' \(float32 \[4\], frozen"),
    "shorter": (shorten_on_2, r"position 3, rank 0 has '1\.bias' .*; rank 2 has no parameters there"),
    "longer": (lengthen_on_1, r"position 4, rank 0 has no parameters there; rank 1 has 'head\.weight'"),
    "order": (swap_on_all_but_0, r"position 0, rank 0 has '0\.weight' .*; ranks 1 to 4 have '0\.bias'"),
    "nothing": (empty_on_0, r"position 0, rank 0 has no parameters there; ranks 1 to 4 have '0\.weight'"),
    "long names": (
        name_by_rank,
        r"position 1, rank 0 has 'rank0\.x+\.\.\.' .*rank 1 .*rank 2 .*rank 3 .*; rank 4 has other values",
    ),
}


def model_parameters(device: torch.device) -> Named:
    return list(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).to(device).named_parameters())


def check(named: Named, communicator: BaguaCommunicator) -> str | None:
    try:
        Replica(named).check(communicator)
    except RuntimeError as error:
        return str(error)
    return None


def check_all_cases() -> dict[str, str | None]:
    init_process_group()
    rank = dist.get_rank()
    device = device_for(rank)
    communicator = to_bagua_process_group().get_global_communicator()
    assert isinstance(communicator, BaguaCommunicator)
    messages = {}
    for case, (change, _) in CASES.items():
        named = model_parameters(device)
        change(rank, named)
        messages[case] = check(named, communicator)
        torch.manual_seed(rank)  # values do not matter
        messages[f"equal, after {case}"] = check(model_parameters(device), communicator)

    named = model_parameters(device)
    renamed(2, "first difference", (2,))(rank, named)
    renamed(3, "later difference", (1, 3))(rank, named)
    messages["later"] = check(named, communicator)

    half = new_group([1, 3])
    if half.is_member:
        communicator = half.get_global_communicator()
        assert isinstance(communicator, BaguaCommunicator)
        named = model_parameters(device)
        renamed(0, "other", (3,))(rank, named)
        messages["half"] = check(named, communicator)
    return messages


@pytest.fixture(scope="module")
def told() -> list[dict[str, str | None]]:
    """By rank: case -> message."""
    return run_ranks(WORLD_SIZE, check_all_cases)


@pytest.mark.parametrize("case", CASES)
def test_difference_is_named_on_all_ranks(told: list[dict[str, str | None]], case: str) -> None:
    (message,) = {messages[case] for messages in told}
    assert message is not None
    assert re.search(CASES[case][1], message)
    assert "same parameters in the same order" in message
    assert len(message) < 1500


@pytest.mark.parametrize("case", CASES)
def test_equal_replicas_pass_also_after_a_failure(told: list[dict[str, str | None]], case: str) -> None:
    assert [messages[f"equal, after {case}"] for messages in told] == [None] * WORLD_SIZE


def test_only_the_first_difference_is_described(told: list[dict[str, str | None]]) -> None:
    (message,) = {messages["later"] for messages in told}
    assert message is not None
    assert re.search(
        r"rank 2 has 'first difference' .*; ranks 1 and 3 have the first difference at a later position", message
    )
    assert "later difference" not in message


def test_ranks_are_global(told: list[dict[str, str | None]]) -> None:
    assert "half" not in told[0]
    assert told[1]["half"] == told[3]["half"]
    assert re.search(r"rank 1 has '0\.weight' .*; rank 3 has 'other'", told[1]["half"] or "")


# --- optimizers ------------------------------------------------------------------------------------------------------


class OwnSGD(SGD):
    """Not what SGD is, though it is one."""


# What the ranks have, and what the message has to say of it: None if that is no difference.
OPTIMIZERS: dict[str, tuple[list[list[type[Any]]], str | None]] = {
    "one fewer": ([[SGD, SGD], [SGD]], "numbers of optimizers: rank 0 has 2; rank 1 has 1.\nPass the same"),
    "one more": ([[SGD], [SGD, Adam]], "numbers of optimizers: rank 0 has 1; rank 1 has 2.\nPass the same"),
    "none on 0": ([[], [SGD]], "numbers of optimizers: rank 0 has 0; rank 1 has 1.\n"),
    "the first left out": ([[SGD, Adam], [Adam]], "numbers of optimizers: rank 0 has 2; rank 1 has 1.\n"),
    "class": (
        [[SGD], [Adam]],
        "optimizers. At position 0, rank 0 has torch.optim.sgd.SGD; rank 1 has torch.optim.adam.Adam.\n",
    ),
    "class of the second": ([[SGD, AdamW], [SGD, Adam]], "At position 1, rank 0 has torch.optim.adamw.AdamW; rank 1 "),
    "order": (
        [[SGD, Adam], [Adam, SGD]],
        "At position 0, rank 0 has torch.optim.sgd.SGD; rank 1 has torch.optim.adam.",
    ),
    "subclass": ([[SGD], [OwnSGD]], f"rank 1 has {OwnSGD.__module__}.OwnSGD.\n"),
    "the same": ([[OwnSGD, Adam], [OwnSGD, Adam]], None),
    "none": ([[], []], None),
}


def wrap_with_all_optimizers(how: str) -> dict[str, str | None]:
    init_process_group()
    rank = dist.get_rank()
    device = device_for(rank)
    messages: dict[str, str | None] = {}
    for case, (kinds, _) in OPTIMIZERS.items():
        layers = [nn.Linear(2, 2) for _ in range(2)]
        net: Any = nn.Sequential(*layers).to(device)
        optimizers: list[Any] = [kind(net.parameters(), lr=0.1) for kind in kinds[rank]]
        for number, optimizer in enumerate(optimizers if len(optimizers) > 1 else []):
            optimizer.param_groups[0]["params"] = list(layers[number].parameters())
        try:
            if how == "with_bagua" and any(kinds):  # which refuses to have no optimizer on any rank
                model = net.with_bagua(optimizers, GradientAllReduceAlgorithm())
            else:
                model = DistributedDataParallel(net, optimizers=optimizers)
        except RuntimeError as error:
            messages[case] = str(error)
            continue
        messages[case] = None
        model(torch.ones(1, 2, device=device)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return messages


@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
def test_different_optimizers_are_named_on_all_ranks(how: str) -> None:
    """At once: where one rank has one more, gloo would let both wait for half an hour."""
    first, second = run_ranks(2, wrap_with_all_optimizers, how)
    assert first == second
    for case, (_, expected) in OPTIMIZERS.items():
        message = first[case]
        if expected is None:
            assert message is None, case
        else:
            assert message is not None, case
            assert message.startswith("The ranks have different "), message
            assert expected in message
            assert message.endswith("on every rank, of the same classes in the same order."), message


def wrap_with_other_settings() -> dict[str, str | None]:
    init_process_group()
    rank = dist.get_rank()
    device = device_for(rank)
    algorithms = [GradientAllReduceAlgorithm(), ByteGradAlgorithm()]
    net: Any = nn.Linear(2, 2).to(device)
    wraps: dict[str, Callable[[], Any]] = {
        "algorithm": lambda: net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], algorithms[rank]),
        "hierarchical": lambda: net.with_bagua(
            [torch.optim.SGD(net.parameters(), lr=0.1)], ByteGradAlgorithm(hierarchical=rank == 0)
        ),
        "interval": lambda: net.with_bagua(
            [torch.optim.SGD(net.parameters(), lr=0.1)], DecentralizedAlgorithm(communication_interval=1 + rank)
        ),
        "unused": lambda: DistributedDataParallel(net, find_unused_parameters=rank == 1),
        "cap": lambda: DistributedDataParallel(net, bucket_cap_mb=[25, 0.001][rank]),
        "views": lambda: DistributedDataParallel(net, gradient_as_bucket_view=rank == 1),
        "environment": lambda: net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], algorithms[0]),
    }
    messages: dict[str, str | None] = {}
    for case, wrap in wraps.items():
        if case == "environment" and rank == 1:
            os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "1000"
        try:
            model = wrap()
        except RuntimeError as error:
            messages[case] = str(error)
            continue
        messages[case] = None
        model(torch.ones(1, 2, device=device)).sum().backward()
    return messages


def test_different_settings_are_named_on_all_ranks() -> None:
    """Where gloo would end the process, for messages of other sizes, and NCCL would hang."""
    first, second = run_ranks(2, wrap_with_other_settings)
    assert first == second
    expected = {
        "algorithm": "rank 0 has the algorithm gradient_allreduce; rank 1 has the algorithm bytegrad",
        "hierarchical": "rank 0 has hierarchical=True; rank 1 has hierarchical=False.\n",
        "interval": "rank 0 has communication_interval=1; rank 1 has communication_interval=2.\n",
        "unused": "rank 0 has find_unused_parameters=False; rank 1 has find_unused_parameters=True.\n",
        "cap": "rank 0 has buckets of 26214400 bytes (the first: 1048576 bytes); rank 1 has buckets of 1048 bytes (",
        "environment": "rank 0 has buckets of default (the first: 1048576 bytes); rank 1 has buckets of 1000 bytes (",
    }
    assert first.pop("views") is None, "a rank's own business"
    assert set(first) == set(expected)
    for case, text in expected.items():
        assert (first[case] or "").startswith("The ranks have different settings: " + text), first[case]


def check_optimizers_of_five() -> list[str | None]:
    init_process_group()
    rank = dist.get_rank()
    communicator = to_bagua_process_group().get_global_communicator()
    assert isinstance(communicator, BaguaCommunicator)
    layer = nn.Linear(2, 2).to(device_for(rank))

    def message(kinds: list[type[Any]], named: Named) -> str | None:
        try:
            Replica(named, optimizers=[kind(layer.parameters(), lr=0.1) for kind in kinds]).check(communicator)
        except RuntimeError as error:
            return str(error)
        return None

    named: Named = list(layer.named_parameters())
    spawned = type("Own", (SGD,), {"__module__": "__main__" if rank == 0 else "__mp_main__"})
    long = type("Own" * 1000, (SGD,), {})
    return [
        message([SGD, [SGD, Adam, Adam, SGD, AdamW][rank], [SGD, SGD, SGD, Adam, Adam][rank]], named),
        message([SGD] * [2, 2, 1, 3, 1][rank], named),
        message([SGD if rank < 4 else Adam], named if rank < 3 else named[:1]),
        message([long if rank else SGD], named),
        message([spawned], named),
    ]


def test_optimizers_of_many_ranks() -> None:
    told = run_ranks(WORLD_SIZE, check_optimizers_of_five)
    assert told == [told[0]] * WORLD_SIZE
    classes, numbers, parameters_first, long, spawned = told[0]
    assert (
        "At position 1, rank 0 has torch.optim.sgd.SGD; ranks 1 and 2 have torch.optim.adam.Adam; rank 4 has"
        " torch.optim.adamw.AdamW; rank 3 has the first difference at a later position.\n" in classes
    )
    assert "numbers of optimizers: rank 0 has 2; ranks 2 and 4 have 1; rank 3 has 3.\n" in numbers
    assert "different parameters. At position 1, " in parameters_first
    assert "optimizers" not in parameters_first
    assert "ranks 1 to 4 have " in long
    assert len(long) < 500
    assert spawned is None, "the main program, run here and spawned there"
