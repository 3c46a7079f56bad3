"""Checks of the arguments of DistributedDataParallel: pure functions, whose errors name the value and the remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.base import Algorithm

MIB = 1 << 20
DEFAULT_CAP_MB = 25


def group_of(
    process_group: BaguaProcessGroup | dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> BaguaProcessGroup:
    """The ranks that train together.

    Raises:
        RuntimeError: both are given, or a mesh of several dimensions.
    """
    if device_mesh is None:
        return to_bagua_process_group(process_group)
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments.\nPass one of them: a mesh has its own group."
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {device_mesh}.\n"
            "Pass the dimension along which the replicas are: mesh['replicate']."
        )
    return to_bagua_process_group(device_mesh.get_group(0))


def cap_of(megabytes: Any, name: str = "bucket_cap_mb") -> float:
    """A size of a bucket in MiB.

    Raises:
        TypeError: not a number.
        ValueError: not above 0, or infinite.
    """
    if isinstance(megabytes, bool) or not isinstance(megabytes, numbers.Real):
        raise TypeError(f"{name}={megabytes!r}: must be a number of MiB, or None for {DEFAULT_CAP_MB}")
    cap = float(megabytes)
    if not (cap > 0 and math.isfinite(cap * MIB)):
        raise ValueError(
            f"{name}={megabytes}: must be more than 0 MiB, and finite; for buckets without a limit give the size"
            " of the model"
        )
    return cap


def cap_list_of(megabytes: Sequence[float] | None) -> list[int]:
    """Sizes of buckets in bytes.

    Raises:
        TypeError, ValueError: as `cap_of`, of one of them.
    """
    return [max(1, int(cap_of(one, "bucket_cap_mb_list") * MIB)) for one in megabytes or ()]


def delayed_of(
    module: nn.Module, named: Sequence[tuple[str, nn.Parameter]] | None, until: nn.Parameter | None
) -> tuple[list[nn.Parameter], nn.Parameter | None]:
    """The parameters that are communicated late, and the one that they follow.

    Raises:
        ValueError: one of the two is missing, or a parameter is not one of the module.
    """
    if (named is None) != (until is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.\n"
            f"{'param_to_hook_all_reduce' if until is None else 'delay_all_reduce_named_params'} is None."
        )
    known = {id(parameter) for parameter in module.parameters()}
    for name, parameter in [*(named or ()), *([("param_to_hook_all_reduce", until)] if until is not None else [])]:
        if id(parameter) not in known:
            raise ValueError(
                f"{name!r} is not a parameter of {type(module).__name__}.\n"
                "Pass (name, parameter) from module.named_parameters()."
            )
    return [parameter for _, parameter in named or ()], until


def device_of(module: nn.Module) -> torch.device:
    """The device of the module's parameters.

    Raises:
        ValueError: they are on several devices.
    """
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters of {type(module).__name__} are on {sorted(map(str, devices))}; a replica has one device"
        )
    return devices.pop()


def device_ids_of(device_ids: Sequence[int | torch.device] | None, device: torch.device) -> list[int] | None:
    """As torch's wrapper has them: the index of the device, or None where inputs are not moved.

    Raises:
        TypeError: not a list.
        ValueError: several, or another than the module's.
    """
    if isinstance(device_ids, int | str | torch.device):
        raise TypeError(f"device_ids is {device_ids!r}. Pass a list of the one GPU of this process, such as [0].")
    if not device_ids:
        return None
    ids = [as_device(one) for one in device_ids]
    if len(ids) > 1:
        raise ValueError(f"device_ids={list(device_ids)}: a process trains on one device; start one process per GPU")
    if device.type != "cuda" or ids[0] != device:
        raise ValueError(
            f"device_ids={list(device_ids)}, but the module is on {device}; move it there, or leave device_ids out"
        )
    return [one.index for one in ids]


def output_device_of(output_device: int | torch.device | None, device: torch.device) -> torch.device | None:
    """Where outputs are moved, or None where they stay.

    Raises:
        ValueError: a GPU, of a module on the CPU.
    """
    given = None if output_device is None else as_device(output_device)
    if given is not None and device.type == "cpu" != given.type:
        raise ValueError(
            f"output_device={output_device!r}, but the module is on the CPU, where its outputs stay; leave"
            " output_device out"
        )
    return given


def as_device(one: int | torch.device) -> torch.device:
    """A number is that of a GPU."""
    return torch.device("cuda", one) if isinstance(one, int) else torch.device(one)


def refuse_without_gradients(argument: str, algorithm: Algorithm, instead: str) -> None:
    """`argument` is about the averaging of gradients.

    Raises:
        NotImplementedError: the algorithm does something else, or more.
    """
    if not vars(type(algorithm)).get("is_interchangeable", False):
        raise NotImplementedError(
            f"{argument}: {type(algorithm).__name__} does not only average gradients.\n{instead}, or use"
            " GradientAllReduceAlgorithm or ByteGradAlgorithm."
        )


def refuse_without_all_reduce(argument: str, algorithm: Algorithm, instead: str) -> GradientAllReduceAlgorithm:
    """`argument` changes the all-reduce of gradients.

    Raises:
        NotImplementedError: the algorithm is another one.
    """
    if type(algorithm) is not GradientAllReduceAlgorithm:
        raise NotImplementedError(
            f"{argument}: {type(algorithm).__name__} communicates something else than an all-reduce of gradients.\n"
            f"{instead}, or use GradientAllReduceAlgorithm."
        )
    return algorithm
