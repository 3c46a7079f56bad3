"""Parameters of every dtype, shape and layout follow rank 0."""

from __future__ import annotations

import copy
import os
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import device_for
from torch import nn

from bagua.collectives import coalesced
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.initialization import init_process_group
from bagua.collectives.object_collectives import broadcast_object
from bagua.collectives.process_group import from_torch_group, to_bagua_process_group
from bagua.job import torch_internals
from bagua.replicas import tensor_broadcast
from bagua.replicas.state_broadcast import broadcast_optimizer_state, broadcast_parameters

WORLD_SIZE = 3


def start() -> tuple[int, torch.device, BaguaCommunicator]:
    device = device_for(int(os.environ["RANK"]))
    init_process_group()
    return dist.get_rank(), device, to_bagua_process_group().get_global_communicator()


def tensors_of(rank: int, device: torch.device) -> list[torch.Tensor]:
    """By rank: other values, other strides; everything else alike."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=generator).to(device)

    image = random(2, 3, 4, 5).float()
    made: list[torch.Tensor] = [
        image.contiguous(memory_format=torch.channels_last) if rank % 2 else image,
        random(6, 7).half().t() if rank else random(7, 6).half(),
        random(40)[::4].double(),
        random(9, 8).double()[:, 1::3],
        random(8, 9).bfloat16(),
        random().float(),
        random(0, 3).float(),
        random(5).bool(),
        random(5).to(torch.uint8),
        random(4, 4),
        torch.complex(random(6).float(), random(6).float()),
        random(1, 1, 300).float(),
        random(33).to(torch.float8_e4m3fn),
    ]
    return made


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_complex() else tensor.detach().double()


@pytest.mark.parametrize("flat_bytes", [16, 200, 64 << 20])
@on_ranks(WORLD_SIZE, joined=False)
def test_tensors_of_all_kinds(flat_bytes: int) -> None:
    rank, device, communicator = start()
    coalesced.FLAT_BYTES = flat_bytes
    tensors = tensors_of(rank, device)
    weight = nn.Parameter(tensors[0])
    product = (weight * 2).sum()
    strides = [tensor.stride() for tensor in tensors]
    named = [(str(index), tensor) for index, tensor in enumerate([weight, *tensors[1:]])]
    broadcast_parameters(named, communicator)
    for tensor, stride, expected in zip([weight, *tensors[1:]], strides, tensors_of(0, device), strict=True):
        assert tensor.stride() == stride
        assert tensor.dtype == expected.dtype
        assert torch.equal(comparable(tensor), comparable(expected))
    assert weight.is_leaf
    assert weight.grad_fn is None
    product.backward()


class Elsewhere(tuple[str, ...]):
    """Kinds of device that a group serves, none of which is the one asked for."""

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        return False


@on_ranks(2, joined=False)
def test_device_without_a_backend() -> None:
    rank, device, communicator = start()
    if device.type == "cuda":  # CPU tensors in a group of NCCL alone
        group = dist.new_group(backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        communicator = from_torch_group(group).get_global_communicator()  # type: ignore[assignment]
        assert torch_internals.device_types(communicator.torch_group) == ("cuda",)
    else:
        tensor_broadcast.torch_internals = types.SimpleNamespace(device_types=lambda _: Elsewhere(("cpu",)))  # type: ignore[assignment]
    coalesced.FLAT_BYTES = 100
    tensors = tensors_of(rank, torch.device("cpu"))
    broadcast_parameters([(str(index), tensor) for index, tensor in enumerate(tensors)], communicator)
    for tensor, expected in zip(tensors, tensors_of(0, torch.device("cpu")), strict=True):
        assert torch.equal(comparable(tensor), comparable(expected))

    parameter = nn.Parameter(torch.zeros(300, device=device))
    optimizer = torch.optim.Adam([parameter])  # whose step counters are on the CPU
    for _ in range(rank + 1):
        parameter.grad = torch.full_like(parameter, float(rank + 1))
        optimizer.step()
    expected_state = copy.deepcopy(optimizer.state_dict()["state"][0]) if rank == 0 else None
    broadcast_optimizer_state(optimizer, communicator)
    for name, value in broadcast_object(expected_state, 0, communicator).items():
        assert torch.equal(optimizer.state[parameter][name].cpu(), value.cpu()), name


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (nn.parameter.UninitializedParameter(), "not initialized"),
        (torch.empty(3, device="meta"), "meta"),
    ],
)
def test_unsendable_parameter(tensor: torch.Tensor, reason: str) -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match=rf"layer\.weight cannot be broadcast.*{reason}"):
        broadcast_parameters([("layer.weight", tensor)], nobody)
