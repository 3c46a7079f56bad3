"""The all-reduce that autograd goes through."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks

import bagua.torch_api as bagua
from bagua.torch_api import communication
from bagua.torch_api.data_parallel import functional


def differentiate(op: bagua.ReduceOp) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = device_for(rank := bagua.get_rank())
    bagua.init_process_group()
    # Not contiguous: neither the input nor, through the transposition, the gradient.
    x = (torch.arange(6.0, dtype=torch.float64, device=device).view(2, 3).t() + rank).requires_grad_()
    y = functional.all_reduce(x, op)
    assert y.data_ptr() != x.data_ptr()
    weights = torch.arange(6.0, dtype=torch.float64, device=device).view(2, 3).t() * (rank + 1)
    (y.square() * weights).sum().backward()
    assert x.grad is not None
    return x.detach().cpu(), y.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("op", [bagua.ReduceOp.SUM, bagua.ReduceOp.AVG])
def test_gradient_is_that_of_the_sum_of_all_losses(op: bagua.ReduceOp) -> None:
    results = run_ranks(3, differentiate, op)
    inputs = [x.clone().requires_grad_() for x, _, _ in results]
    scale = 3 if op == bagua.ReduceOp.AVG else 1
    y = torch.stack(inputs).sum(0) / scale
    weights = torch.arange(6.0, dtype=torch.float64).view(2, 3).t()
    (y.square() * weights * (1 + 2 + 3)).sum().backward()
    for x, (_, result, gradient) in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, y.detach())
        torch.testing.assert_close(gradient, x.grad)


def test_maximum_repeats_itself_backward() -> None:
    results = run_ranks(3, differentiate, bagua.ReduceOp.MAX)
    y = torch.stack([x for x, _, _ in results]).amax(0)
    weights = torch.arange(6.0, dtype=torch.float64).view(2, 3).t()
    for _, result, gradient in results:
        assert torch.equal(result, y)
        assert torch.equal(gradient, 2 * y * weights * 3)  # the largest of the ranks' gradients


@on_ranks(2)
def test_gradient_of_the_gradient(device: torch.device) -> None:
    # y = x0 + x1 = 3; the sum over the ranks' losses 2 y^3: 6 y^2 and, of the sum of both ranks' gradients, 2 * 12 y.
    x = torch.full((1,), bagua.get_rank() + 1.0, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(functional.all_reduce(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert [first.item(), second.item()] == [54.0, 72.0]


@on_ranks(3)
def test_groups_of_any_kind(rank: int, device: torch.device) -> None:
    group = communication.new_group([0, 2])
    assert dist.group.WORLD is not None
    one = torch.tensor([rank + 1.0], device=device)
    assert [
        functional.all_reduce(one, group=which).item()
        for which in (None, dist.group.WORLD, group, group.get_global_communicator())
    ] == [[6, 6, 4, 4], [6, 6, 2, 2], [6, 6, 4, 4]][rank]


@on_ranks(1)
def test_other_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="op is PRODUCT, and only SUM, MAX, AVG"):
        functional.all_reduce(torch.ones(1), bagua.ReduceOp.PRODUCT)
