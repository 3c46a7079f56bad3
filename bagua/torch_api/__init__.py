"""Bagua for PyTorch: `import bagua.torch_api as bagua`.

Importing it adds `with_bagua` and what belongs to it to torch.nn.Module and, for code written for Bagua 0.9, methods to
torch.Tensor, torch.distributed.ProcessGroup and Bagua's communicators (bagua.legacy, which only this file installs). It
sets up nothing else: no CUDA, no process group.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "bagua.torch_api needs torch, which is not installed.\n"
        "Install it in this environment: pip install torch. In a checkout of Bagua: pip install '.[torch]'.",
        name="torch",
    )

from bagua.legacy.installation import install_in_torch_api
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
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
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
from bagua.torch_api.tensor import BaguaTensor
from bagua.torch_api.wrapping import with_bagua

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
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
    "communication",
    "data_parallel",
    "env",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
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
        told = f"; there is bagua.{name}: from bagua import {name}" if name in _OUTSIDE else ""
        raise AttributeError(f"module {__name__} has no attribute {name!r}{told}")
    path = _LAZY[name]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # a package that it needs, which the message names
        raise AttributeError(f"this version of Bagua has no {path}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
