"""Facts about this machine that a figure means nothing without, and whether its memory is enough."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bagua.net.bench.errors import BenchError
from bagua.net.bench.sizes import format_size


@dataclass(frozen=True)
class MachineFacts:
    """Written into every export."""

    host: str
    cpu_model: str
    cpus_usable: int
    cpus_online: int
    kernel: str
    tcp_congestion_control: str
    package_version: str
    python_version: str
    command_line: str
    date: str
    environment: dict[str, str]
    link_speeds_mbps: dict[str, int | None]  # by interface; None: unknown

    def caption(self) -> str:
        """One line for the head of a table."""
        return (
            f"{self.cpu_model}, {self.cpus_usable} CPUs, Linux {self.kernel}, TCP {self.tcp_congestion_control},"
            f" bagua {self.package_version}, {self.date[:10]}"
        )

    def links(self) -> str:
        """What NCCL and the plugin are told of the network: "eth0 25000 Mb/s"."""
        told = {name: "unknown" if speed is None else f"{speed} Mb/s" for name, speed in self.link_speeds_mbps.items()}
        return "link speed: " + (", ".join(f"{name} {speed}" for name, speed in told.items()) or "no link is up")


def _first_line(path: str, default: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return default


def cpu_model(cpuinfo: str) -> str:
    """The model of the first CPU in the text of /proc/cpuinfo, or the architecture where it names none (Arm)."""
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return re.sub(r"\s+", " ", match.group(1)).strip() if match else platform.machine()


_MAX_SPEED_MBPS = (1 << 31) - 1  # old kernels write -1 as a number without a sign


def link_speeds_mbps(interfaces: Path = Path("/sys/class/net")) -> dict[str, int | None]:
    """Of the interfaces that are up, without loopback, which has no speed. Drivers of virtual ones invent theirs."""
    found = {}
    for interface in sorted(interfaces.iterdir()) if interfaces.is_dir() else ():
        if interface.name != "lo" and _first_line(str(interface / "operstate"), "") == "up":
            speed = int(_first_line(str(interface / "speed"), "-1"))
            found[interface.name] = speed if 0 < speed <= _MAX_SPEED_MBPS else None
    return found


def package_version() -> str:
    try:
        return metadata.version("bagua")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def source_commit(version: str) -> str | None:
    """Of this code: from the version's local part (1.2.dev3+g<hash>), else HEAD of the checkout that has this file."""
    if found := re.search(r"\+g([0-9a-f]{7,40})", version):
        return found[1]
    checkout = next((folder for folder in Path(__file__).parents if (folder / "net_plugin").is_dir()), None)
    if checkout is None:
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def describe_machine(command_line: Sequence[str] | None = None) -> MachineFacts:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        cpuinfo = ""
    shown = ("BAGUA_NET_", "NCCL_", "ENABLE_BAGUA_NET")
    return MachineFacts(
        host=socket.gethostname(),
        cpu_model=cpu_model(cpuinfo),
        cpus_usable=len(os.sched_getaffinity(0)),
        cpus_online=os.cpu_count() or 1,
        kernel=platform.release(),
        tcp_congestion_control=_first_line("/proc/sys/net/ipv4/tcp_congestion_control", "unknown"),
        package_version=package_version(),
        python_version=platform.python_version(),
        command_line=shlex.join(sys.argv if command_line is None else command_line),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(shown)},
        link_speeds_mbps=link_speeds_mbps(),
    )


# A buffer and, while data is verified, a second one of the same size.
_BUFFERS = 2


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def check_memory(largest_bytes: int, local_ranks: int, ring_backends: int, meminfo: str | None = None) -> None:
    if meminfo is None:
        try:
            meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        except OSError:
            return
    available = available_bytes(meminfo)
    needed = largest_bytes * local_ranks * (ring_backends + _BUFFERS - 1)
    if available is not None and needed > available:
        raise BenchError(
            f"size {format_size(largest_bytes)} with {local_ranks} ranks and {ring_backends} backends needs"
            f" {format_size(needed)} of memory, and {format_size(available)} are available; lower -e/--maxbytes,"
            " --ranks or the number of --backends"
        )
