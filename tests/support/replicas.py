"""All ranks of a job in one process, without communication: references for algorithms whose replicas differ.

Every rank builds the same `Replicas`, so it knows what each rank's weights should be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence

import torch
from support.training import Batch
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
