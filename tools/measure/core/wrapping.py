"""How a model is made data-parallel, by algorithm: torch's DDP alone and with hooks, torch's FSDP2 as it is and
compressed, and Bagua's algorithms.

Bagua is imported only for its own algorithms: torch's DDP is measured in a process that it has not touched, if it is
compared with nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from measure.core.catalogue import ALGORITHMS
from measure.fsdp import Whole, shard_model

# The least that torch documents; more of it compresses less.
_POWERSGD_RANK = 1
# The variance of a few steps is no estimate, and QAdam divides by it ever after: larger steps would leave what numbers
# can hold. How long a step takes does not depend on it.
_QADAM_RATE = 1e-6
_BUCKET_SIZE = "BAGUA_DEFAULT_BUCKET_SIZE"


def _nothing() -> None:
    """What most algorithms have to end."""


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
    finish: Callable[[], None] = field(default=_nothing)
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
    bucket_mib: int | None = None,
) -> Training:
    """
    Args:
        warmup: steps before those that are measured; what an algorithm begins later than with its first step, it begins
            with the last of these.
        is_bf16: the model computes in bf16.
        bucket_mib: the size of its buckets; None: its default.

    Raises:
        ValueError: unknown name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; choose of {', '.join(ALGORITHMS)}")
    if name in _FSDPS:
        return _with_fsdp(name, model, optimizer, device, is_bf16)
    if name in _DDPS:
        return Training(_DDPS[name](model, device, warmup, bucket_mib), optimizer)
    if name == "bagua-ddp":
        package: Any = importlib.import_module("bagua.torch_api.data_parallel")
        algorithm = _algorithm("gradient_allreduce")
        limit = {} if bucket_mib is None else {"bucket_cap_mb": bucket_mib}
        ddp = package.DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm, **limit)
        return Training(ddp, optimizer)
    with _bucket_size(bucket_mib):
        return _with_bagua(name, model, optimizer, warmup)


@contextlib.contextmanager
def _bucket_size(mib: int | None) -> Iterator[None]:
    """with_bagua has no argument for it."""
    before = os.environ.get(_BUCKET_SIZE)
    try:
        if mib is not None:
            os.environ[_BUCKET_SIZE] = str(mib << 20)
        yield
    finally:
        os.environ.pop(_BUCKET_SIZE, None)
        if before is not None:
            os.environ[_BUCKET_SIZE] = before


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


def _plain_ddp(model: nn.Module, device: torch.device, _warmup: int, bucket_mib: int | None) -> DistributedDataParallel:
    # torch's defaults but for the gradients, which are views of the buckets: else it copies each one twice.
    devices = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)


def _fp16_ddp(model: nn.Module, device: torch.device, warmup: int, bucket_mib: int | None) -> DistributedDataParallel:
    hooks: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    ddp = _plain_ddp(model, device, warmup, bucket_mib)
    ddp.register_comm_hook(None, hooks.fp16_compress_hook)
    return ddp


def _powersgd_ddp(
    model: nn.Module, device: torch.device, warmup: int, bucket_mib: int | None
) -> DistributedDataParallel:
    hooks: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    # Its second all-reduce of a bucket starts when the first is over. With gloo, several buckets may come to that in
    # another order on each rank, and then it is torn down by its own check: there it gets one bucket.
    ddp = _plain_ddp(model, device, warmup, _ONE_BUCKET_MIB if device.type == "cpu" else bucket_mib)
    # It asks for two steps at least without compression, and has a thousand by default.
    state = hooks.PowerSGDState(None, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=max(2, warmup - 1))
    ddp.register_comm_hook(state, hooks.powerSGD_hook)
    return ddp


def _bytegrad_ddp(
    model: nn.Module, device: torch.device, warmup: int, bucket_mib: int | None
) -> DistributedDataParallel:
    hooks: Any = importlib.import_module("bagua.comm_hooks")
    ddp = _plain_ddp(model, device, warmup, bucket_mib)
    ddp.register_comm_hook(None, hooks.bytegrad)
    return ddp


_ONE_BUCKET_MIB = 1 << 20
_DDPS: dict[str, Callable[[nn.Module, torch.device, int, int | None], DistributedDataParallel]] = {
    "torch-ddp": _plain_ddp,
    "ddp-fp16": _fp16_ddp,
    "ddp-powersgd": _powersgd_ddp,
    "ddp-bytegrad": _bytegrad_ddp,
}

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
    "bagua-ddp": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {}),
    "bytegrad-flat": ("bytegrad", {"hierarchical": False}),
    "bytegrad-int4": ("bytegrad", {"hierarchical": False, "codec": "int4"}),
    "qadam": ("qadam", {}),
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


def prepare(names: Sequence[str]) -> dict[str, str]:
    """Once per process, when torch's default group exists, which Bagua then shares. Returns the algorithms that this
    installation lacks, with the reason.

    Raises:
        RuntimeError: an algorithm needs Bagua's training core, which this installation lacks.
    """
    needing = [name for name in names if name not in _TORCH_ALONE]
    if not needing:
        return {}
    try:
        bagua: Any = importlib.import_module("bagua.torch_api")
        algorithms: Any = importlib.import_module("bagua.torch_api.algorithms")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"algorithm {needing[0]} needs bagua.torch_api, which cannot be imported ({error}); install the package"
            f" that has it, or compare with --algorithms {','.join(_TORCH_ALONE)}"
        ) from error
    bagua.init_process_group()
    lacking = {}
    for name in needing:
        if name in _ALGORITHMS:
            algorithm = _ALGORITHMS[name][0]
            if algorithm not in algorithms.GlobalAlgorithmRegistry:
                lacking[name] = f"the installed bagua has no algorithm {algorithm!r}"
        else:
            module = "bagua.fsdp" if name in _FSDPS else "bagua.comm_hooks"
            try:
                importlib.import_module(module)
            except ImportError as error:
                lacking[name] = f"{module} cannot be imported ({error})"
    return lacking
