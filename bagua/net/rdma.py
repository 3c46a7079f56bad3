"""RDMA ports of this host (InfiniBand, RoCE, EFA), read from sysfs. NCCL would use them, and TCP would replace them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua.env import read_number

SYSFS_DIRECTORY = Path("/sys/class/infiniband")
_DEVICE_FILES = Path("/dev/infiniband")
_ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class RdmaPort:
    device: str  # "mlx5_0"
    port: str  # "1"
    rate: str  # "400 Gb/sec (4X NDR)", "" if the driver does not say
    state: str = _ACTIVE  # or "DOWN", "INIT", ...


def all_ports(directory: Path = SYSFS_DIRECTORY) -> list[RdmaPort]:
    """Without RDMA devices, or in a container that hides them, the list is empty."""
    ports = []
    for state_file in sorted(directory.glob("*/ports/*/state")):
        port = state_file.parent
        # "4: ACTIVE"
        state = _text(state_file).partition(":")[2].strip() or "unknown"
        ports.append(RdmaPort(port.parent.parent.name, port.name, _text(port / "rate"), state))
    return ports


def active_ports(directory: Path = SYSFS_DIRECTORY) -> list[RdmaPort]:
    """The ports that NCCL would use."""
    return [port for port in all_ports(directory) if port.state == _ACTIVE]


def has_device_files(directory: Path = _DEVICE_FILES) -> bool:
    """Without them a container sees the ports and cannot use them."""
    return any(directory.glob("uverbs*"))


def is_used_by_nccl(environment: Mapping[str, str]) -> bool:
    return read_number(environment, "NCCL_IB_DISABLE", 0) == 0


def replacement_warning(ports: list[RdmaPort]) -> str:
    names = ", ".join(f"{port.device}:{port.port}" + (f" ({port.rate})" if port.rate else "") for port in ports)
    return (
        f"this host has an RDMA network, {names}, which Bagua-Net replaces by TCP, and RDMA is nearly always faster; "
        "set ENABLE_BAGUA_NET=0 to keep it, or NCCL_IB_DISABLE=1 if it is not meant for this job (then this warning "
        "ends)"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
