"""What every rank's load drivers are started with: their traffic, this host's address, and the command line. Each rank
makes its own settings from the same options.

The traffic is NCCL's: slices of up to 1 MiB, four under way on each connection, in slots that are used again;
`tools/bench/ring_schedule.h` has the pattern itself.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bagua.host_port import require_port
from bagua.net import native
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.library import MissingFileError, driver_path, library_path
from bagua.network_interfaces import interface_addresses

SLICE_BYTES = 1 << 20
DEPTH = 4
_SLOTS_PER_CHANNEL = 2 * DEPTH


def ring_memory_bytes(size_bytes: int, ranks: int, channels: int) -> int:
    """What a rank's messages pass through when it all-reduces `size_bytes`: its slots, as far as slices fill them."""
    share = -(-size_bytes // (ranks * channels))
    return channels * _SLOTS_PER_CHANNEL * min(SLICE_BYTES, share)


@dataclass(frozen=True)
class NetworkPath:
    address: str
    # "eth0", or "eth0,eth1" where BAGUA_NET_JOIN_NICS joins them; "" leaves NCCL_SOCKET_IFNAME to the user.
    interface: str


def _known(addresses: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{name} ({' '.join(found) or 'no address'})" for name, found in addresses.items())


def choose_path(
    *,
    address: str | None,
    interface: str | None,
    default_address: str,
    environment: Mapping[str, str],
    addresses: Mapping[str, list[str]] | None = None,
) -> NetworkPath:
    """--interface or --address as given; else the default's. A user's NCCL_SOCKET_IFNAME is never replaced, unless
    an option asks for it. `addresses` are this host's (default: asked from the kernel)."""
    if addresses is None:
        addresses = interface_addresses()
    if interface is not None:
        if interface not in addresses:
            raise UsageError(f"--interface {interface!r} does not exist on this host; it has {_known(addresses)}")
        if address is None and not addresses[interface]:
            raise UsageError(f"--interface {interface!r} has no address on this host; it has {_known(addresses)}")
        if address is not None and address not in addresses[interface]:
            raise UsageError(f"--address {address!r} is not on --interface {interface!r}; it has {_known(addresses)}")
        return NetworkPath(address or addresses[interface][0], interface)
    if address is not None:
        name = _interface_of(address, addresses)
        if name is None:
            raise UsageError(
                f"--address {address!r} is no address of this host, which has {_known(addresses)}; across hosts give"
                " --interface, which is the same on all"
            )
        return NetworkPath(address, name)
    if environment.get("NCCL_SOCKET_IFNAME"):
        return NetworkPath(default_address, "")
    name = _interface_of(default_address, addresses) or ""
    return NetworkPath(default_address, ",".join(_joined_with(name, environment)))


def _joined_with(name: str, environment: Mapping[str, str]) -> list[str]:
    """The interface, and those that BAGUA_NET_JOIN_NICS joins with it."""
    if "BAGUA_NET_JOIN_NICS" not in environment:
        return [name]
    try:
        groups = native.nic_groups(environment).groups
    except (ValueError, RuntimeError):  # the plugin will say why
        groups = []
    return next((group for group in groups if name in group), [name])


def _interface_of(address: str, addresses: Mapping[str, list[str]]) -> str | None:
    for name, found in addresses.items():
        if address in found:
            return name
    # All of 127/8 is on the loopback interface, which lists one address of it.
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise UsageError(f"--address {address!r} is no IP address; it is like {LOOPBACK} or fd00::1") from error
    return "lo" if loopback and "lo" in addresses else None


PLUGIN = "plugin"
RING_BACKENDS = (PLUGIN, "plugin-1", "bare")
RAW = "raw"
BACKENDS = (*RING_BACKENDS, RAW)
# Not one of the names that a user lists: --baseline-library adds it.
BASELINE = "baseline"


@dataclass(frozen=True)
class DriverRequest:
    """One driver to start. It also comes from rank 0 over the network, so it names things and never commands."""

    backend: str
    rank: int
    ranks: int
    role: str = "ring"  # or "server", "client" of a raw pair
    streams: int = 1  # of a raw pair
    connect: str = ""  # the server's host:port, for a client
    memory_bytes: int = 0  # what an end of a raw pair keeps
    write_bytes: int = 0  # of one call of an end of a raw pair; 0: the driver's default
    listen: str = ""  # of a raw server: the address of its host to listen on; "": where that host's settings say

    def __post_init__(self) -> None:
        if self.backend not in (*BACKENDS, BASELINE):
            known = ", ".join((*BACKENDS, BASELINE))
            raise BenchError(f"unknown backend {self.backend!r}; known: {known}")
        if self.role not in ("ring", "server", "client") or (self.role == "ring") != (self.backend != RAW):
            raise BenchError(f"backend {self.backend!r} has no role {self.role!r}")
        if self.role == "client":
            try:
                require_port(self.connect)
            except ValueError as error:
                raise BenchError(str(error)) from None
        if self.listen:
            try:
                ipaddress.ip_address(self.listen.partition("%")[0])
            except ValueError as error:
                raise BenchError(f"a driver cannot listen on {self.listen!r}, which is no address") from error
        if (self.memory_bytes > 0) != (self.backend == RAW):
            raise BenchError(f"backend {self.backend!r} cannot be started with {self.memory_bytes} B of memory")

    @property
    def title(self) -> str:
        if self.backend == RAW:
            return f"raw x{self.streams} {self.role} (rank {self.rank})"
        return f"{self.backend} rank {self.rank}"


@dataclass(frozen=True)
class DriverSettings:
    """What this rank knows: where the library is, on which address, with how many channels."""

    driver: Path
    library: Path
    channels: int
    address: str
    interface: str  # "" leaves the choice to the plugin
    local_ranks: int
    timeout_s: float
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    baseline_library: Path | None = None

    def command(self, request: DriverRequest) -> list[str]:
        if request.backend == RAW:
            is_server = request.role == "server"
            end = ("--address", request.listen or self.address) if is_server else ("--connect", request.connect)
            raw = [str(self.driver), "raw", "--role", request.role, "--streams", str(request.streams), *end]
            blocks = ["--write-bytes", str(request.write_bytes)] if request.write_bytes else []
            return [*raw, "--memory-bytes", str(request.memory_bytes), *blocks]
        ring = [str(self.driver), "ring", "--rank", str(request.rank), "--nranks", str(request.ranks)]
        ring += ["--channels", str(self.channels), "--slice-bytes", str(SLICE_BYTES), "--depth", str(DEPTH)]
        ring += ["--timeout-ms", str(int(self.timeout_s * 1000))]
        if request.backend == "bare":
            return [*ring, "--transport", "bare", "--address", self.address]
        return [*ring, "--transport", "plugin", "--library", str(self._library_of(request))]

    def _library_of(self, request: DriverRequest) -> Path:
        if request.backend != BASELINE:
            return self.library
        if self.baseline_library is None:
            raise BenchError(
                f"{request.title} was asked for, but the command line of that rank has no --baseline-library; give all"
                " ranks the same options"
            )
        return self.baseline_library

    def process_environment(self, request: DriverRequest) -> dict[str, str]:
        """The user's BAGUA_NET_* and NCCL_* reach the plugin; only what defines a backend is set over them."""
        environment = dict(self.environment)
        environment["LOCAL_WORLD_SIZE"] = str(self.local_ranks)
        if self.interface:
            environment["NCCL_SOCKET_IFNAME"] = f"={self.interface}"
            if "," not in self.interface:
                environment.pop("BAGUA_NET_JOIN_NICS", None)  # the others that it names would be missed
        if request.backend == "plugin-1":
            environment["BAGUA_NET_NSTREAMS"] = "1"
        # A bench of the plugin needs no activation, and must not be switched off by the job's.
        environment.pop("ENABLE_BAGUA_NET", None)
        return environment


def driver_settings(
    driver: Path | None,
    library: Path | None,
    path: NetworkPath,
    environment: Mapping[str, str],
    local_ranks: int,
    timeout_s: float,
) -> DriverSettings:
    """Of this rank, for drivers with a channel each.

    Args:
        driver, library: None: the package's; Path(): none is needed.
    """
    try:
        driver = driver or driver_path()
        library = library_path() if library is None else library
    except MissingFileError as error:
        raise BenchError(str(error)) from error
    check_driver(driver)
    if library != Path():
        check_library(library)
    return DriverSettings(
        driver=driver.absolute(),
        library=library.absolute(),  # dlopen searches its own path for a name without a slash
        channels=1,
        address=path.address,
        interface=path.interface,
        local_ranks=local_ranks,
        timeout_s=timeout_s,
        environment=dict(environment),
    )


def check_driver(driver: Path) -> None:
    if not driver.is_file():
        raise BenchError(
            f"the load driver {str(driver)!r} does not exist; it is part of the installed package: run pip install . in"
            " the source tree, or reinstall bagua"
        )
    if not os.access(driver, os.X_OK):
        raise BenchError(f"the load driver {str(driver)!r} may not be executed; run chmod +x on it, or reinstall bagua")


def check_library(library: Path) -> None:
    _check_readable(library, "plugin", "name a built libnccl-net.so with --library, or reinstall bagua")


def check_baseline_library(library: Path) -> None:
    _check_readable(library, BASELINE, "name a libnccl-net.so that is on every host with --baseline-library")


def _check_readable(library: Path, backend: str, remedy: str) -> None:
    if not library.is_file():
        problem = "is no file" if library.exists() else "does not exist"
        raise BenchError(f"the {backend}'s library {str(library)!r} {problem}; {remedy}")
    if not os.access(library, os.R_OK):
        raise BenchError(f"the {backend}'s library {str(library)!r} may not be read; fix its permissions with chmod")
