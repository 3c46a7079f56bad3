"""What Python reads of Bagua-Net's compiled library: version, knobs, interfaces, CPU budget."""

from collections.abc import Mapping
from typing import Literal, TypedDict, type_check_only

@type_check_only
class _Knob(TypedDict):
    name: str  # "BAGUA_NET_NSTREAMS"
    type: Literal["boolean", "integer", "size", "choice", "path", "fault plan"]
    default_value: str  # as one would set it: "auto", "64K"; "not set" where absence means something that no value does
    range: str  # "1 to 64, or auto"
    unit: str  # "connections"; "" for booleans and choices
    meaning: str

@type_check_only
class _RetiredKnob(TypedDict):
    name: str
    replacement: str

@type_check_only
class _Interface(TypedDict):
    name: str
    address: str  # "192.0.2.1", "fe80::1%eth0"; "" if it has none
    speed_mbps: int  # 0: unknown
    numa_node: int  # -1: unknown
    pci_path: str  # "" for virtual interfaces
    loopback: bool
    used: bool
    reason: str

@type_check_only
class _NicGroups(TypedDict):
    groups: list[list[str]]  # names; each group is one NCCL device, or its rails
    lost: list[str]  # a sentence for each interface that should have been joined and is not

@type_check_only
class _NcclJoins(TypedDict):
    devices: list[str]
    refusals: list[str]  # by group; "": it would be joined

@type_check_only
class _RdmaPort(TypedDict):
    name: str  # "mlx5_0", or "mlx5_0:2"
    state: str  # "ACTIVE", "DOWN", ...
    link: str  # "InfiniBand", "RDMA over Ethernet"; "": unknown
    rate: str  # "400 Gb/sec"; "": unknown
    would_be_used: bool

@type_check_only
class _PageLayout(TypedDict):
    places: dict[str, int]  # version, sizes and offsets in bytes
    # In the order of the page: name, 64-bit words, metric of the exporter, help.
    comm_counters: list[tuple[str, int, str, str]]
    stream_counters: list[tuple[str, int, str, str]]

@type_check_only
class _CpuBudget(TypedDict):
    usable_cpus: int
    local_ranks: int

def version() -> str:
    """The version of the compiled library, such as '1.0.0'."""

def knobs() -> list[_Knob]:
    """Every knob, in the order of the documentation."""

def retired_knobs() -> list[_RetiredKnob]:
    """Variables of the original bagua-net that have no effect now, with what replaces each."""

def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ValueError if a knob has a bad value. The message names every bad one, its value and its range."""

def invalid_knobs(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Problem and remedy of each."""

def unknown_knobs(environment: Mapping[str, str]) -> list[str]:
    """A warning for each BAGUA_NET_* variable that is not a knob, with the name that was probably meant."""

def secret_key_id(file: str) -> str:
    """Of the secret in a file, as 16 hexadecimal digits. Raises ValueError if the plugin would refuse the file."""

def tuning_choice(environment: Mapping[str, str]) -> str:
    """The variable, with its value, that takes the choice of channels from the plugin's tuner; "": none."""

def interfaces(environment: Mapping[str, str]) -> list[_Interface]:
    """Every network interface, the used ones first, with the reason for each verdict.

    Raises ValueError, with the interfaces that exist, if none can be used or an NCCL variable has a bad value.
    """

def nic_groups(environment: Mapping[str, str]) -> _NicGroups:
    """How BAGUA_NET_JOIN_NICS groups the used interfaces.

    Raises ValueError if the host has no interface of a group, and where `interfaces` does.
    """

def nccl_joins(environment: Mapping[str, str], groups: list[list[str]]) -> _NcclJoins:
    """What would become of these groups of devices if NCCL asked to join them.

    Raises ValueError where `nic_groups` does.
    """

def rdma_ports(environment: Mapping[str, str], sysfs_root: str) -> tuple[list[_RdmaPort], str]:
    """Every RDMA port, and "mlx5_0 (InfiniBand, 400 Gb/sec) is up" for those that NCCL's own transport would use; "":
    there is none."""

def page_layout() -> _PageLayout:
    """The statistics page of a process."""

def job_position(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size, as the launcher says; -1: none does."""

def cpu_budget() -> _CpuBudget:
    """CPUs that this process may use, and ranks of this host that share them."""

def default_workers() -> int:
    """I/O threads that BAGUA_NET_NWORKERS=auto means for this process."""
