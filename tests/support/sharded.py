"""Small models under FSDP2, for use inside a rank (support.ranks): a plain one and one that Bagua compresses, alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from support.training import Batch, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from bagua.fsdp import torch_internals

WIDTH = 37  # which no number of ranks divides: shards are padded


class Tied(nn.Module):
    """Token numbers in, through one matrix in and out, a norm, and a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.out = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.abs() * 5).long().clamp(max=10)
        return self.out(self.head(torch.relu(self.layer(self.norm(self.embedding(numbers)))))).mean(dim=1)


def layers() -> nn.Sequential:
    """2-37-37-4, each layer a module to shard; the root has no parameter of its own."""
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 4))


def shard(model: nn.Module, device: torch.device, mesh: Any = None, **options: Any) -> Any:
    """`model`, sharded child by child and as a whole; Tied only as a whole. `options` are fully_shard's."""
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    for child in model.children() if not isinstance(model, Tied) else ():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def twins(
    device: torch.device, make: Callable[[], nn.Module] = layers, mesh: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Two sharded models with the same weights on all ranks."""
    torch.manual_seed(5)
    one = make().to(device)
    other = copy.deepcopy(one)
    return shard(one, device, mesh, **options), shard(other, device, mesh, **options)


def whole(tensor: Any) -> Tensor:
    """A DTensor's elements of all ranks. Collective."""
    found: Tensor = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Collective."""
    return {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Collective."""
    return {name: whole(one) for name, one in model.named_parameters()}


def check_near(ours: dict[str, Tensor], plain: dict[str, Tensor], share: float, what: str) -> None:
    """No element differs by more than `share` of the largest element of all tensors. Some must differ: `share` 0 is for
    equal ones."""
    assert list(ours) == list(plain), f"{what}: {list(ours)} and {list(plain)}"
    assert plain, what
    largest = max(float(one.float().abs().max()) for one in plain.values())
    distance = max(float((one.float() - plain[name].float()).abs().max()) for name, one in ours.items())
    assert distance <= share * largest, f"{what}: {distance / largest:.2e} of the largest, allowed {share:.2e}"
    assert distance > 0 or share == 0, f"{what}: nothing was compressed"


def train_sharded(
    model: Any, optimizers: Iterable[torch.optim.Optimizer], data: Iterable[Batch], clip: float | None = None
) -> float:
    """A step for each batch; returns the last loss."""
    loss = torch.zeros(())
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def param_groups(model: nn.Module) -> list[Any]:
    """torch's groups of parameters, by whatever name this torch keeps them."""
    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    return [group for one in modules for group in torch_internals.param_groups(one)]
