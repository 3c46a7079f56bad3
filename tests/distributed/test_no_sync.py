"""Several passes before a step: without communication in between, and with it. Programs of them:
test_step_programs.py."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import (
    NormNet,
    batches,
    check_equal,
    check_tensor_on_ranks,
    counted_all_reduces,
    loss_of,
    mlp,
    momentum,
    pair,
    torch_ddp,
)
from torch import nn

from bagua.torch_api.data_parallel import DistributedDataParallel


@on_ranks(2)
def test_no_sync_ends_with_its_context(rank: int, device: torch.device) -> None:
    model = DistributedDataParallel(mlp(rank, device))
    batch = batches(rank, 1, device)[0]
    with model.no_sync():
        assert not model.require_backward_grad_sync
        with model.no_sync():
            pass
        assert not model.require_backward_grad_sync
    assert model.require_backward_grad_sync
    try:
        with model.no_sync():
            raise KeyError("of the user")
    except KeyError:
        assert model.require_backward_grad_sync
    # The forward pass outside, its backward pass inside: nothing is sent, and nothing is missed afterwards.
    with counted_all_reduces() as calls:
        loss = loss_of(model, batch)
        with model.no_sync():
            loss.backward()
        assert not calls
        loss_of(model, batch).backward()
        assert len(calls) == 1
    # Only gradients that a rank accumulated alone differ.
    model.zero_grad()
    with model.no_sync():
        loss_of(model, batch).backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    loss_of(model, batch).backward()
    for before, parameter in zip(alone, model.parameters(), strict=True):
        assert not torch.equal(before, parameter.grad)
        check_tensor_on_ranks(parameter.grad, "a gradient")


@on_ranks(2)
def test_two_forward_passes_in_one_graph(rank: int, device: torch.device) -> None:
    """Which change buffers."""
    torch.manual_seed(rank)
    ours = NormNet().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = momentum(ours), momentum(theirs)
    # On GPUs torch's wrapper refuses such a graph if it broadcasts buffers, so that is done for it below.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have another name for the option
        reference = torch_ddp(theirs, broadcast_buffers=False)
    wrapped = DistributedDataParallel(ours, optimizers=[optimizer])
    data = batches(rank, 8, device)

    def forward(model: nn.Module, index: int) -> torch.Tensor:
        if model is reference:
            for buffer in theirs.buffers():
                dist.broadcast(buffer.data, 0)
        return model(data[index][0])

    for number in range(4):
        for model, one in ((wrapped, optimizer), (reference, other)):
            one.zero_grad()
            # One graph of two forward passes, as of siamese networks.
            first, second = (forward(model, 2 * number + index) for index in range(2))
            (first - second).square().mean().backward()
            one.step()
        check_equal(ours, theirs, f"step {number}")


@on_ranks(2)
def test_a_backward_pass_is_made_to_communicate(rank: int, device: torch.device) -> None:
    """As Accelerate's `trigger_sync_in_backward`: several forward passes without communication, whose last backward
    pass communicates."""
    both = pair("wrapper", rank, device)
    for model, _ in both:
        with model.no_sync():
            losses = [loss_of(model, batch) for batch in batches(rank, 3, device)]
            for loss in losses[:-1]:
                loss.backward()
            assert not model.require_forward_param_sync
            before = model.require_backward_grad_sync, model.require_forward_param_sync
            model.require_backward_grad_sync = model.require_forward_param_sync = True
            model.reducer.prepare_for_backward([])
            losses[-1].backward()
            model.require_backward_grad_sync, model.require_forward_param_sync = before
    for ours, theirs in zip(both[0][0].parameters(), both[1][0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
        check_tensor_on_ranks(ours.grad, "a gradient")
