"""Bagua for PyTorch: `import bagua.torch_api as bagua`.

Importing it adds `with_bagua` and what belongs to it to torch.nn.Module and, for code written for Bagua 0.9, methods to
torch.Tensor, torch.distributed.ProcessGroup and Bagua's communicators (bagua.legacy, which only this file installs). It
sets up nothing else: no CUDA, no process group.
"""

from __future__ import annotations

import importlib
from typing import Any

from bagua.misuse import missing_torch, nearest

if (without_torch := missing_torch(__name__)) is not None:
    raise without_torch

from bagua.job.regrouped import Regrouped
from bagua.legacy.installation import install_in_torch_api
from bagua.regroup.options import Regroup
from bagua.torch_api import algorithms, communication, data_parallel, env, tensor
from bagua.torch_api.communication import (
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_object,
    destroy_process_group,
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua.torch_api.distributed import BaguaModule
from bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua.torch_api.regroup import regroup_step
from bagua.torch_api.tensor import BaguaTensor
from bagua.torch_api.wrapping import with_bagua
from bagua.version import __version__ as __version__

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
    "Regroup",
    "Regrouped",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_object",
    "communication",
    "data_parallel",
    "destroy_process_group",
    "env",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "regroup_step",
    "scatter",
    "scatter_inplace",
    "send",
    "tensor",
    "with_bagua",
]

# Loaded when they are asked for: what they import would slow down every program that does without.
_LAZY = {
    "bucket": "bagua.torch_api.bucket",
    "checkpoint": "bagua.torch_api.checkpoint",
    "contrib": "bagua.torch_api.contrib",
    "model_parallel": "bagua.torch_api.model_parallel",
    "moe": "bagua.torch_api.model_parallel.moe",
    "utils": "bagua.torch_api.utils",
}

# Of the package bagua, as which this module is often imported.
_OUTSIDE = ("comm_hooks", "kernels", "net")

install_in_torch_api()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name!r}{_told_of(name)}")
    path = _LAZY[name]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # a package that it needs, which the message names
        raise AttributeError(f"this version of Bagua has no {path}") from None


def _told_of(name: str) -> str:
    if name in _OUTSIDE:
        return f"; there is bagua.{name}: from bagua import {name}"
    if name.startswith("_"):
        return ""
    for module in (communication, data_parallel, algorithms):
        if name in module.__all__:
            return f"; there is {module.__name__}.{name}"
    return f".{nearest(name, __dir__())}"


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
