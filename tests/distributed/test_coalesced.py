"""Collectives of many tensors at once, of mixed shapes, dtypes and memory layouts."""

from __future__ import annotations

import random

import pytest
import torch
from support.collective_model import COMPLEX, FLOATS, INTEGERS, MOVED_DTYPES, assert_reduced, assert_same, contributions
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks

import bagua.torch_api as bagua
from bagua.collectives import coalesced
from bagua.torch_api import communication

SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (2, 3, 4), (17, 1)]


def arranged(draw: random.Random, values: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The values in this shape, contiguous or not."""
    tensor = values.view(shape).to(device, copy=True)
    layout = draw.choice(("contiguous", "transposed", "strided"))
    if layout == "transposed":
        return tensor.mT.contiguous().mT if tensor.dim() >= 2 else tensor
    if layout == "strided" and tensor.dim() >= 1:
        room = torch.stack([tensor, tensor], dim=-1)
        room[..., 1] = 0
        return room[..., 0]
    return tensor


def check(seed: int, flat_bytes: int) -> None:
    device = device_for(rank := bagua.get_rank())
    coalesced.FLAT_BYTES = flat_bytes
    bagua.init_process_group()
    draw = random.Random(seed)
    for _ in range(25):
        shapes = draw.choices(SHAPES, k=draw.randrange(8))
        sizes = [torch.Size(shape).numel() for shape in shapes]
        layouts = random.Random(draw.random() + rank)  # they differ between ranks
        source = draw.randrange(bagua.get_world_size())

        inputs = [contributions(draw, bagua.get_world_size(), size, draw.choice(MOVED_DTYPES)) for size in sizes]
        tensors = [arranged(layouts, one[rank], shape, device) for one, shape in zip(inputs, shapes, strict=True)]
        communication.broadcast_coalesced(tensors, source)
        for tensor, one, shape in zip(tensors, inputs, shapes, strict=True):
            assert_same(tensor, one[source].view(shape), "broadcast_coalesced")

        op = draw.choice((bagua.ReduceOp.SUM, bagua.ReduceOp.AVG, bagua.ReduceOp.PRODUCT))
        dtypes = (*INTEGERS, *FLOATS, *COMPLEX)
        inputs = [contributions(draw, bagua.get_world_size(), size, draw.choice(dtypes)) for size in sizes]
        tensors = [arranged(layouts, one[rank], shape, device) for one, shape in zip(inputs, shapes, strict=True)]
        communication.allreduce_coalesced_inplace(tensors, op)
        for tensor, one, shape in zip(tensors, inputs, shapes, strict=True):
            assert_reduced(tensor, [other.view(shape) for other in one], op, ("allreduce_coalesced", op))


@pytest.mark.parametrize(("world_size", "flat_bytes"), [(2, 64 << 20), (3, 40)])
def test_many_tensors(world_size: int, flat_bytes: int) -> None:
    """In one flat buffer per dtype, and in several."""
    run_ranks(world_size, check, world_size, flat_bytes)


def test_a_flat_buffer_has_as_much_as_it_may_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced, "FLAT_BYTES", 40)
    tensors = [torch.empty(elements) for elements in (4, 6, 1, 11, 1, 10)]
    assert [[one.numel() for one in run] for run in coalesced._runs(tensors)] == [[4, 6], [1], [11], [1], [10]]


def broadcast_parameters() -> list[float]:
    device = device_for(rank := bagua.get_rank())
    bagua.init_process_group()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2).to(device)
    communication.broadcast_coalesced(list(model.parameters()), 1)
    assert all(parameter.is_leaf and parameter.grad_fn is None for parameter in model.parameters())
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@on_ranks(2)
def test_tensors_may_come_from_an_iterator(rank: int, device: torch.device) -> None:
    model = torch.nn.Linear(2, 1).to(device)
    torch.nn.init.constant_(model.weight, rank)
    communication.broadcast_coalesced(model.parameters())
    total = torch.ones(2, device=device)
    communication.allreduce_coalesced_inplace(one for one in [total])
    assert [*model.weight.flatten().tolist(), *total.tolist()] == [0, 0, 2, 2]


@on_ranks(2)
def test_a_lone_tensor_and_expanded_ones_are_refused(device: torch.device) -> None:
    before = torch.ones(2, device=device)
    expanded = torch.ones(1, device=device).expand(3)
    for call in (communication.broadcast_coalesced, communication.allreduce_coalesced_inplace):
        with pytest.raises(TypeError, match=r"one tensor of shape \(2,\); give a list of them"):
            call(before)
        # On every rank, the source too, before anything is sent.
        with pytest.raises(ValueError, match=r"tensors\[1\] is expanded .*contiguous\(\)"):
            call([before, expanded])
    assert before.tolist() == [1, 1]
    bagua.barrier()


def test_parameters_follow_the_source() -> None:
    zero, one = run_ranks(2, broadcast_parameters)
    assert zero == one
