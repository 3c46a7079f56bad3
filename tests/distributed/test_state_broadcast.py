"""Optimizer state, and the model with it, follows rank 0, whatever the ranks did before."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks
from torch import nn

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.initialization import init_process_group
from bagua.collectives.object_collectives import all_gather_object
from bagua.collectives.process_group import to_bagua_process_group
from bagua.replicas.state_broadcast import broadcast_optimizer_state, broadcast_parameters

WORLD_SIZE = 3
# Per optimizer, what it is made with. "tensor lr" and "capturable" stand for what depends on the device.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {"momentum": 0.9, "fused": True}],
    "Adam": [{}, {"amsgrad": True, "foreach": True}, {"fused": True}, {"tensor lr": True}, {"capturable": True}],
    "AdamW": [{}, {"foreach": True, "weight_decay": 0.1}, {"fused": True}, {"capturable": True}],
    "Rprop": [{}, {"foreach": True}, {"capturable": True}],
    "Adagrad": [{}, {"foreach": True, "lr_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "foreach": True}, {"capturable": True}],
    "Adadelta": [{}, {"foreach": True}, {"capturable": True}],
    "Adamax": [{}, {"foreach": True}, {"capturable": True}],
}


def start() -> tuple[int, torch.device, BaguaCommunicator]:
    init_process_group()
    rank = dist.get_rank()
    communicator = to_bagua_process_group().get_global_communicator()
    assert isinstance(communicator, BaguaCommunicator)
    return rank, device_for(rank), communicator


def content(value: Any) -> Any:
    """Plain data that compares by value, with dtype and kind of device of tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.device.type, value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [content(item) for item in value]
    return value


def mlp(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4), nn.Softmax(1))
    return layers.to(device)


def make_optimizer(name: str, settings: dict[str, Any], model: nn.Module, lr: float) -> torch.optim.Optimizer:
    options = {key: value for key, value in settings.items() if key != "tensor lr"}
    rate: Any = torch.tensor(lr) if "tensor lr" in settings else lr
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": rate}, {"params": parameters[2:]}]
    kind: Any = getattr(torch.optim, name)
    optimizer: torch.optim.Optimizer = kind(groups, lr=rate, **options)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(4, 2, generator=generator).to(device)
        targets = torch.randn(4, 4, generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def assert_equal_on_all_ranks(value: Any, communicator: BaguaCommunicator, what: str) -> None:
    first, *others = all_gather_object(content(value), communicator)
    for rank, other in enumerate(others, start=1):
        assert other == first, f"{what}: rank {rank} differs from rank 0"


def broadcast(model: nn.Module, optimizer: torch.optim.Optimizer, communicator: BaguaCommunicator) -> None:
    broadcast_parameters(list(model.named_parameters()), communicator)
    broadcast_optimizer_state(optimizer, communicator)


# --- the eight optimizers -------------------------------------------------------------------------------------------


def train_apart_then_together(name: str, rank: int, device: torch.device, communicator: Any) -> int:
    count = 0
    for settings in SETTINGS[name]:
        if "capturable" in settings and device.type == "cpu":
            continue
        what = f"{name} {settings}"
        model = mlp(rank, device)
        optimizer = make_optimizer(name, settings, model, lr=0.01 * (rank + 1))
        train(model, optimizer, seed=rank, steps=10, device=device)
        optimizer.zero_grad()
        before = content([model.state_dict(), optimizer.state_dict()])

        broadcast(model, optimizer, communicator)

        assert all(parameter.grad is None for parameter in model.parameters()), what
        for tensor in tensors_in(list(optimizer.state.values())):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{what}: state is a part of something larger"
        if rank == 0:
            assert content([model.state_dict(), optimizer.state_dict()]) == before, f"{what}: rank 0 has changed"
        assert_equal_on_all_ranks([model.state_dict(), optimizer.state_dict()], communicator, what)
        assert_equal_on_all_ranks(optimizer.defaults, communicator, what)

        train(model, optimizer, seed=99, steps=5, device=device)
        assert_equal_on_all_ranks([model.state_dict(), optimizer.state_dict()], communicator, f"{what}, 5 steps later")
        count += 1
    return count


def train_all_apart_then_together() -> dict[str, int]:
    place = start()
    return {name: train_apart_then_together(name, *place) for name in SETTINGS}


def test_eight_optimizers() -> None:
    """In one start of the ranks, which takes as long as an optimizer."""
    counts = run_ranks(WORLD_SIZE, train_all_apart_then_together)[0]
    assert list(counts) == list(SETTINGS)
    assert min(counts.values()) >= 2


# --- what is there on some ranks only ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_with_state", [(0,), (1, 2), (), (0, 1, 2)])
@on_ranks(WORLD_SIZE, joined=False)
def test_state_is_created_and_removed(ranks_with_state: tuple[int, ...]) -> None:
    rank, device, communicator = start()
    model = mlp(rank, device)
    optimizer = make_optimizer("Adam", {"amsgrad": True, "eps": 1e-5} if rank == 0 else {}, model, lr=0.01 * (rank + 1))
    if rank in ranks_with_state:
        train(model, optimizer, seed=rank, steps=2 + rank, device=device)
    # One parameter without gradient on rank 0, another on the others: they have state for different ones.
    optimizer.state.pop(list(model.parameters())[0 if rank == 0 else 1], None)
    broadcast(model, optimizer, communicator)
    train(model, optimizer, seed=99, steps=5, device=device)
    assert_equal_on_all_ranks([model.state_dict(), optimizer.state_dict()], communicator, "state")
    options = optimizer.param_groups[1]
    assert len(optimizer.state) == 6
    assert (options["lr"], options["amsgrad"], options["eps"]) == (0.01, True, 1e-5)


class OddOptimizer(torch.optim.Optimizer):
    """State of every shape that Python offers."""

    def __init__(self, parameters: list[torch.Tensor], rank: int) -> None:
        super().__init__(parameters, {"lr": 0.1 * rank, "schedule": [rank, (rank, None)], "note": "x" * 1000 * rank})
        first, second, third = parameters
        device = first.device
        shared = torch.full((3,), float(rank), device=device)
        state: dict[Any, Any] = self.state
        state[first] = {
            "nothing": None if rank == 0 else torch.ones(2),
            "nested": {"list": [shared, (rank, torch.full((), rank, dtype=torch.int64))], "empty": {}},
            "alias": shared,
            "text": "y" * (1 + 500 * rank),
            "empty": torch.empty(0, 4, device=device),
            "dtype": torch.full((2,), rank, device=device, dtype=torch.float64 if rank else torch.float32),
            "shape": torch.zeros(2 + rank, device=device),
            "count": rank,
        }
        state[second] = torch.full((2, 2), float(rank), device=device)
        if rank != 0:
            state[third] = {"extra": 1}
        state["global"] = {"seen": rank, "mask": torch.tensor([rank == 0], device=device)}
        state[f"only on {rank}"] = rank


@on_ranks(WORLD_SIZE, joined=False)
def test_state_of_any_python_shape() -> None:
    rank, device, communicator = start()
    parameters = [nn.Parameter(torch.zeros(3, 2, device=device)) for _ in range(3)]
    optimizer = OddOptimizer(parameters, rank)
    first = optimizer.state[parameters[0]]
    broadcast_optimizer_state(optimizer, communicator)
    expected = OddOptimizer(parameters, 0)
    assert optimizer.state[parameters[0]] is first
    assert content(dict(optimizer.state)) == content(dict(expected.state))
    assert content(optimizer.defaults) == content(expected.defaults)
    assert content(optimizer.param_groups) == content(expected.param_groups)
    assert all(ours is theirs for ours, theirs in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert first["alias"] is first["nested"]["list"][0], "one tensor has become two"


@on_ranks(2, joined=False)
def test_tensors_that_fit_are_overwritten_in_place() -> None:
    rank, device, communicator = start()
    model = mlp(rank, device)
    rate = torch.tensor(0.01 * (rank + 1))
    optimizer = torch.optim.Adam([{"params": [parameter]} for parameter in model.parameters()], lr=rate)
    train(model, optimizer, seed=rank, steps=3, device=device)
    tensors = list(tensors_in([optimizer.param_groups, list(optimizer.state.values())]))
    addresses = [tensor.data_ptr() for tensor in tensors]
    broadcast_optimizer_state(optimizer, communicator)
    after = list(tensors_in([optimizer.param_groups, list(optimizer.state.values())]))
    assert [tensor.data_ptr() for tensor in after] == addresses
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert optimizer.defaults["lr"] is rate
    assert rate.item() == torch.tensor(0.01).item()


@on_ranks(2, joined=False)
def test_one_tensor_here_may_be_two_on_rank_0() -> None:
    rank, device, communicator = start()
    parameters = [nn.Parameter(torch.zeros(1, device=device)) for _ in range(2)]
    shared = torch.tensor(9.0)
    rates = [torch.tensor(0.25), torch.tensor(0.5)] if rank == 0 else [shared, shared]
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in zip(parameters, rates, strict=True)]
    optimizer = torch.optim.Adam(groups)
    broadcast_optimizer_state(optimizer, communicator)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.5]


def keep_what_cannot_be_sent() -> list[str]:
    rank, device, communicator = start()
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in (2, 3)]
    owner = nn.Linear(2, 2)
    mine = threading.Lock()
    extras = {"of": lambda: rank, "module": owner, "layers": [owner], "momentum": 0.1 * (1 + rank), "nothing": None}
    optimizer = torch.optim.SGD([{"params": [one], **extras} for one in parameters], lr=0.1 * (1 + rank))
    optimizer.defaults["lock"] = mine
    optimizer.state[parameters[0]] = {"momentum_buffer": torch.full((2,), 1.0 + rank, device=device), "own": mine}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broadcast_optimizer_state(optimizer, communicator)
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["nothing"]) == (0.1, 0.1, None)
        assert group["of"]() == rank
        assert group["module"] is group["layers"][0] is owner
    assert optimizer.defaults["lock"] is optimizer.state[parameters[0]]["own"] is mine
    assert optimizer.defaults["lr"] == 0.1
    assert optimizer.state[parameters[0]]["momentum_buffer"].tolist() == [1.0, 1.0]
    return [str(one.message) for one in caught]


def test_what_cannot_be_sent_stays_and_modules_do() -> None:
    first, *others = run_ranks(WORLD_SIZE, keep_what_cannot_be_sent)
    assert others == [[]] * (WORLD_SIZE - 1)
    (message,) = first
    assert "Of SGD, values that cannot be sent stay as each rank has them: param_groups[0]['of'] (" in message
    assert "and 1 more" in message
    assert "module" not in message.splitlines()[0]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_lbfgs_is_refused() -> None:
    class Wolfe(torch.optim.LBFGS):
        pass

    nobody: Any = None
    for kind in (torch.optim.LBFGS, Wolfe, type("LBFGS", (torch.optim.SGD,), {})):
        with pytest.raises(ValueError, match=r"(?s)evaluates its closure.*inside the closure"):
            broadcast_optimizer_state(kind([nn.Parameter(torch.zeros(1))], lr=1.0), nobody)


def broadcast_unequal(case: str) -> str:
    rank, device, communicator = start()
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in (2, 3, 4)]
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if case == "groups" and rank == 2:
        groups = [{"params": parameters}]
    if case == "count" and rank == 1:
        groups[1]["params"] = []
    if case == "order" and rank != 0:
        groups[0]["params"] = parameters[1::-1]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    if case == "pickle" and rank == 0:
        optimizer.state[parameters[0]] = {"lock": (entry for entry in ())}
    if case == "sparse" and rank == 0:
        optimizer.state[parameters[0]] = {"sum": torch.eye(2, device=device).to_sparse()}
    try:
        broadcast_optimizer_state(optimizer, communicator)
    except RuntimeError as error:
        broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), communicator)  # the group has not lost its step
        return str(error)
    raise AssertionError("not noticed")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("groups", r"rank 2: ValueError: 1 param_groups, rank 0 has 2\."),
        ("count", r"rank 1: .*0 parameters in param_groups\[1\], rank 0 has 1"),
        ("order", r"rank 1: .*shape \(3,\) of parameter 0 in param_groups\[0\], rank 0 has \(2,\); rank 2: "),
        (
            "pickle",
            r"rank 1: .*rank 0's state 0\['lock'\] cannot be sent \(.*generator.*is not here",
        ),
        ("sparse", r"rank 0: state 0 cannot be sent: .*sparse"),
    ],
)
def test_differences_are_told_on_every_rank(case: str, reason: str) -> None:
    messages = run_ranks(WORLD_SIZE, broadcast_unequal, case)
    assert len(set(messages)) == 1
    with pytest.raises(RuntimeError, match=reason):
        raise RuntimeError(messages[0])
