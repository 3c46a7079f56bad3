"""A lab: hosts (network namespaces) with NICs, joined by limited links, as a context manager.

Two hosts with equal NICs are joined wire to wire. More hosts, NICs of different rates, or those that lose packets meet
at a switch (a bridge in a namespace of its own, one for each NIC number), whose ports are limited as the NIC at their
other end is. A wire is a veth pair, or with a delay a pair of TAP devices and a program between them.
NIC n of host h is `eth<n>` with the addresses 10.77.<n>.<h+1>/24 and fd77:0:0:<n>::<h+1>/64.
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .delayed_wires import DelayedWires, DelayUsage, check_delay
from .errors import NetlabError, translated
from .flow_usage import FlowUsage
from .link_plan import SPEEDS, TOLD, VETH, LinkPlan, SlowFlows, check_rate
from .namespace import NetworkNamespace
from .netlink import Netlink
from .offload import disable_segmentation_offload
from .requirements import missing_requirement
from .tap import MAX_MTU as MAX_DELAYED_MTU
from .termination import TerminationGuard, signals_deferred

MAX_HOSTS = 64
MAX_NICS = 16
MASTER_PORT = 29500  # a port of the lab's own: nothing else can have taken it

_ENTER = Path(__file__).with_name("enter.py")
PREFIX_LENGTH = {4: 24, 6: 64}
TCP_BUFFER_BYTES = range(1 << 16, 1 << 30)
# Of the queue of a TAP device to the program that carries its packets, some 200 ms at 25 Gb/s: it may be late, and no
# wire loses a packet by that. It is set after the limits, whose own queues take their length from this one when made.
_CARRIER_QUEUE_PACKETS = 10_000
_sequence = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host of a lab. Made by Lab."""

    index: int
    nics: int
    namespace: NetworkNamespace

    @property
    def interfaces(self) -> list[str]:
        return [f"eth{nic}" for nic in range(self.nics)]

    def address(self, nic: int = 0, ip_version: int = 4) -> str:
        return nic_address(self.index, nic, ip_version)


def nic_address(host: int, nic: int, ip_version: int) -> str:
    return f"10.77.{nic}.{host + 1}" if ip_version == 4 else f"fd77:0:0:{nic:x}::{host + 1:x}"


def _per_nic(name: str, value: Any, nics: int) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) else [value] * nics
    if len(values) != nics:
        raise ValueError(f"{name} has {len(values)} values for {nics} NICs; give one value, or one for each NIC")
    return values


class Lab:
    """`with Lab(hosts=2, rate_mbit=10_000, mtu=9000) as lab: lab.run(0, ["ip", "addr"])`.

    rate_mbit:            rate of every link, or one for each NIC number; None: no limit
    per_flow_mbit:        cap of each TCP connection and direction, at the sending host; how exact:
                          docs/how-to/emulate-networks.md
    slow_flows:           a lower cap for some of them
    mtu:                  of every link, or one for each NIC number
    uneven_mbit:          rate of single links, by (host, NIC number); the others keep rate_mbit
    ip_versions:          (4, 6), (4,) or (6,)
    segmentation_offload: False lets the MTU cost what it costs without a NIC's help
    congestion_control:   of every host's TCP; None: the machine's default
    delay_ms:             of every packet from one host to another, in each direction: a round trip takes twice as long;
                          or one for each NIC number
    loss:                 share of the packets that the switch loses in each direction, at random, or one for each NIC
                          number; without segmentation_offload=False, a packet has up to 64 KiB, and all of it is lost
    speed:                what /sys tells on a host of its NICs. "told": the rate, or 100 Gb/s where there is none, and
                          a device, as of a network card; "veth": 10 Gb/s, which is what the kernel says; "unknown":
                          -1. By ioctl, the speed is always 10 Gb/s.
    tcp_buffer_bytes:     the most that TCP keeps for one connection and direction, on every host, unless the program
                          says otherwise; a connection moves at most this much in a round trip. None: the machine's
                          default
    own_cpus:             a host's programs run on CPUs that no other host's use, and receive their packets there: an
                          equal part of those that this process may use
    """

    def __init__(
        self,
        hosts: int = 2,
        nics: int = 1,
        *,
        rate_mbit: float | Sequence[float] | None = None,
        per_flow_mbit: float | None = None,
        slow_flows: SlowFlows | None = None,
        mtu: int | Sequence[int] = 1500,
        uneven_mbit: Mapping[tuple[int, int], float] | None = None,
        ip_versions: Sequence[int] = (4, 6),
        segmentation_offload: bool = True,
        congestion_control: str | None = None,
        delay_ms: float | Sequence[float] = 0.0,
        loss: float | Sequence[float] = 0.0,
        speed: str = TOLD,
        tcp_buffer_bytes: int | None = None,
        own_cpus: bool = False,
    ) -> None:
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts is {hosts}; it must be 2 to {MAX_HOSTS}")
        if not 1 <= nics <= MAX_NICS:
            raise ValueError(f"nics is {nics}; it must be 1 to {MAX_NICS}")
        if not ip_versions or not set(ip_versions) <= {4, 6}:
            raise ValueError(f"ip_versions is {tuple(ip_versions)}; it must be (4, 6), (4,) or (6,)")
        if speed not in SPEEDS:
            raise ValueError(f"speed is {speed!r}; it must be one of {', '.join(SPEEDS)}")
        rates = _per_nic("rate_mbit", rate_mbit, nics)
        mtus = _per_nic("mtu", mtu, nics)
        losses = _per_nic("loss", loss, nics)
        self._delays_ms = _per_nic("delay_ms", delay_ms, nics)
        for one_delay_ms, one_mtu in zip(self._delays_ms, mtus, strict=True):
            if one_delay_ms:
                check_delay(one_delay_ms)
                if one_mtu > MAX_DELAYED_MTU:
                    raise ValueError(f"mtu is {one_mtu}; with a delay it must be at most {MAX_DELAYED_MTU} bytes")
        if tcp_buffer_bytes is not None and tcp_buffer_bytes not in TCP_BUFFER_BYTES:
            raise ValueError(
                f"tcp_buffer_bytes is {tcp_buffer_bytes}; it must be {TCP_BUFFER_BYTES.start} to"
                f" {TCP_BUFFER_BYTES.stop - 1}, or None"
            )
        self._plans: dict[tuple[int, int], LinkPlan] = {
            (host, nic): LinkPlan(rates[nic], per_flow_mbit, mtus[nic], slow_flows, losses[nic])
            for host in range(hosts)
            for nic in range(nics)
        }
        for key, rate in (uneven_mbit or {}).items():
            if key not in self._plans:
                raise ValueError(f"uneven_mbit names host {key[0]} NIC {key[1]}; there are {hosts} hosts, {nics} NICs")
            check_rate("uneven_mbit", rate)
            self._plans[key] = LinkPlan(rate, per_flow_mbit, mtus[key[1]], slow_flows, losses[key[1]])
        self._usable_cpus = sorted(os.sched_getaffinity(0))
        if own_cpus and len(self._usable_cpus) < hosts:
            raise ValueError(f"own_cpus is set for {hosts} hosts; this process may use {len(self._usable_cpus)} CPUs")
        share = len(self._usable_cpus) // hosts if own_cpus else 0
        self._cpus = [self._usable_cpus[host * share : (host + 1) * share] for host in range(hosts)]  # empty: all
        self._host_count, self._nic_count = hosts, nics
        self.ip_versions = tuple(sorted(set(ip_versions)))
        self._segmentation_offload = segmentation_offload
        self._congestion_control = congestion_control
        self._speed = speed
        self._tcp_buffer_bytes = tcp_buffer_bytes
        # By host and NIC: what /sys shows there; see enter.py.
        self._shown: tempfile.TemporaryDirectory[str] | None = None
        self._delayed_wires = DelayedWires()
        self._namespaces: list[NetworkNamespace] = []
        self._guard = TerminationGuard()
        self._number = -1
        self.hosts: tuple[Host, ...] = ()
        self.switches: dict[int, NetworkNamespace] = {}  # by NIC number, where there is one

    def __enter__(self) -> Lab:
        lacking = missing_requirement()
        if lacking is not None:
            raise NetlabError(lacking)
        if self._namespaces:
            raise NetlabError("netlab: this lab is already running; make a second Lab for a second network")
        self._number = next(_sequence)
        self._guard.install()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs in the lab and removes it. Called by the `with` block; a second call does nothing."""
        with signals_deferred(), ExitStack() as removals:
            self.hosts = ()
            removals.callback(self._guard.uninstall)
            if self._shown is not None:
                removals.callback(self._shown.cleanup)
            while self._namespaces:
                # All are tried; the first failure is raised after the last.
                removals.callback(self._namespaces.pop().remove)
            # First of all: a descriptor of a TAP device keeps its namespace alive.
            removals.callback(self._delayed_wires.close)

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Starts `command` on a host. `env` is added to this process's environment; `popen` goes to subprocess.Popen.
        The command dies with the thread that called this, and at the latest when the lab is closed."""
        if not command:
            raise ValueError("command is empty; give the program and its arguments")
        return subprocess.Popen(self.entering(host, command), env={**os.environ, **(env or {})}, **popen)

    def entering(self, host: int, command: Sequence[str]) -> list[str]:
        """What this process has to start for `command` to run on a host, for programs that start it themselves. It
        becomes the command, and dies with the thread that started it."""
        path = self._host(host).namespace.path
        assert self._shown is not None  # it is running
        shown = Path(self._shown.name, str(host))
        cpus = ",".join(map(str, self._cpus[host]))
        entering = [sys.executable, "-I", "-S", str(_ENTER), str(path), str(os.getpid()), str(shown), cpus]
        return [*entering, *map(str, command)]

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout: float = 60.0,
        check: bool = False,
        stdin_text: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `command` on a host to its end and returns what it wrote. After `timeout` seconds it is killed and
        subprocess.TimeoutExpired raised; with `check` a non-zero exit is subprocess.CalledProcessError."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        pipes["stdin"] = subprocess.DEVNULL if stdin_text is None else subprocess.PIPE
        with self.start(host, command, env, **pipes) as process:
            try:
                output, errors = process.communicate(stdin_text, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        result = subprocess.CompletedProcess(list(command), process.returncode, output, errors)
        if check:
            result.check_returncode()
        return result

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """The calling thread is on that host: sockets that it opens meanwhile belong to it, also afterwards."""
        with self._host(host).namespace.inside():
            yield

    def flow_usage(self, host: int, nic: int = 0) -> list[FlowUsage]:
        """What each flow of a capped NIC has sent since the lab was built; empty without `per_flow_mbit`."""
        plan = self._plans[self._host(host).index, nic]
        with self.inside(host), Netlink() as netlink:
            return netlink.flow_usage(f"eth{nic}", plan)

    def sent_bytes(self, host: int, nic: int = 0) -> int:
        """What a NIC has sent since the lab was built, headers included."""
        with self.inside(host), Netlink() as netlink:
            return netlink.sent_bytes(f"eth{nic}")

    def delay_usage(self) -> list[DelayUsage]:
        """How well the delay was kept, of each direction of each wire; empty without `delay_ms`."""
        return self._delayed_wires.usage()

    def rank_environment(self, host: int, local_rank: int = 0, ranks_per_host: int = 1) -> dict[str, str]:
        """What torchrun, or a launcher across real hosts, would set for one rank of this host."""
        interfaces = self._host(host).interfaces
        preferred = self.ip_versions[0]
        environment = {
            "RANK": str(host * ranks_per_host + local_rank),
            "WORLD_SIZE": str(self._host_count * ranks_per_host),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": nic_address(0, 0, preferred),
            "MASTER_PORT": str(MASTER_PORT),
            # The hosts share one kernel and one boot id; without this NCCL would use shared memory between them.
            "NCCL_HOSTID": f"netlab-{os.getpid()}-{self._number}-{host}",
            "NCCL_SOCKET_IFNAME": "=" + ",".join(interfaces),
            # gloo would look up the machine's host name, whose address does not exist here.
            "GLOO_SOCKET_IFNAME": interfaces[0],
        }
        if self.ip_versions == (6,):
            environment["NCCL_SOCKET_FAMILY"] = "AF_INET6"
        return environment

    def _host(self, host: int) -> Host:
        if not self.hosts:
            raise NetlabError("netlab: this lab is not running; use it in a `with` block")
        if not 0 <= host < len(self.hosts):
            raise ValueError(f"host is {host}; this lab has hosts 0 to {len(self.hosts) - 1}")
        return self.hosts[host]

    def _build(self) -> None:
        self._write_shown()
        self.hosts = tuple(Host(host, self._nic_count, self._add_namespace()) for host in range(self._host_count))
        for host in self.hosts:
            with host.namespace.inside(), Netlink() as netlink:
                self._set_protocols(self.ip_versions)
                if self._cpus[host.index] or any(plan.is_limited or plan.loss for plan in self._plans.values()):
                    self._keep_order(self._cpus[host.index] or self._usable_cpus)
                netlink.change("lo", state="up")
        for nic in range(self._nic_count):
            plan = self._plans[0, nic]
            if self._host_count > 2 or plan != self._plans[1, nic] or plan.loss:
                self._join_by_switch(nic)
            else:
                self._add_wire(self.hosts[0].namespace, f"eth{nic}", self.hosts[1], nic, self._delays_ms[nic])
            for host in self.hosts:
                self._start_nic(host, nic)
        if any(self._delays_ms):
            self._delayed_wires.start()
            self._delayed_wires.plug_in()
        for host in self.hosts:
            with host.namespace.inside(), Netlink() as netlink:
                for interface in host.interfaces:
                    netlink.wait_until_up(interface)

    def _write_shown(self) -> None:
        self._shown = tempfile.TemporaryDirectory(prefix="netlab-")
        for host in range(self._host_count):
            folder = Path(self._shown.name, str(host))
            folder.mkdir()
            for nic in range(0 if self._speed == VETH else self._nic_count):
                interface = folder / f"eth{nic}"
                (interface / "kernel").mkdir(parents=True)
                (interface / "speed").write_text(f"{self._plans[host, nic].speed_mbit(self._speed)}\n")
                if self._speed == TOLD:
                    (interface / "device").mkdir()
                    # Of a bus that is not PCI: NCCL then attaches the NIC to the first CPU, as one without a device.
                    (interface / "device/subsystem").symlink_to("/sys/bus/platform")

    def _add_namespace(self) -> NetworkNamespace:
        namespace = NetworkNamespace()
        self._namespaces.append(namespace)
        return namespace

    def _add_wire(self, namespace: NetworkNamespace, name: str, host: Host, nic: int, delay_ms: float) -> None:
        """From the interface `name`, made in `namespace`, to a host's NIC."""
        plan, nic_name = self._plans[host.index, nic], f"eth{nic}"
        if not delay_ms:
            with namespace.inside(), Netlink() as netlink:
                netlink.add_veth(name, plan.mtu, nic_name, host.namespace.fileno())
            return
        ends = ((namespace, name), (host.namespace, nic_name))
        self._delayed_wires.add(*ends, delay_ms=delay_ms, rate_mbit=plan.rate_mbit)
        for end_namespace, end_name in ends:
            with end_namespace.inside(), Netlink() as netlink:
                netlink.change(end_name, mtu=plan.mtu)

    def _join_by_switch(self, nic: int) -> None:
        switch = self.switches[nic] = self._add_namespace()
        with switch.inside(), Netlink() as netlink:
            self._set_protocols(())
            self._keep_order(self._usable_cpus)
            netlink.add_bridge("switch", self._plans[0, nic].mtu)
            for host in self.hosts:
                port = f"port{host.index}"
                # Half of the way to the other host.
                self._add_wire(switch, port, host, nic, self._delays_ms[nic] / 2)
                netlink.change(port, master="switch", state="up")
                netlink.limit_port_side(port, self._plans[host.index, nic])
                if self._delays_ms[nic]:
                    netlink.change(port, txqlen=_CARRIER_QUEUE_PACKETS)
                if not self._segmentation_offload:
                    disable_segmentation_offload(port)

    def _start_nic(self, host: Host, nic: int) -> None:
        name = f"eth{nic}"
        with host.namespace.inside(), Netlink() as netlink:
            for ip_version in self.ip_versions:
                netlink.add_address(name, host.address(nic, ip_version), PREFIX_LENGTH[ip_version])
            netlink.limit_host_side(name, self._plans[host.index, nic])
            if self._delays_ms[nic]:
                netlink.change(name, txqlen=_CARRIER_QUEUE_PACKETS)
            if not self._segmentation_offload:
                disable_segmentation_offload(name)
            netlink.change(name, state="up")

    def _keep_order(self, cpus: Sequence[int]) -> None:
        """A received packet is handled by that of `cpus` which its flow determines, as with the queues of a network
        card. For the namespace of the calling thread, before it has interfaces.

        The kernel's way is the CPU that sent it. A limited link's queue is emptied by whichever CPU comes by: packets
        of one flow would overtake each other, which TCP takes for losses. Before Linux 6.3, they do.
        """
        setting = Path("/proc/sys/net/core/rps_default_mask")
        if not setting.exists():
            return
        mask = sum(1 << cpu for cpu in cpus)
        words = [f"{mask >> shift & 0xFFFFFFFF:x}" for shift in range(0, mask.bit_length(), 32)]
        value = ",".join(reversed(words))
        with translated(f"writing {value} to {setting}"):
            try:
                setting.write_text(value)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the kernel gives no packets to CPUs that are isolated from its work
                    raise

    def _set_protocols(self, ip_versions: Sequence[int]) -> None:
        """TCP and IPv6 settings of the namespace in which the calling thread is; before its interfaces exist, so that
        they are born with them."""
        ipv6 = Path("/proc/sys/net/ipv6/conf/all")
        if 6 in ip_versions and not ipv6.exists():
            raise NetlabError("netlab: this kernel has no IPv6 (CONFIG_IPV6, ipv6.disable=1); use ip_versions=(4,)")
        for scope in ("all", "default") if ipv6.exists() else ():
            _write_setting(ipv6.with_name(scope) / "disable_ipv6", "0" if 6 in ip_versions else "1")
            _write_setting(ipv6.with_name(scope) / "accept_dad", "0")
        if ip_versions and self._congestion_control is not None:
            available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            if self._congestion_control not in available:
                raise NetlabError(
                    f"netlab: congestion control {self._congestion_control!r} is not available; this kernel has "
                    f"{', '.join(available)} (others may need modprobe tcp_{self._congestion_control})"
                )
            _write_setting(Path("/proc/sys/net/ipv4/tcp_congestion_control"), self._congestion_control)
        if ip_versions and self._tcp_buffer_bytes is not None:
            for name in ("tcp_rmem", "tcp_wmem"):
                setting = Path("/proc/sys/net/ipv4") / name
                least, default, _ = setting.read_text().split()
                default = str(min(int(default), self._tcp_buffer_bytes))
                _write_setting(setting, f"{least} {default} {self._tcp_buffer_bytes}")


def _write_setting(path: Path, value: str) -> None:
    with translated(f"writing {value} to {path}"):
        path.write_text(value)
