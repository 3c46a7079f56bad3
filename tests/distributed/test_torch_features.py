"""What users of torch do around a module: precision, clipping, odd outputs, buffers. Optimizers and what is done with
gradients are drawn: test_step_programs.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import (
    NormNet,
    batches,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    loss_of,
    mlp,
    pair,
    train,
)
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm

HOW = ("with_bagua", "wrapper")


def _compare(both: list[tuple[Any, Any]], what: str = "") -> None:
    check_equal(both[0][0], both[1][0], what)


# --- precision, clipping, optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_autocast_and_gradient_scaling(rank: int, device: torch.device, how: str) -> None:
    both = pair(how, rank, device)
    for model, optimizer in both:
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
        for step, batch in enumerate(batches(rank, 8, device)):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, batch)
            # Infinite on one rank: all of them skip the step.
            scaler.scale(loss * float("inf") if step == 4 and rank == 1 else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**12
    _compare(both)
    check_ranks_equal(both[0][0])


def _parametrized() -> nn.Module:
    net = mlp()
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.orthogonal(net[4])
    return net


@on_ranks(2)
def test_parametrized_layers(rank: int, device: torch.device) -> None:
    both = pair("wrapper", rank, device, _parametrized)
    for model, optimizer in both:
        train(model, optimizer, batches(rank, 5, device))
    _compare(both)


# --- inputs and outputs ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    logits: Tensor
    rest: list[Any]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Packing(nn.Module):
    """Takes keywords, gives its two outputs in a structure of the given kind; with None, numbers and no tensor at all
    among them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(int(torch.randint(1000, ()).item()))
        self.head = nn.Linear(2, 4)

    def forward(self, *, x: Tensor, kind: str) -> Any:
        first, second = self.net(x), self.head(x)
        return {
            "dict": {"first": first, "more": [None, 3, {"second": second}]},
            "tuple": (first, (second, "text")),
            "named tuple": Pair(first, second),
            "dataclass": Answer(first, [second, None]),
        }[kind]


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    if isinstance(output, dict):
        output = list(output.values())
    return [one for part in output for one in _tensors(part)] if isinstance(output, (list, tuple)) else []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["dict", "tuple", "named tuple", "dataclass"])
@on_ranks(2)
def test_structured_outputs_and_keywords(rank: int, device: torch.device, kind: str, how: str) -> None:
    both = pair(how, rank, device, Packing)
    for model, optimizer in both:
        for x, y in batches(rank, 4, device):
            optimizer.zero_grad()
            first, second = _tensors(model(x=x, kind=kind))
            ((first + second - y) ** 2).mean().backward()
            optimizer.step()
    _compare(both)


class Table(nn.Module):
    """Gives its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 2))

    def forward(self) -> Tensor:
        return self.table


@on_ranks(2)
def test_a_module_that_gives_its_parameter(rank: int, device: torch.device) -> None:
    ((model, optimizer),) = pair("with_bagua", rank, device, Table)[:1]
    for x, y in batches(rank, 5, device):
        optimizer.zero_grad()
        nn.functional.mse_loss(x @ model().t(), y).backward()
        optimizer.step()
    check_ranks_equal(model)
    assert not model.table._backward_hooks, "one more in every step"


class Averaging(nn.Module):
    """Replaces its buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(dim=0)
        return y


@pytest.mark.parametrize("make", [Averaging, NormNet])
@on_ranks(2)
def test_buffers_follow_the_first_rank(rank: int, device: torch.device, make: Callable[[], nn.Module]) -> None:
    both = pair("wrapper", rank, device, make)
    (ours, optimizer), (theirs, other) = both
    for number, batch in enumerate(batches(rank, 6, device)):
        for model, one in both:
            train(model, one, [batch])
            model.train(number % 2 == 0)
            with torch.inference_mode(number % 3 == 0), torch.no_grad():
                model(batch[0])
            model.train()
        _compare(both, f"step {number}")
    assert optimizer is not other
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@on_ranks(2)
def test_buffers_that_were_given_other_memory_follow_the_first_rank(rank: int, device: torch.device) -> None:
    both = pair("wrapper", rank, device, NormNet)
    data = batches(rank, 4, device)
    for model, optimizer in both:
        train(model, optimizer, data[:2])
        norm = model.module.norm
        norm.running_mean.data = torch.full((8,), rank + 5.0, device=device)
        norm.running_var.data = torch.ones(2, 8, device=device)[rank]
        train(model, optimizer, data[2:])
        model.eval()(data[0][0])
    _compare(both)
    check_ranks_equal(both[0][0].module)


# --- without gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_forward_without_gradients_in_between(rank: int, device: torch.device, how: str) -> None:
    both = pair(how, rank, device)
    ours = both[0][0]
    inner = ours.module if how == "wrapper" else ours
    for number, batch in enumerate(batches(rank, 4, device)):
        for context in (torch.no_grad(), torch.inference_mode()):
            # In training mode, too, and where a change makes everything begin anew.
            inner[0].bias.requires_grad_(number % 2 == 1)
            with context, counted_all_reduces() as calls:
                ours.train(number % 2 == 0)
                ours(batch[0])
                ours.train()
                if number == 2:
                    ours(batch[0])
        inner[0].bias.requires_grad_(True)
        for model, optimizer in both:
            train(model, optimizer, [batch])
    assert not calls
    _compare(both)


@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_a_change_that_inference_meets_first(rank: int, device: torch.device, how: str) -> None:
    """The first forward pass after a change is one without gradients: what is made then serves the later ones."""
    ours, optimizer = pair(how, rank, device)[0]
    train(ours, optimizer, batches(rank, 2, device))
    (ours.module if how == "wrapper" else ours)[0].requires_grad_(False)
    with torch.inference_mode():
        ours(batches(rank, 1, device)[0][0])
    train(ours, optimizer, batches(rank, 4, device, seed=1), set_to_none=False)
    check_ranks_equal(ours)


# --- streams ---------------------------------------------------------------------------------------------------------


class _LateGradient(torch.autograd.Function):
    """On a GPU, the gradient is there long after the host has gone on."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        if gradients[0].is_cuda:
            torch.cuda._sleep(100_000_000)
        return gradients[0].clone()


class _SideBySide(nn.Module):
    """Two branches, on a GPU on streams of their own. The backward pass begins with the second, and ends with the
    first."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = (nn.Linear(8, 8, bias=False, device=device) for _ in range(2))
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def forward(self, inputs: Tensor) -> Tensor:
        if not self._streams:
            return self.first(inputs) + nn.functional.linear(inputs, _LateGradient.apply(self.second.weight))
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        with torch.cuda.stream(self._streams[0]):
            first = self.first(inputs)
        with torch.cuda.stream(self._streams[1]):
            second = nn.functional.linear(inputs, _LateGradient.apply(self.second.weight))
        for stream in self._streams:
            current.wait_stream(stream)
        return first + second


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@on_ranks(2)
def test_branches_on_streams_of_their_own(rank: int, device: torch.device, algorithm: str) -> None:
    net: Any = _SideBySide(device)
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], Algorithm.init(algorithm))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        inputs = torch.randn(16, 8, generator=generator).to(device)
        # Both weights have the gradient of the sum of the outputs.
        expected = inputs.sum(dim=0).expand(8, 8).contiguous()
        dist.all_reduce(expected)
        net.zero_grad()
        net(inputs).sum().backward()
        for branch in (net.first, net.second):
            torch.testing.assert_close(branch.weight.grad, expected / 2, rtol=0.02, atol=0.05)
