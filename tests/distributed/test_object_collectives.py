"""Python objects between ranks: what draws of them (test_reductions_drawn.py) do not reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks
from support.training import begin

import bagua.torch_api as bagua
from bagua.collectives import byte_transport, object_collectives
from bagua.collectives.object_collectives import all_gather_object, broadcast_object
from bagua.collectives.process_group import _get_default_group
from bagua.torch_api import communication

OBJECTS: list[Any] = [None, 0, "", "some text", {"a": [1, 2.5], "b": (None, b"\0" * 70_000)}, torch.float16, [[]] * 9]


@on_ranks(3)
def test_broadcast() -> None:
    device_for(rank := bagua.get_rank())
    received = []
    for number, one in enumerate(OBJECTS):
        source = number % bagua.get_world_size()
        mine = one if rank == source else object()  # others' is not even pickled
        result = communication.broadcast_object(mine, source)
        assert rank != source or result is one
        received.append(result)
    assert received == OBJECTS


def fail_to_pickle() -> list[str]:
    device_for(rank := bagua.get_rank())
    bagua.init_process_group()
    local = (lambda: None) if rank == 1 else "fine"
    messages = []
    for exchange in (lambda: communication.broadcast_object(local, 1), lambda: all_gather_object(local)):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is tested
            exchange()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
        bagua.barrier()  # the ranks are still in step
    return messages


def test_what_cannot_be_pickled_is_an_error_everywhere() -> None:
    zero, one, two = run_ranks(3, fail_to_pickle)
    assert zero == two
    assert "rank 1 could not pickle" in zero[0]
    assert "ranks [1] could not pickle" in zero[1]
    assert all("pickle" in message and "RuntimeError" not in message for message in one)


def announce_wrong_sizes() -> list[str]:
    """Rank 1 has an object that is too large, and is then a peer that announces what no object has."""
    rank, device = begin()
    comm = _get_default_group().get_global_communicator()
    limit, object_collectives.MAX_OBJECT_BYTES = object_collectives.MAX_OBJECT_BYTES, 1000
    large = b"x" * (2000 if rank == 1 else 10)
    messages = [_error_of(lambda: broadcast_object(large, 1)), _error_of(lambda: all_gather_object(large))]
    object_collectives.MAX_OBJECT_BYTES = limit
    for size in (limit + 1, -7):
        if rank == 1:
            announced = torch.tensor([size], device=device)
            byte_transport.broadcast(comm, announced, 1)
            byte_transport.all_gather(comm, announced, torch.empty(2, dtype=torch.int64, device=device))
        else:
            messages += [_error_of(lambda: broadcast_object(None, 1)), _error_of(lambda: all_gather_object(None))]
    bagua.barrier()  # the ranks are still in step
    return messages


def _error_of(exchange: Callable[[], Any]) -> str:
    try:
        return f"returned {exchange()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_size_that_no_object_has_is_an_error_before_memory_is_taken_for_it() -> None:
    zero, one = run_ranks(2, announce_wrong_sizes)
    assert "rank 1 could not pickle" in zero[0]
    assert "ranks [1] could not pickle" in zero[1]
    assert all(text.startswith("ValueError: The pickle of a bytes has 20") for text in one)
    assert all(text.startswith(f"ValueError: Rank 1 announced a pickle of {(1 << 30) + 1} bytes") for text in zero[2:4])
    assert all(text.startswith("ValueError: Rank 1 announced a pickle of -7 bytes") for text in zero[4:])
    assert len(zero) == 6
