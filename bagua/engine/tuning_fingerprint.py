"""What the fastest plan of communication depends on: model, ranks, hardware, network. Asked once, on rank 0."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.engine.setup import Setup
from bagua.env import read_text
from bagua.tuning.memory import Fingerprint
from bagua.tuning.setting import Setting


def fingerprint_of(
    setup: Setup,
    parameters: Sequence[tuple[str, Tensor]],
    algorithms: Sequence[str],
    default: Setting,
    device: torch.device,
) -> Fingerprint:
    """
    Args:
        parameters: (name, parameter) that are synchronized.
        algorithms: labels of those that may be used.
    """
    group = setup.group
    try:
        nodes = len(group.topology.nodes)
    except (RuntimeError, ValueError):  # the launcher's variables contradict each other
        nodes = 0
    tensors = [(name, tuple(one.shape), str(one.dtype)) for name, one in parameters]
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()[:12]
    backend = "none" if group.torch_group is None else str(dist.get_backend(group.torch_group))
    return Fingerprint(
        model=f"{type(setup.module).__name__} {digest}",
        world=f"{group.size} ranks on {nodes} node{'s' * (nodes != 1)}",
        hardware=_hardware(device),
        network=f"{backend}, {'one node' if nodes == 1 else _network()}",
        space=f"{', '.join(sorted(algorithms))}; default: {default}",
    )


def _hardware(device: torch.device) -> str:
    cpus = f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}"
    return f"{torch.cuda.get_device_name(device)}, {cpus}" if device.type == "cuda" else f"cpu, {cpus}"


def _network() -> str:
    """The interface that gloo or NCCL is told to use, or else that of the default route, and its speed."""
    named = read_text(os.environ, "GLOO_SOCKET_IFNAME") or read_text(os.environ, "NCCL_SOCKET_IFNAME")
    interface = named.split(",")[0].lstrip("=^") if named else _default_interface()
    try:
        speed = Path("/sys/class/net", interface, "speed").read_text().strip()
    except (OSError, ValueError):
        speed = "unknown"
    return f"{interface[:32]} at {speed} Mb/s"


def _default_interface() -> str:
    try:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return "unknown"
    fields = [line.split() for line in lines]
    return next((one[0] for one in fields if len(one) > 1 and one[1] == "00000000"), "unknown")
