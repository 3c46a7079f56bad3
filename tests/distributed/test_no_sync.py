"""Several backward passes before a step: without communication in between, and with it."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    WRAPPERS,
    Branches,
    NormNet,
    batches,
    begin,
    check_equal,
    check_tensor_on_ranks,
    counted_all_reduces,
    loss_of,
    mlp,
    momentum,
    pair,
    torch_ddp,
    wrap,
)
from torch import nn

from bagua.torch_api.data_parallel import DistributedDataParallel

# Ways to begin a round, by turns.
ZEROING = ("to none", "to zero", "by hand", "to none", "by hand", "to zero")


def _no_sync(model: Any) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = (model if hasattr(model, "no_sync") else model.bagua_ddp).no_sync()
    return context


def _clear(optimizer: torch.optim.Optimizer, zeroing: str) -> None:
    if zeroing == "by hand":
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0)
    else:
        optimizer.zero_grad(set_to_none=zeroing == "to none")


@pytest.mark.parametrize("silent", [True, False], ids=["no_sync", "every pass"])
@pytest.mark.parametrize("how", WRAPPERS)
@on_ranks(2)
def test_accumulated_gradients_are_those_of_torch_ddp(rank: int, device: torch.device, how: str, silent: bool) -> None:
    ours, theirs = mlp(rank, device), mlp(rank, device)
    optimizer, other = momentum(ours), momentum(theirs)
    wrapped, reference = wrap(how, ours, optimizer), torch_ddp(theirs)
    data = batches(rank, 3 * len(ZEROING), device)
    for round_number, zeroing in enumerate(ZEROING):
        first, second, third = data[3 * round_number : 3 * round_number + 3]
        for model, one in ((wrapped, optimizer), (reference, other)):
            _clear(one, zeroing)
            with counted_all_reduces() as calls:
                for batch in (first, second):
                    with _no_sync(model) if silent else nullcontext():
                        loss_of(model, batch).backward()
                if model is wrapped:
                    assert len(calls) == (0 if silent else 2), calls
            loss_of(model, third).backward()
            one.step()
        check_equal(ours, theirs, f"round {round_number}, gradients set {zeroing}")


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
def test_the_attribute_can_be_set_as_torchs(rank: int, device: torch.device) -> None:
    """Gradient accumulation by the attribute, as many scripts have it."""
    both = pair("wrapper", rank, device, NormNet)
    for model, optimizer in both:
        for number, batch in enumerate(batches(rank, 6, device)):
            model.require_backward_grad_sync = number % 3 == 2
            assert model.require_backward_grad_sync is (number % 3 == 2)
            if number == 3:  # within a context, which restores what was set before it
                with model.no_sync():
                    loss_of(model, batch).backward()
            else:
                loss_of(model, batch).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    check_equal(both[0][0], both[1][0])


# --- several backward passes of one forward pass ---------------------------------------------------------------------


def _reference_gradients(net: nn.Module, losses: Any, data: Any) -> dict[str, torch.Tensor]:
    """The mean over the ranks' data, computed alone."""
    for rank_data in data:
        for loss in losses(net, rank_data):
            (loss / len(data)).backward(retain_graph=True)
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def _two_losses(model: Any, batch: Any) -> list[torch.Tensor]:
    output = model(batch[0])
    return [(output - batch[1]).square().mean(), output.abs().sum()]


def _halves(model: Any, batch: Any) -> list[torch.Tensor]:
    """Each reaches one of two branches and, unless it is frozen, the trunk."""
    left, right = model(batch[0], take=("left",)), model(batch[0], take=("right",))
    return [(left - batch[1]).square().mean(), right.abs().sum()]


def _plain(device: torch.device) -> nn.Module:
    return mlp(0, device)


def _two_branches(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    net = Branches().to(device)
    del net.never
    return net


def _branches_alone(device: torch.device) -> nn.Module:
    net: Any = _two_branches(device)
    net.trunk.requires_grad_(False)
    return net


KINDS = {
    "both reach all": (_plain, _two_losses),
    "halves": (_branches_alone, _halves),
    "overlapping halves": (_two_branches, _halves),
}


def _passes(small_buckets: bool, how: str) -> None:
    rank, device = begin()
    for kind, (make, losses) in KINDS.items():
        net = make(device)
        alone = copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if how in ("wrapper", "looking for unused"):
            model: Any = DistributedDataParallel(
                net,
                bucket_cap_mb=1e-6 if small_buckets else 25,
                optimizers=[optimizer],
                find_unused_parameters=how == "looking for unused",
            )
        else:
            model = wrap(how, net, optimizer)
        for step in range(3):
            data = [batches(other, 1, device, seed=step)[0] for other in range(2)]
            optimizer.zero_grad()
            alone.zero_grad()
            for loss in losses(model, data[rank]):
                loss.backward(retain_graph=True)
            expected = _reference_gradients(alone, losses, data)
            for name, parameter in net.named_parameters():
                if name in expected:
                    what = f"{kind}: {name} in step {step}"
                    assert torch.allclose(parameter.grad, expected[name], rtol=1e-5, atol=1e-6), what
                    check_tensor_on_ranks(parameter.grad, what)
            optimizer.step()
            alone.load_state_dict(net.state_dict())


@pytest.mark.parametrize("small_buckets", [False, True])
@pytest.mark.parametrize("how", ["with_bagua", "with_bagua unflattened", "wrapper", "looking for unused"])
def test_two_losses_before_one_step(small_buckets: bool, how: str) -> None:
    env = {"BAGUA_DEFAULT_BUCKET_SIZE": "1"} if small_buckets else None
    run_ranks(2, _passes, small_buckets, how, env=env, reuse=True)


@pytest.mark.parametrize("model_kind", ["plain", "with buffers"])
@on_ranks(2)
def test_two_forward_passes_in_one_graph(rank: int, device: torch.device, model_kind: str) -> None:
    torch.manual_seed(rank)
    ours: nn.Module = NormNet().to(device) if model_kind == "with buffers" else mlp(rank, device)
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
