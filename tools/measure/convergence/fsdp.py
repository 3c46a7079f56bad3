"""A model under torch's FSDP2, whose communication Bagua compresses or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bagua.fsdp import compress_communication


def shard_model(model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> None:
    """Each of `model.blocks` is a module of FSDP's, and so is the rest of the model.

    Args:
        options: of compress_communication; without any, torch communicates by itself.

    Raises:
        ValueError: the model has no blocks.
    """
    if not hasattr(model, "blocks"):
        raise ValueError("FSDP is for the tasks with text, whose model has blocks; leave its algorithms out")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Differences of weights need ranks that keep the weights they compute with.
    kept = bool(options.get("weight_differences"))
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh, reshard_after_forward=not kept)
    if options:
        compress_communication(model, **options)
