"""All ranks of a job in one process, without communication: references for algorithms whose replicas differ.

Every rank builds the same `Replicas`, so it knows what each rank's weights should be.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.training import Batch, batches
from torch import Tensor, nn

Optimizers = Sequence[torch.optim.Optimizer]
# Of numbers by which a sum may differ that has another order, or that was rounded once more.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def dtype_of(net: nn.Module) -> torch.dtype:
    """Of its first parameter."""
    return next(net.parameters()).dtype


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """Squared error in float32, of a model of any one dtype."""
    output: Tensor = net(batch[0].to(dtype_of(net)))
    return nn.functional.mse_loss(output.float(), batch[1])


def flat_weights(net: nn.Module, names: Collection[str] | None = None) -> Tensor:
    """Copies of the parameters, those in `names` in its order, one behind the other."""
    parameters = dict(net.named_parameters())
    return torch.cat([parameters[name].detach().reshape(-1) for name in (names or parameters)])


@torch.no_grad()
def set_weights(net: nn.Module, flat: Tensor, names: Collection[str] | None = None) -> None:
    """The reverse of flat_weights; rounds to the dtype of each parameter."""
    parameters = dict(net.named_parameters())
    start = 0
    for name in names or parameters:
        stop = start + parameters[name].numel()
        parameters[name].copy_(flat[start:stop].view(parameters[name].shape))
        start = stop
    assert start == flat.numel()


def train_step(net: nn.Module, optimizers: Optimizers, batch: Batch) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(net, batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1)]


def momentum(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)]


def every_rank(step: int, ranks: int, device: torch.device) -> list[Batch]:
    """The batches of all ranks in this step."""
    return [batches(rank, 1, device, seed=step)[0] for rank in range(ranks)]


def gathered(tensor: Tensor) -> list[Tensor]:
    """Every rank's. Collective."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return every


class Replicas:
    """
    Args:
        net: what every rank begins with; copied.
        ranks: how many.
        make_optimizers: of one replica.
    """

    def __init__(self, net: nn.Module, ranks: int, make_optimizers: Callable[[nn.Module], Optimizers]) -> None:
        self.nets = [copy.deepcopy(net) for _ in range(ranks)]
        self.optimizers = [make_optimizers(one) for one in self.nets]

    def zero_grad(self) -> None:
        for net in self.nets:
            net.zero_grad()

    def backward(self, data: Sequence[Batch]) -> None:
        """Adds to each rank's gradients those of its batch."""
        for net, batch in zip(self.nets, data, strict=True):
            loss_of(net, batch).backward()

    def update(self, exchange: bool = True, skip: Collection[int] = ()) -> None:
        """What the algorithm does after the backward passes of a round: exchanges, and steps."""
        raise NotImplementedError

    def round(self, data: Sequence[Batch], exchange: bool = True, skip: Collection[int] = ()) -> None:
        """A round of one batch on each rank."""
        self.zero_grad()
        self.backward(data)
        self.update(exchange, skip)

    def step(self, skip: Collection[int] = ()) -> None:
        """All ranks' optimizers but those of `skip`."""
        for rank, optimizers in enumerate(self.optimizers):
            for optimizer in () if rank in skip else optimizers:
                optimizer.step()

    def weights(self, names: Collection[str] | None = None) -> list[Tensor]:
        return [flat_weights(net, names) for net in self.nets]

    def set_weights(self, flats: Sequence[Tensor], names: Collection[str] | None = None) -> None:
        for net, flat in zip(self.nets, flats, strict=True):
            set_weights(net, flat, names)

    def check(self, net: nn.Module, rank: int, what: str) -> None:
        """`net` is what the rank should have, but for the order of sums."""
        ours, theirs = flat_weights(net).float(), flat_weights(self.nets[rank]).float()
        tolerance = TOLERANCES[dtype_of(net)]
        assert torch.isfinite(ours).all(), what
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), (
            f"{what}: rank {rank} is {float((ours - theirs).abs().max()):.2e} away"
        )


class SideBySide:
    """A rank's model and the replicas of all, fed with the same batches.

    Args:
        case: its `build(rank, ranks, device)` gives the wrapped model, its module, its optimizers and the replicas.
    """

    def __init__(self, rank: int, device: torch.device, case: Any) -> None:
        self.rank, self.device, self.case = rank, device, case
        self.ranks = dist.get_world_size()
        self.model, self.net, self.optimizers, self.reference = case.build(rank, self.ranks, device)
        self._numbers = itertools.count(100)

    @property
    def engine(self) -> Any:
        return self.net.bagua_ddp

    def data(self) -> list[Batch]:
        return every_rank(next(self._numbers), self.ranks, self.device)

    def loss(self, data: Sequence[Batch]) -> Tensor:
        return loss_of(self.model, data[self.rank])

    def zero_grad(self) -> None:
        self.net.zero_grad()
        self.reference.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def normal_round(self, what: str) -> None:
        data = self.data()
        train_step(self.model, self.optimizers, data[self.rank])
        self.reference.round(data)
        self.check(what)

    def check(self, what: str) -> None:
        self.reference.check(self.net, self.rank, f"{self.case}: {what}")
