"""Every algorithm by its registry name, for tests that hold for all of them, for use inside a rank (support.ranks).

The data pulls each rank somewhere else, so that replicas that are not kept together are far apart after some steps.
`check_together` says what an algorithm promises: the same bits, or less distance than ranks that train alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from support.training import Batch, loss_of, mlp, wrap_with
from torch import nn

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

WARMUP_STEPS = 5


def outer_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Without momentum, which makes the first rounds of a short test too large."""
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass(frozen=True)
class Case:
    """An algorithm with options.

    Attributes:
        equal: replicas are the same bits after each step, or with `async`, after `abort`.
        own_state: of each rank, though replicas are equal.
        even: the number of ranks that exchange must be even, or one.
        deterministic: a run can be repeated bit for bit.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    equal: bool = False
    own_state: bool = False
    even: bool = False
    deterministic: bool = True

    def __str__(self) -> str:
        return " ".join(
            [self.name, *(f"{name}={getattr(value, '__name__', value)}" for name, value in self.options.items())]
        )

    @property
    def is_async(self) -> bool:
        return self.name == "async"

    def with_options(self, **options: Any) -> Case:
        """The same with other options."""
        return replace(self, options={**self.options, **options})

    def on_nodes(self) -> Case:
        """With a hierarchy of nodes, where the algorithm has one."""
        has_none = self.is_async or self.name in ("local_sgd", "streaming_diloco", "powersgd")
        return self if has_none else self.with_options(hierarchical=True)

    def optimizer(self, module: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
        """One that the algorithm works with."""
        if self.name == "qadam":
            return QAdamOptimizer(module.parameters(), lr=lr / 5, warmup_steps=WARMUP_STEPS)
        return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)

    def algorithm(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Algorithm:
        """Raises KeyError if it is not registered: that is a failure, not a skip."""
        options = dict(self.options)
        if self.name == "qadam":
            options |= {"q_adam_optimizer": optimizer, "grad_scaler": scaler}
        return Algorithm.init(self.name, **options)

    def wrap(
        self,
        module: Any,
        optimizer: torch.optim.Optimizer,
        how: str = "with_bagua",
        group: Any = None,
        scaler: Any = None,
    ) -> Any:
        """`how`: as of wrap_with."""
        return wrap_with(how, module, [optimizer], self.algorithm(optimizer, scaler), process_group=group)

    def stop(self, model: Any) -> None:
        """What a user does at the end of training."""
        if self.is_async:
            model.bagua_algorithm.abort(model)


CASES = (
    Case("gradient_allreduce", equal=True),
    Case("bytegrad", equal=True),
    Case("qadam", equal=True),
    Case("decentralized"),
    Case("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False}, even=True),
    Case("low_precision_decentralized"),
    Case("async", {"sync_interval_ms": 1}, equal=True, deterministic=False),
    Case("local_sgd", {"sync_every": 2}),
    Case("streaming_diloco", {"sync_every": 2, "outer_optimizer": outer_sgd}),
    Case("powersgd", {"rank": 1}, equal=True, own_state=True),
)
NAMES = tuple(dict.fromkeys(case.name for case in CASES))
OLD_NAMES = NAMES[:6]  # of Bagua 0.9


def pulling(rank: int, count: int, device: torch.device, seed: int = 0, samples: int = 4) -> list[Batch]:
    """Inputs with targets that are a corner of its own for each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    target = torch.zeros(samples, 4)
    target[:, rank % 4] = 1
    return [(torch.randn(samples, 2, generator=generator).to(device), target.to(device)) for _ in range(count)]


def quiet(model: Any) -> AbstractContextManager[None]:
    """no_sync of whatever it is; an ordinary module has nothing to be quiet about."""
    engine = getattr(model, "inner", None) or model.__dict__.get("bagua_ddp")
    context: AbstractContextManager[None] = nullcontext() if engine is None else engine.no_sync()
    return context


Loop = Callable[[Any, torch.optim.Optimizer], None]


def train_with(
    case: Case,
    rank: int,
    device: torch.device,
    loop: Loop,
    make: Callable[[], nn.Module] = mlp,
    how: str = "with_bagua",
    group: Any = None,
    scaler: Any = None,
) -> Any:
    """Runs `loop` on a wrapped module, and on a copy that trains alone, and checks what the algorithm promises. Returns
    the wrapped module, after the algorithm was stopped."""
    torch.manual_seed(rank)
    net = make().to(device)
    optimizer = case.optimizer(net)
    model = case.wrap(net, optimizer, how, group, scaler)
    alone = copy.deepcopy(net)
    start = copy.deepcopy(net.state_dict())
    loop(model, optimizer)
    case.stop(model)
    check_together(case, net, alone, loop, start, group)
    return model


def check_together(
    case: Case,
    net: nn.Module,
    alone: nn.Module,
    loop: Loop,
    start: dict[str, Any] | None = None,
    group: Any = None,
) -> None:
    """
    Args:
        alone: as `net` was, which this rank trains alone by `loop`, unless replicas are to be equal.
        start: the state that both began with.
        group: of torch; None: the default group.
    """
    for name, parameter in net.named_parameters():
        assert parameter.isfinite().all(), f"{case}: {name}"
    if start is not None:
        moved = [name for name, parameter in net.named_parameters() if not torch.equal(parameter, start[name])]
        assert len(moved) >= 4, f"{case}: only {moved} were trained"
    distance = spread(net, group)
    if case.equal:
        assert distance == 0, f"{case}: replicas are {distance} apart"
        return
    if dist.get_world_size(group) > 1:
        loop(alone, case.optimizer(alone))
        apart = spread(alone, group)
        assert apart > 0, "a test whose data does not pull ranks apart says nothing"
        assert distance < 0.6 * apart, f"{case}: replicas are {distance} apart, alone they would be {apart}"


def spread(net: nn.Module, group: Any = None) -> float:
    """The largest distance of a rank from the mean of all, of all parameters together. Collective."""
    flat = torch.cat([one.detach().reshape(-1).double() for one in net.parameters()])
    flats = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(flats, flat, group=group)
    together = torch.stack(flats)
    if all(torch.equal(one, together[0]) for one in together):
        return 0.0  # a mean may round
    return (together - together.mean(dim=0)).norm(dim=1).max().item()


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, **keywords: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, batch, **keywords).backward()
    optimizer.step()
