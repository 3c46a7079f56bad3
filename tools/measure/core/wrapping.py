"""How a model is made data-parallel, by algorithm: torch's DDP alone and with hooks, torch's FSDP2 as it is and
compressed, and Bagua's algorithms.

Bagua is imported only for its own algorithms: torch's DDP is measured in a process that it has not touched, if it is
compared with nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from measure.fsdp import Whole, shard_model

# The least that torch documents; more of it compresses less.
_POWERSGD_RANK = 1
# The variance of a few steps is no estimate, and QAdam divides by it ever after: larger steps would leave what numbers
# can hold. How long a step takes does not depend on it.
_QADAM_RATE = 1e-6


@dataclass(frozen=True)
class Averaging:
    """Of an algorithm that averages parameters during its steps, on this rank."""

    count: Callable[[], int]  # averages that the parameters were given so far
    seconds: Callable[[], float]  # that the ranks took for the last of them


@dataclass(frozen=True)
class Training:
    """A model as an algorithm trains it."""

    forward: nn.Module  # whose forward and backward are used
    optimizer: torch.optim.Optimizer
    # Ends what communicates by itself. On all ranks, after the last step and before parameters are looked at.
    finish: Callable[[], None] = lambda: None
    averaging: Averaging | None = None  # None: what it communicates belongs to a step, or it is alone
    whole: Callable[[], nn.Module] | None = None  # the trained parameters, where the model has only shards


def wrap(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    warmup: int,
    is_bf16: bool = False,
) -> Training:
    """
    Args:
        warmup: steps before those that are measured; what an algorithm begins later than with its first step, it begins
            with the last of these.
        is_bf16: the model computes in bf16.
    """
    if name in _FSDPS:
        return _with_fsdp(name, model, optimizer, device, is_bf16)
    if name in _DDPS:
        return Training(_with_ddp(name, model, device, warmup), optimizer)
    if name == "bagua-ddp":
        package: Any = importlib.import_module("bagua.torch_api.data_parallel")
        algorithm = _algorithm("gradient_allreduce")
        return Training(package.DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm), optimizer)
    return _with_bagua(name, model, optimizer, warmup)


# Any: what Bagua adds to every module is seen by no type checker, and it may be absent.
def _with_bagua(name: str, model: Any, optimizer: torch.optim.Optimizer, warmup: int) -> Training:
    if name == "qadam":
        optimizers: Any = importlib.import_module("bagua.torch_api.algorithms.q_adam")
        own = optimizers.QAdamOptimizer(model.parameters(), lr=_QADAM_RATE, warmup_steps=max(1, warmup - 1))
        return Training(model.with_bagua([own], _algorithm("qadam", q_adam_optimizer=own)), own)
    algorithm_name, options = _ALGORITHMS[name]
    wrapped = model.with_bagua([optimizer], _algorithm(algorithm_name, **options))
    if name == "async":
        own = wrapped.bagua_algorithm
        averaging = Averaging(lambda: int(own.staleness.count), lambda: float(own.exchange_s))
        is_alone = torch.distributed.get_world_size() == 1
        return Training(wrapped, optimizer, lambda: own.abort(wrapped), None if is_alone else averaging)
    return Training(wrapped, optimizer)


# --- torch's DDP -----------------------------------------------------------------------------------------------------


_ONE_BUCKET_MIB = 1 << 20
_DDPS = ("torch-ddp", "ddp-fp16", "ddp-powersgd", "ddp-bytegrad")


def _with_ddp(name: str, model: nn.Module, device: torch.device, warmup: int) -> DistributedDataParallel:
    # PowerSGD's second all-reduce of a bucket starts when the first is over. With gloo, several buckets may come to it
    # in another order on each rank, and then it is torn down by its own check: there it gets one bucket.
    limit = _ONE_BUCKET_MIB if name == "ddp-powersgd" and device.type == "cpu" else None
    # torch's defaults but for the gradients, which are views of the buckets: else it copies each one twice.
    devices = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=limit)
    torch_hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    if name == "ddp-fp16":
        ddp.register_comm_hook(None, importlib.import_module(f"{torch_hooks}.default_hooks").fp16_compress_hook)
    elif name == "ddp-powersgd":
        hooks: Any = importlib.import_module(f"{torch_hooks}.powerSGD_hook")
        # It asks for two steps at least without compression, and has a thousand by default.
        first = max(2, warmup - 1)
        state = hooks.PowerSGDState(None, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=first)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
    elif name == "ddp-bytegrad":
        ddp.register_comm_hook(None, importlib.import_module("bagua.comm_hooks").bytegrad)
    return ddp


# --- torch's FSDP2 ---------------------------------------------------------------------------------------------------

# What is compressed.
_FSDPS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp-kept": {},
    "fsdp-int8": {"gradients": "int8"},
    "fsdp-int4": {"gradients": "int4"},
    "fsdp-int8-weights": {"gradients": "int8", "weights": "int8"},
    "fsdp-int4-differences": {"gradients": "int4", "weights": "int4", "weight_differences": True},
}


def _with_fsdp(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, is_bf16: bool
) -> Training:
    # DDP does that by itself.
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.detach(), 0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_bf16 else None
    shard_model(model, device, _FSDPS[name], keeps_weights=name == "fsdp-kept", policy=policy)
    # It has no state yet, and all its parameters are others now.
    (group,) = optimizer.param_groups
    group["params"] = list(model.parameters())
    return Training(model, optimizer, whole=lambda: Whole(model))


# --- Bagua's algorithms ----------------------------------------------------------------------------------------------

# The registered name and what its defaults do not say.
_ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "with-bagua": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {}),
    "bytegrad-flat": ("bytegrad", {"hierarchical": False}),
    "bytegrad-int4": ("bytegrad", {"hierarchical": False, "codec": "int4"}),
    "decentralized": ("decentralized", {}),
    "decentralized-shift-one": ("decentralized", {"peer_selection_mode": "shift_one"}),
    "low-precision-decentralized": ("low_precision_decentralized", {}),
    # A turn is short: with a pause, most steps would be those of a rank that is alone.
    "async": ("async", {"sync_interval_ms": 0}),
}


def _algorithm(name: str, **options: Any) -> Any:
    package: Any = importlib.import_module("bagua.torch_api.algorithms")
    return package.Algorithm.init(name, **options)


# Of torch, without Bagua.
_TORCH_ALONE = (
    *(name for name in _DDPS if name != "ddp-bytegrad"),
    *(name for name, options in _FSDPS.items() if not options),
)


def prepare(names: Sequence[str]) -> None:
    """Once per process, when torch's default group exists, which Bagua then shares."""
    if not set(names) <= set(_TORCH_ALONE):
        importlib.import_module("bagua.torch_api").init_process_group()
