"""The exchanges of an all-reduce in chunks, by collectives and by messages: what arrives where, and what is called."""

from __future__ import annotations

import os

import pytest
import torch
from support.messages import counted_messages
from support.rank_tests import on_ranks
from torch import Tensor

import bagua.torch_api as bagua
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import _get_default_group
from bagua.comm_ops import chunk_exchange
from bagua.comm_ops.chunk_exchange import ChunkExchange

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)


def _version(owner: int, sender: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `sender` has of the chunk of `owner`."""
    return (torch.arange(elements, device=device) % 50 + 50 * owner + 7 * sender).to(dtype)


def _check_exchange(group: BaguaCommunicator, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    ranks, rank = group.nranks(), group.rank()
    versions = torch.stack([_version(owner, rank, elements, dtype, device) for owner in range(ranks)])
    before = versions.clone()
    exchange = ChunkExchange(versions, group)
    received = exchange.to_owners()
    for sender in range(ranks):
        assert torch.equal(received[sender], _version(rank, sender, elements, dtype, device))
    # Other rows may have results in them by now.
    assert torch.equal(versions[rank], before[rank])

    chunk = received[rank].clone()
    exchange.to_all(chunk)
    for owner in range(ranks):
        assert torch.equal(versions[owner], _version(owner, owner, elements, dtype, device))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["messages", "collectives"])
@on_ranks(fresh=True)
def test_every_chunk_arrives(device: torch.device, way: str) -> None:
    chunk_exchange.DIRECT_BYTES = 0 if way == "messages" else 1 << 60
    group = _get_default_group().get_global_communicator()
    for dtype in DTYPES:
        for elements in (1, 33, 4099):
            _check_exchange(group, elements, dtype, device)


@pytest.mark.skipif(os.environ.get("BAGUA_TEST_DEVICE") == "cuda", reason="NCCL's collectives are always used")
@on_ranks(2)
def test_much_goes_by_messages_and_little_by_collectives(device: torch.device) -> None:
    """Sizes of the messages of chunks of 1 MiB together, and of a little less."""
    group = _get_default_group().get_global_communicator()
    sizes = []
    for elements in (1 << 18, (1 << 18) - 1):
        with counted_messages() as messages:
            _check_exchange(group, elements // group.nranks(), torch.float32, device)
        sizes.append(messages)
    large, small = sizes[0], sizes[1]
    assert large == [1 << 19, 1 << 19]
    assert small == []


@on_ranks(4, fresh=True)
def test_a_group_of_some_ranks(rank: int, device: torch.device) -> None:
    chunk_exchange.DIRECT_BYTES = 0
    group = bagua.communication.new_group([1, 3])
    if rank in (1, 3):
        _check_exchange(group.get_global_communicator(), 100, torch.float32, device)
