"""A model under torch's FSDP2, whose communication Bagua compresses or not."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard_model(
    model: nn.Module,
    device: torch.device,
    options: Mapping[str, Any],
    *,
    keeps_weights: bool = False,
    policy: MixedPrecisionPolicy | None = None,
) -> None:
    """Each of `model.blocks`, where there are such, is a module of FSDP's, and so is the rest of the model.

    Args:
        options: of compress_communication; without any, torch communicates by itself.
        keeps_weights: between forward and backward. Differences of weights need that, and get it.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    keeps_weights |= bool(options.get("weight_differences"))
    for module in (*getattr(model, "blocks", ()), model):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=not keeps_weights, mp_policy=policy or MixedPrecisionPolicy()
        )
    if options:  # otherwise the process is torch's alone
        bagua: Any = importlib.import_module("bagua.fsdp")
        bagua.compress_communication(model, **options)


class Whole(nn.Module):
    """The parameters of all ranks' shards together. On all ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.gathered = nn.ParameterList(_whole(parameter) for parameter in model.parameters())


def _whole(parameter: Any) -> nn.Parameter:
    full: Tensor = parameter.detach().full_tensor()
    return nn.Parameter(full, requires_grad=parameter.requires_grad)
