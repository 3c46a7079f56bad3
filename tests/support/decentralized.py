"""Decentralized training as a formula, x' = mix(x) - lr * g(x): all ranks simulated in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from support.replicas import Replicas, SideBySide, every_rank, flat_weights, gathered, sgd, train_step
from support.training import begin, check_tensor_on_ranks, mlp, wrap_with
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm

BOTH = ("all", "shift_one")


def partner_of(rank: int, ranks: int, step: int) -> int:
    if ranks == 1:
        return rank
    half = ranks // 2
    return (step + rank) % half + half if rank < half else (rank - half - step) % half


def mixed(values: Sequence[Tensor], mode: str, step: int, nodes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """Of each rank's weights, in float64. `nodes`: which ranks share one; None: no hierarchy."""
    wide = torch.stack([value.double() for value in values])
    places = nodes if nodes is not None else [[rank] for rank in range(len(values))]
    means = [wide[list(place)].mean(dim=0) for place in places]
    if mode == "all":
        means = [wide.mean(dim=0)] * len(places)
    else:
        means = [(mean + means[partner_of(place, len(places), step)]) / 2 for place, mean in enumerate(means)]
    return [mean for rank in range(len(values)) for place, mean in zip(places, means, strict=True) if rank in place]


class Reference(Replicas):
    """Replicas that exchange weights."""

    def __init__(self, net: nn.Module, ranks: int, make_optimizers: Any, mode: str, nodes: Any = None) -> None:
        super().__init__(net, ranks, make_optimizers)
        self.mode, self.nodes, self.exchanges = mode, nodes, 0

    def exchange(self) -> list[Tensor]:
        """The weights of now, mixed. The caller puts them in place when it may."""
        means = mixed(self.weights(), self.mode, self.exchanges, self.nodes)
        self.exchanges += 1
        return means

    def update(self, exchange: bool = True, skip: Collection[int] = ()) -> None:
        """Gradients are those of the weights before they are mixed."""
        if exchange:
            self.set_weights(self.exchange())
        self.step(skip)


def adam(net: nn.Module) -> list[torch.optim.Optimizer]:
    # A large eps: what rounding does to tiny gradients is no matter then.
    return [torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-2, weight_decay=0.1)]


def several(net: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.05, momentum=0.9)]


@dataclass(frozen=True)
class Case:
    mode: str = "all"
    interval: int = 1
    how: str = "with_bagua"
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = sgd
    dtype: torch.dtype = torch.float32
    hierarchical: bool = False
    steps: int = 7  # three exchanges with the longest interval, and two with each partner
    nodes: Any = field(default=None, hash=False)

    wrapper_options: ClassVar[dict[str, Any]] = {}

    def algorithm(self) -> Algorithm:
        return DecentralizedAlgorithm(self.hierarchical, self.mode, self.interval)

    def reference(self, start: nn.Module, ranks: int, net: Any) -> Replicas:
        """Of the wrapped `net`, whose replicas begin as `start`."""
        return Reference(start, ranks, self.make_optimizers, self.mode, self.nodes)

    def build(self, rank: int, ranks: int, device: torch.device) -> tuple[Any, Any, Any, Any]:
        """(wrapped model, its module, optimizers, reference). Each rank has other weights until it is wrapped."""
        net: Any = mlp(rank, device).to(self.dtype)
        optimizers = self.make_optimizers(net)
        model = self.wrap(net, optimizers)
        return model, net, optimizers, self.reference(mlp(0, device).to(self.dtype), ranks, net)

    def wrap(self, net: Any, optimizers: list[torch.optim.Optimizer]) -> Any:
        return wrap_with(self.how, net, optimizers, self.algorithm(), **self.wrapper_options)

    def check_exchange(self, net: Any, reference: Any, rank: int) -> None:
        """Peer weights of all ranks, or of partners, are the same bits."""
        (bucket,) = net.bagua_buckets
        assert bucket.operation.exchanges == reference.exchanges
        if self.mode == "all":
            check_tensor_on_ranks(bucket._peer_weight, "peer weight")
            return
        every = gathered(bucket._peer_weight)
        places = self.nodes if self.nodes is not None else [[one] for one in range(len(every))]
        mine = next(place for place, members in enumerate(places) if rank in members)
        for other in (*places[mine], *places[partner_of(mine, len(places), reference.exchanges - 1)]):
            assert torch.equal(every[other], bucket._peer_weight), (rank, other)


def check_formula(cases: Sequence[Case]) -> int:
    """Trains beside the reference, in each case. Returns how many buckets the last one had."""
    rank, device = begin()
    ranks = dist.get_world_size()
    for case in cases:
        model, net, optimizers, reference = case.build(rank, ranks, device)
        for step in range(case.steps):
            data = every_rank(step, ranks, device)
            exchanges = step % case.interval == 0
            train_step(model, optimizers, data[rank])
            reference.round(data, exchange=exchanges)
            reference.check(net, rank, f"{case}, step {step}")
            if exchanges:
                case.check_exchange(net, reference, rank)
        # The reference's tolerance would not notice a rank that only copies.
        weights, expected = gathered(flat_weights(net)), reference.weights()
        assert torch.equal(weights[0], weights[-1]) == torch.equal(expected[0], expected[-1]), case
    return len(net.bagua_buckets)


class Job(SideBySide):
    """Of two ranks."""

    def __init__(self, rank: int, device: torch.device, kind: type[Case] = Case, **options: Any) -> None:
        super().__init__(rank, device, kind(**options))
