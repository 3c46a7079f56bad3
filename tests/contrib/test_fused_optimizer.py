"""Optimizers that step on flat tensors do what they do on one tensor per parameter."""

from __future__ import annotations

import copy
import functools
import io
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, whose optimizers are fused")
import torch
from support.ranks import device_for
from support.sweeps import rest_is_deep
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua.contrib.fuse.optimizer import fuse_optimizer, is_fused_optimizer

STEPS = 101
SETTINGS: list[tuple[type[Any], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.01, "weight_decay": 0.5, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adadelta, {}),
    (optim.ASGD, {"t0": 5}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Rprop, {"etas": (0.4, 1.3)}),
    (optim.Adam, {"foreach": True}),
    (optim.RMSprop, {"foreach": True, "weight_decay": 0.1}),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several cost more than these tensors are worth."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """With a parameter without dimensions, a scalar one, channels_last weights and one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 4, bias=False)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))

    def forward(self, batch: Tensor, *, without_second: bool = False) -> Tensor:
        middle = self.first(self.conv(batch).mean((2, 3))).tanh()
        last = middle[:, :4] if without_second else self.second(middle)
        result: Tensor = self.third(last * self.scale + self.bias).square().mean()
        return result

    def groups(self) -> list[dict[str, Any]]:
        """Two, with another learning rate."""
        return [
            {"params": [*self.conv.parameters(), *self.first.parameters(), self.scale]},
            {"params": [*self.second.parameters(), *self.third.parameters(), self.bias], "lr": 0.02},
        ]


class Pair:
    """The same training with and without `fuse_step`."""

    def __init__(self, make: Callable[[list[dict[str, Any]]], Any], **options: Any) -> None:
        self.device = device_for(0)
        self.ours, self.theirs = Net().to(self.device), Net().to(self.device)
        self.optimizer = fuse_optimizer(make(self.ours.groups()), **options)
        self.other = make(self.theirs.groups())
        self.generator = torch.Generator().manual_seed(1)

    @property
    def both(self) -> list[tuple[Net, Any]]:
        return [(self.ours, self.optimizer), (self.theirs, self.other)]

    def backward(self, *, set_to_none: bool = True, **how: bool) -> None:
        batch = torch.randn(4, 2, 3, 3, generator=self.generator).to(self.device)
        for model, optimizer in self.both:
            optimizer.zero_grad(set_to_none=set_to_none)
            model(batch, **how).backward()

    def step(self, *, fused: bool = True) -> None:
        self.other.step()
        (self.optimizer.fuse_step if fused else self.optimizer.step)()

    def train(self, steps: int, **how: bool) -> None:
        for _ in range(steps):
            self.backward(**how)
            self.step()

    def check(self, what: object = "") -> None:
        for (name, mine), other in zip(self.ours.named_parameters(), self.theirs.parameters(), strict=True):
            assert torch.equal(mine, other), (name, what)
        states, others = self.optimizer.state_dict(), self.other.state_dict()
        assert states["param_groups"] == others["param_groups"], what
        assert states["state"].keys() == others["state"].keys(), what
        for index, state in others["state"].items():
            assert states["state"][index].keys() == state.keys(), (index, what)
            for name, value in state.items():
                mine = states["state"][index][name]
                same = torch.equal(mine, value) if isinstance(value, Tensor) else mine == value
                assert same, (index, name, what)


adam = functools.partial(optim.Adam, amsgrad=True)
momentum = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
MAKERS = [adam, momentum]


@pytest.mark.parametrize(
    ("cls", "options"),
    rest_is_deep(SETTINGS, *range(0, len(SETTINGS), 3)),
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_steps_in_turns(cls: type[Any], options: dict[str, Any]) -> None:
    pair = Pair(lambda groups: cls(groups, **options))
    for step in range(STEPS):
        pair.backward(set_to_none=step % 3 > 0)
        pair.step(fused=step % 2 == 0)
        for _, one in pair.both:
            one.param_groups[1]["lr"] *= 0.99  # as schedulers do
    pair.check()
    assert pair.optimizer._bagua_fused_count == 102


@pytest.mark.parametrize("check_flatten", [True, False])
@pytest.mark.parametrize("make", MAKERS)
def test_missing_and_frozen(make: Any, check_flatten: bool) -> None:
    """Step counters grow apart, so runs are split; when a parameter is back, nothing is lost."""
    pair = Pair(make, check_flatten=check_flatten)
    for model, _ in pair.both:
        model.first.weight.requires_grad_(False)
    for step in range(12):
        if step == 8:
            for model, _ in pair.both:
                model.first.weight.requires_grad_(True)
        pair.backward(without_second=step % 3 == 1)
        pair.step(fused=step % 4 != 2)
        pair.check(step)
    assert pair.optimizer._bagua_fused_count > 9


@pytest.mark.parametrize("make", MAKERS)
def test_plain_state_dicts(make: Any) -> None:
    """What is saved does not know of fusing: it goes into a plain optimizer, and comes from one."""
    pair = Pair(make)
    pair.train(3)
    file = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), file)
    file.seek(0)
    pair.train(2)
    for model, optimizer in pair.both:
        model.load_state_dict(Net().state_dict())
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
    before = pair.optimizer._bagua_fused_count
    pair.train(3)
    pair.check("loaded")
    assert pair.optimizer._bagua_fused_count == before + 6
    pair.optimizer.load_state_dict(copy.deepcopy(pair.other.state_dict()))
    pair.train(2)
    pair.check("of a plain one")


def _assign_data(pair: Pair) -> None:
    pair.ours.second.weight.data = pair.ours.second.weight.data.clone()


def _convert(pair: Pair) -> None:
    for model, _ in pair.both:
        model.double()
        for group in _.param_groups:
            for one in group["params"]:
                for name, value in _.state[one].items():
                    if name != "step":
                        _.state[one][name] = value.double()


def _of_both(change: Callable[[nn.Parameter, Any], object]) -> Callable[[Pair], None]:
    """Of one parameter, with its optimizer."""

    def changed(pair: Pair) -> None:
        for model, optimizer in pair.both:
            change(model.second.weight, optimizer)

    return changed


_set_step = _of_both(lambda one, optimizer: optimizer.state[one]["step"].fill_(40))


def _assign_state_data(pair: Pair) -> None:
    for name in ("exp_avg", "step"):
        value = pair.optimizer.state[pair.ours.second.weight][name]
        value.data = value.data.clone()
    _set_step(pair)  # in the new memory alone


def _add_group(pair: Pair) -> None:
    for model, optimizer in pair.both:
        moved = optimizer.param_groups[1]["params"].pop(0)
        optimizer.add_param_group({"params": [moved], "lr": 0.05})
        assert moved is model.second.weight


@pytest.mark.parametrize(
    "change",
    [
        _assign_data,
        _convert,
        _of_both(lambda one, optimizer: optimizer.state[one].update(exp_avg=torch.full_like(one, 0.5))),
        _of_both(
            lambda one, optimizer: optimizer.state.update(
                {one: {name: value.clone() for name, value in optimizer.state[one].items()}}
            )
        ),
        _set_step,
        _of_both(lambda one, optimizer: optimizer.state.pop(one)),
        _assign_state_data,
        _add_group,
    ],
)
def test_changes_are_noticed(change: Callable[[Pair], None]) -> None:
    pair = Pair(adam)
    pair.train(3)
    change(pair)
    if change is _convert:
        for step in range(3):
            batch = torch.randn(4, 2, 3, 3, dtype=torch.float64, generator=pair.generator).to(pair.device)
            for model, optimizer in pair.both:
                optimizer.zero_grad()
                model(batch).backward()
            pair.step(fused=step < 2)
    else:
        pair.train(3)
    pair.check()
    assert pair.optimizer._bagua_fused_count >= 9


def test_memory_that_is_given_back() -> None:
    """Weights that are swapped in for an evaluation, and gradients that old code replaces by others."""
    pair = Pair(adam)
    pair.train(2)
    for name in ("exp_avg", "step"):
        states = [state[name] for one, state in pair.optimizer.state.items() if one.dim() and one is not pair.ours.bias]
        assert len({one.untyped_storage().data_ptr() for one in states}) == 2, "one a group"
    memory = [one.data_ptr() for one in pair.ours.parameters() if one.dim()]
    for one in pair.ours.parameters():
        one.data = one.data.clone()
    pair.train(2)
    pair.check()
    assert [one.data_ptr() for one in pair.ours.parameters() if one.dim()] == memory
    pair = Pair(momentum)
    pair.train(4, set_to_none=False)
    pair.check()
    weights = [one for one in pair.ours.first.parameters() if one.grad is not None]
    assert len({one.grad.untyped_storage().data_ptr() for one in weights if one.grad is not None}) == 1
    pair.backward(set_to_none=False)
    for one in pair.ours.parameters():
        assert one.grad is not None
        one.grad.data = one.grad.data.clone()
    pair.step()
    pair.train(2)
    pair.check()


def test_a_scaler_skips_steps() -> None:
    pair = Pair(adam)
    scalers = [torch.amp.GradScaler(pair.device.type, init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        batch = torch.randn(4, 2, 3, 3, generator=pair.generator).to(pair.device)
        batch *= float("inf") if step == 3 else 1
        for (model, optimizer), scaler in zip(pair.both, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            if optimizer is pair.optimizer:
                pair.optimizer.fuse_step(scaler=scaler)
            else:
                scaler.step(optimizer)
            scaler.update()
        pair.check(step)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert pair.optimizer._bagua_fused_count == 10
    assert "step" not in vars(pair.optimizer)


def test_closures_return_their_result() -> None:
    pair = Pair(momentum)
    batch = torch.randn(4, 2, 3, 3).to(pair.device)

    def closure_of(model: Net, optimizer: Any) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        mine = pair.optimizer.fuse_step(closure_of(pair.ours, pair.optimizer))
        assert torch.equal(mine, pair.other.step(closure_of(pair.theirs, pair.other)))
    pair.check()


def test_hooks_run_once_and_see_the_optimizer() -> None:
    pair = Pair(adam)
    seen: list[Any] = []
    parameters = [one for group in pair.optimizer.param_groups for one in group["params"]]

    def hook(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        seen.append(optimizer)
        assert all(map(operator.is_, optimizer.param_groups[0]["params"], parameters))

    handles = [
        register_optimizer_step_pre_hook(hook),
        pair.optimizer.register_step_pre_hook(hook),
        pair.optimizer.register_step_post_hook(hook),
    ]
    try:
        pair.backward()
        pair.optimizer.fuse_step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [pair.optimizer] * 3


def test_copies_are_fused_and_pickles_are_not() -> None:
    pair = Pair(adam)
    pair.train(2)
    pair.ours, pair.optimizer = copy.deepcopy((pair.ours, pair.optimizer))
    assert is_fused_optimizer(pair.optimizer)
    pair.train(2)
    pair.check()
    assert pair.optimizer._bagua_fused_count == 4
    again = pickle.loads(pickle.dumps(pair.optimizer))
    assert not is_fused_optimizer(again)
    assert again.state_dict()["state"].keys() == pair.optimizer.state_dict()["state"].keys()


class Counting(optim.Optimizer):
    """Counts steps in its groups, with Python numbers in its states, which become wider on the way."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                count = state["count"] = state.get("count", 0) + 1
                dtype = torch.float64 if count > 2 else torch.float32
                state["mean"] = state.get("mean", torch.zeros_like(one)).to(dtype) * 0.9 + one.grad
                state["norm"] = torch.tensor(float(count), dtype=dtype)
                one.sub_(state["mean"] / state["norm"], alpha=group["lr"] / group["calls"])


def test_options_and_states_that_steps_change() -> None:
    pair = Pair(Counting)
    for step in range(6):
        pair.backward(without_second=step == 2)
        pair.step(fused=step % 3 > 0)
        pair.check(step)
    assert pair.optimizer._bagua_fused_count > 4
    pair = Pair(Counting)
    for _ in range(5):
        pair.train(1)
        pair.check()
    assert pair.optimizer._bagua_fused_count == 10


def test_a_failed_step_leaves_the_optimizer_as_it_was() -> None:
    pair = Pair(adam)
    pair.train(2)
    groups, states = pair.optimizer.param_groups, pair.optimizer.state
    pair.backward()
    groups[1]["betas"] = None
    with pytest.raises(TypeError):
        pair.optimizer.fuse_step()
    assert pair.optimizer.param_groups is groups
    assert pair.optimizer.state is states
