"""Typed access to `bagua.net._core`, the compiled core without NCCL's tables. Imported on use: it is the only native
code in this package."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from bagua.net.library import MissingFileError
from bagua.net.secret_file import SECRET_FILE


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    speed_mbps: int  # 0 = unknown
    numa_node: int  # -1 = unknown
    pci_path: str  # "" for virtual devices
    loopback: bool
    used: bool
    reason: str


@dataclass(frozen=True)
class NicGroups:
    """How BAGUA_NET_JOIN_NICS groups the used interfaces."""

    groups: list[list[str]]  # names; each group is one NCCL device, or its rails
    lost: list[str]  # a sentence for each interface that should have been joined and is not


@dataclass(frozen=True)
class NcclJoins:
    devices: list[str]  # names
    refusals: list[str]  # by group of devices that NCCL would join; "": it can


@dataclass(frozen=True)
class RdmaPort:
    name: str  # "mlx5_0", or "mlx5_0:2"
    state: str  # "ACTIVE", "DOWN", "INIT", ...
    link: str  # "InfiniBand", "RDMA over Ethernet"; "": unknown
    rate: str  # "400 Gb/sec"; "": unknown
    would_be_used: bool  # by NCCL's own transport, which Bagua-Net replaces


@dataclass(frozen=True)
class Knob:
    name: str
    type: str
    default_value: str
    range: str
    unit: str
    meaning: str


class CounterRow(NamedTuple):
    """A counter of the statistics page."""

    name: str
    words: int  # of 64 bits
    metric: str  # of `bagua-net exporter`, perhaps with a label: "sent_bytes path=inline"; "": it is none
    help: str


@dataclass(frozen=True)
class PageLayout:
    """The statistics page of a process."""

    places: dict[str, int]  # version, sizes and offsets in bytes
    comm_counters: list[CounterRow]
    stream_counters: list[CounterRow]


@cache
def page_layout() -> PageLayout:
    read = _core().page_layout()
    rows = ([CounterRow(*row) for row in read[name]] for name in ("comm_counters", "stream_counters"))
    return PageLayout(read["places"], *rows)


def interfaces(environment: Mapping[str, str]) -> list[Interface]:
    """Every interface with a verdict, the used ones first. Raises ValueError if none can be used."""
    return [Interface(**row) for row in _core().interfaces(dict(environment))]


def nic_groups(environment: Mapping[str, str]) -> NicGroups:
    """Raises ValueError if the host has no interface of a group, and where `interfaces` does."""
    return NicGroups(**_core().nic_groups(dict(environment)))


def nccl_joins(environment: Mapping[str, str], groups: list[list[str]]) -> NcclJoins:
    """What would become of groups of devices in NCCL_NET_FORCE_MERGE. Raises ValueError where `nic_groups` does."""
    return NcclJoins(**_core().nccl_joins(dict(environment), groups))


def rdma_ports(environment: Mapping[str, str], sysfs_root: str = "/sys") -> tuple[list[RdmaPort], str]:
    """Every RDMA port of this host, and "mlx5_0 (InfiniBand, 400 Gb/sec) is up" for those that NCCL's own transport
    would use; "": there is none, or the user has chosen another network."""
    rows, unused = _core().rdma_ports(dict(environment), sysfs_root)
    return [RdmaPort(**row) for row in rows], str(unused)


def invalid_knobs(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Problem and remedy of every setting with a bad value."""
    return [(str(problem), str(remedy)) for problem, remedy in _core().invalid_knobs(dict(environment))]


def refusals(environment: Mapping[str, str], *, with_secret: bool = True) -> list[str]:
    """Why the plugin would not start with these settings, each with the remedy: bad values, and else, `with_secret`, a
    secret file that it would refuse."""
    found = [f"{problem}\n{remedy}" for problem, remedy in invalid_knobs(environment)]
    file = environment.get(SECRET_FILE, "").strip()
    if with_secret and not found and file:
        try:
            secret_key_id(file)
        except ValueError as error:
            found.append(str(error))
    return found


def unknown_knobs(environment: Mapping[str, str]) -> list[str]:
    """A warning for each BAGUA_NET_* variable that has no effect."""
    return [str(warning) for warning in _core().unknown_knobs(dict(environment))]


def secret_key_id(file: str) -> str:
    """The key id of the secret in a file. Raises ValueError, with three lines, if the plugin would refuse the file."""
    return str(_core().secret_key_id(file))


def tuning_choice(environment: Mapping[str, str]) -> str:
    """`NCCL_ALGO=Tree`, say: what the user has chosen, so that the plugin's tuner chooses nothing; "" otherwise."""
    return str(_core().tuning_choice(dict(environment)))


def knobs() -> list[Knob]:
    return [Knob(**row) for row in _core().knobs()]


def _core() -> Any:
    try:
        return importlib.import_module("bagua.net._core")
    except ImportError as error:
        raise MissingFileError(
            f"bagua.net._core cannot be imported ({error}); install the package with "
            "`pip install .` in the source tree, with the Python that runs the job"
        ) from error
