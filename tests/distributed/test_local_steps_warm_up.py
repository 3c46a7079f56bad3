"""Local steps after a warm-up with gradient all-reduce, compared with the same made by hand: the module is wrapped with
one algorithm, and with the other after so many steps."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import Batch, batches, check_equal, check_ranks_equal, engine_of, message_of, mlp
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

WARM_UP, STEPS = 3, 11

CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("local_sgd", {"sync_every": 3}, None),
    ("diloco", {"sync_every": 2}, None),
    ("streaming_diloco", {"sync_every": 4, "delay": 1, "alpha": 0.5, "codec": "int8", "momentum_rounds": 2}, "int4"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])


def wrapped(rank: int, device: torch.device, algorithm: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    net = mlp(rank, device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    return bagua.with_bagua(net, [optimizer], algorithm, **options), optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def states(model: Any, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [model.state_dict(), optimizer.state_dict(), engine_of(model).state_dict()]


def load(model: Any, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for one, state in zip((model, optimizer, engine_of(model)), saved, strict=True):
        one.load_state_dict(copy.deepcopy(state))  # an optimizer works on with the tensors that it is given


class TwoHeads(nn.Module):
    """Of which a forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> Any:
        return self.heads[head](self.body(x))


@every_case
@on_ranks(2)
def test_a_warm_up_is_what_two_wrappings_are(rank: int, device: torch.device, case: Any) -> None:
    name, options, codec = case
    data = batches(rank, STEPS, device)
    warm = Algorithm.init(name, **options, warmup_steps=WARM_UP, warmup_codec=codec)
    model, optimizer = wrapped(rank, device, warm)
    first = (
        Algorithm.init("bytegrad", codec=codec, hierarchical=False) if codec else Algorithm.init("gradient_allreduce")
    )
    other, its_optimizer = wrapped(rank, device, first)
    for step in range(STEPS):
        if step == WARM_UP:
            check_ranks_equal(model)
            of_gradients = weakref.ref(model.bagua_buckets[0])
            assert model.bagua_ddp.stats().steps == WARM_UP
            other = bagua.with_bagua(other, [its_optimizer], Algorithm.init(name, **options))
        with model.bagua_ddp.no_sync():  # no step of the warm-up
            model(data[step][0]).sum().backward()
        model(data[step][0])
        train(model, optimizer, data[step : step + 1])
        train(other, its_optimizer, data[step : step + 1])
        check_equal(model, other, f"{name}, step {step + 1}")
    gc.collect()
    assert of_gradients() is None, "buckets of gradients are of no use any more"
    stats = model.bagua_ddp.stats()
    assert stats.steps == WARM_UP + other.bagua_ddp.stats().steps
    assert model.bagua_algorithm.rounds == other.bagua_algorithm.rounds > 1


@every_case
@on_ranks(2)
def test_a_training_that_was_saved_goes_on(rank: int, device: torch.device, case: Any) -> None:
    """From any step, about the end of the warm-up too, and by an algorithm that was given another one."""
    name, options, codec = case
    data = batches(rank, STEPS, device)

    def make(steps: int) -> Any:
        return wrapped(rank, device, Algorithm.init(name, **options, warmup_steps=steps, warmup_codec=codec))

    model, optimizer = make(WARM_UP)
    saved = []
    for step in range(STEPS):
        saved.append(copy.deepcopy(states(model, optimizer)))
        train(model, optimizer, data[step : step + 1])
    for step, state in enumerate(saved):
        resumed, its_optimizer = make(WARM_UP)
        load(resumed, its_optimizer, state)
        train(resumed, its_optimizer, data[step:])
        check_equal(resumed, model, f"{name}, saved before step {step + 1}")
    # Rounds that have begun go on, whatever the warm-up is.
    for steps in (0, 100):
        resumed, its_optimizer = make(steps)
        load(resumed, its_optimizer, saved[-2])
        train(resumed, its_optimizer, data[-2:])
        check_equal(resumed, model, f"{name}, loaded with a warm-up of {steps}")
    error = message_of(RuntimeError, lambda: load(model, optimizer, saved[WARM_UP - 1]))
    assert f"{WARM_UP - 1} of {WARM_UP} warm-up steps, but warm-up is over here" in error


@on_ranks(2)
def test_tuning_and_unused_parameters(rank: int, device: torch.device) -> None:
    """Tuning changes buckets during the warm-up and after it. What is unused takes part as in gradient all-reduce."""
    data = batches(rank, 60, device)
    algorithm = Algorithm.init("local_sgd", sync_every=4, warmup_steps=20)
    model, optimizer = wrapped(rank, device, algorithm, autotune=True)
    train(model, optimizer, data)
    check_ranks_equal(model)
    assert model.bagua_algorithm.rounds == 10

    algorithm = Algorithm.init("diloco", sync_every=2, warmup_steps=4)
    net = TwoHeads().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = bagua.with_bagua(net, [optimizer], algorithm, find_unused_parameters=True)
    for step, (x, _) in enumerate(data[:8]):
        optimizer.zero_grad()
        model(x, head=(step + rank) % 2).square().mean().backward()
        optimizer.step()
        if step < 4 or step % 2:
            check_ranks_equal(model)


@pytest.mark.parametrize("name", ["local_sgd", "async"])
@on_ranks(2)
def test_passes_that_make_a_step_together_count_once(rank: int, device: torch.device, name: str) -> None:
    """Each makes a part of the gradients, and the last one completes the only bucket."""
    options = {"sync_every": 2} if name == "local_sgd" else {}
    net = TwoHeads().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = bagua.with_bagua(net, [optimizer], Algorithm.init(name, **options, warmup_steps=2))
    for step, (x, _) in enumerate(batches(rank, 2, device)):
        assert model.bagua_algorithm.state_dict()["warmup_steps_done"] == step
        optimizer.zero_grad()
        for loss in [model(x, head=head).square().mean() for head in range(2)]:
            loss.backward()
        optimizer.step()
        check_ranks_equal(model)
    assert not model.bagua_algorithm.ranks_in_step
    if name == "async":
        model.bagua_algorithm.abort(model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming_diloco", "async"])
@pytest.mark.parametrize("steps", [-1, 2.5, True, "10"])
def test_steps_that_are_none(name: str, steps: Any) -> None:
    options = {} if name == "async" else {"sync_every": 2}
    with pytest.raises(ValueError, match=f"warmup_steps={steps!r}: must be a whole number of at least 0"):
        Algorithm.init(name, **options, warmup_steps=steps)


def test_an_unknown_codec() -> None:
    with pytest.raises(ValueError, match="int3"):
        Algorithm.init("diloco", sync_every=2, warmup_steps=1, warmup_codec="int3")
