"""Ranks whose models differ are told so, all of them, and where."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks import device_for, run_ranks
from torch import nn

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.initialization import init_process_group
from bagua.collectives.process_group import new_group, to_bagua_process_group
from bagua.engine.replica_check import check_replicas

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
        r"position 0, rank 0 has '0\.weight' \(float32 \[4, 3\].*; ranks 2, 3 have '0\.weight' \(float32 \[4, 1\]",
    ),
    "dtype": (replaced(3, nn.Parameter(torch.zeros(5).half()), (1,)), r"position 3.*float32 \[5\].*float16 \[5\]"),
    "lazy": (
        replaced(3, nn.parameter.UninitializedParameter(), (1,)),
        r"position 3.*; rank 1 has '1\.bias' \(float32 not initialised",
    ),
    "device": (replaced(3, nn.Parameter(torch.zeros(5, device="meta")), (1,)), r"position 3.*; rank 1 .*on meta"),
    "requires_grad": (freeze_on_3, r"position 1, .*trainable.*; rank 3 has '0\.bias' \(float32 \[4\], frozen"),
    "shorter": (shorten_on_2, r"position 3, rank 0 has '1\.bias' .*; rank 2 has no parameter there"),
    "longer": (lengthen_on_1, r"position 4, rank 0 has no parameter there; rank 1 has 'head\.weight'"),
    "order": (swap_on_all_but_0, r"position 0, rank 0 has '0\.weight' .*; ranks 1, 2, 3, 4 have '0\.bias'"),
    "nothing": (empty_on_0, r"position 0, rank 0 has no parameter there; ranks 1, 2, 3, 4 have '0\.weight'"),
    "long names": (
        name_by_rank,
        r"position 1, rank 0 has 'rank0\.x+\.\.\.' .*rank 1 .*rank 2 .*rank 3 .*; rank 4 has something else again",
    ),
}


def model_parameters(device: torch.device) -> Named:
    return list(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).to(device).named_parameters())


def check(named: Named, communicator: BaguaCommunicator) -> str | None:
    try:
        check_replicas(named, communicator)
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
    assert re.search(r"rank 2 has 'first difference' .*; ranks 1, 3 have the first difference further down", message)
    assert "later difference" not in message


def test_ranks_are_global(told: list[dict[str, str | None]]) -> None:
    assert "half" not in told[0]
    assert told[1]["half"] == told[3]["half"]
    assert re.search(r"rank 1 has '0\.weight' .*; rank 3 has 'other'", told[1]["half"] or "")
