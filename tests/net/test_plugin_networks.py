"""The plugin between namespaces: IPv4, IPv6, several NICs, MTU 1500. Strangers at its listening port:
tests/cpp/connect/hostile_peers_test.cc.

A ring of load drivers, one on each host of a netlab network, drives the installed library as NCCL's proxy does; no
packet leaves the namespaces.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.lab_ring import Ring, ring_driver
from support.labs import NEEDS_LAB, Lab

pytestmark = NEEDS_LAB

# Zero-byte parts, one inline message, odd sizes around a slice, and enough for every data stream to be striped over.
_SIZES = (8, 1 << 10, (64 << 10) + 4, (1 << 20) - 1, 8 << 20)


def _transmitted_bytes(lab: Lab, host: int, interface: str) -> int:
    path = f"/sys/class/net/{interface}/statistics/tx_bytes"
    return int(lab.run(host, ["cat", path], check=True).stdout)


def _run_all_sizes(ring: Ring) -> None:
    ring.connect()
    for size in _SIZES:
        ring.verify(size)
    ring.quit()


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_a_ring_over_one_link_of_each_family(family: str) -> None:
    ip_version = {"AF_INET": 4, "AF_INET6": 6}[family]
    # The other family is not there: data that moves has moved over this one.
    with Lab(mtu=1500, ip_versions=(ip_version,)) as lab, Ring(lab, env={"NCCL_SOCKET_FAMILY": family}) as ring:
        assert ring.listening[0]["net_name"] == "BaguaNet"
        assert all(name.partition("#")[0] == "eth0" for name in ring.listening[0]["devices"])
        _run_all_sizes(ring)
        # With two ranks each sends as much as the buffer holds, over its NIC.
        assert _transmitted_bytes(lab, 0, "eth0") > sum(_SIZES)
        assert _transmitted_bytes(lab, 1, "eth0") > sum(_SIZES)


def test_the_family_is_chosen_where_a_link_has_both() -> None:
    with Lab() as lab:
        for family, table in (("AF_INET6", "tcp6"), ("AF_INET", "tcp")):
            with Ring(lab, env={"NCCL_SOCKET_FAMILY": family}) as ring:
                assert [_listening_ports(lab, 0, name) != [] for name in ("tcp", "tcp6")] == [
                    name == table for name in ("tcp", "tcp6")
                ]
                ring.connect()
                ring.verify(1 << 20)
                ring.quit()


def test_two_nics_are_two_devices_and_each_carries_its_channels() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth", "BAGUA_NET_RAILS": "1"}
    with Lab(nics=2, rate_mbit=(2000, 1000)) as lab, Ring(lab, device="all", env=environment) as ring:
        assert [event["devices"] for event in ring.listening] == [["eth0", "eth1"]] * 2
        ring.connect()
        before = [_transmitted_bytes(lab, 0, name) for name in ("eth0", "eth1")]
        ring.verify(8 << 20)
        sent = [_transmitted_bytes(lab, 0, name) - start for name, start in zip(("eth0", "eth1"), before, strict=True)]
        # Two channels, one on each device: half of the 8 MiB that rank 0 sends, over each NIC. And headers, and what a
        # busy machine makes TCP send again.
        assert all(4 << 20 < count < 7 << 20 for count in sent), sent
        ring.quit()


def test_two_nics_in_one_subnet_each_carry_their_channels() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth", "BAGUA_NET_RAILS": "1", "BAGUA_NET_KEEPALIVE_S": "6"}
    with Lab(nics=2, ip_versions=(4,)) as lab:
        # The kernel would send everything over eth0.
        for host in range(2):
            for nic in range(2):
                lab.run(host, ["ip", "addr", "flush", "dev", f"eth{nic}"], check=True)
                address = f"10.99.0.{1 + host + 2 * nic}/24"
                lab.run(host, ["ip", "addr", "add", address, "dev", f"eth{nic}"], check=True)
        with Ring(lab, device="all", env=environment) as ring:
            ring.connect()
            before = [_transmitted_bytes(lab, 0, name) for name in ("eth0", "eth1")]
            ring.verify(8 << 20)
            sent = [
                _transmitted_bytes(lab, 0, name) - start for name, start in zip(("eth0", "eth1"), before, strict=True)
            ]
            assert all(4 << 20 < count < 7 << 20 for count in sent), sent
            # What the peer sends to eth1's address comes in by eth0 from now on, and sockets of eth1 do not hear it.
            mac = lab.run(0, ["cat", "/sys/class/net/eth0/address"], check=True).stdout.strip()
            for nic in range(2):
                command = ["ip", "neigh", "replace", "10.99.0.3", "lladdr", mac, "dev", f"eth{nic}", "nud", "permanent"]
                lab.run(1, command, check=True)
            ring.verify(8 << 20)
            assert "was lost" in ring.drivers[0].log()
            ring.quit()


def test_addresses_with_labels_are_no_nics_of_their_own() -> None:
    with Lab() as lab:
        for host in range(2):
            command = ["ip", "addr", "add", f"10.99.1.{host + 1}/24", "dev", "eth0", "label", "eth0:1"]
            lab.run(host, command, check=True)
        with Ring(lab, env={"NCCL_SOCKET_IFNAME": "eth", "BAGUA_NET_RAILS": "1"}) as ring:
            assert [event["devices"] for event in ring.listening] == [["eth0"]] * 2


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("AF_INET", kind) for kind in ("prohibit", "unreachable", "blackhole")), ("AF_INET6", "unreachable")],
)
def test_a_route_that_comes_late(family: str, kind: str) -> None:
    ip_version = {"AF_INET": 4, "AF_INET6": 6}[family]
    with Lab() as lab, Ring(lab, env={"NCCL_SOCKET_FAMILY": family}) as ring:
        route = [kind, lab.hosts[1].address(ip_version=ip_version)]
        lab.run(0, ["ip", f"-{ip_version}", "route", "add", *route], check=True)
        opening = threading.Timer(1.0, lambda: lab.run(0, ["ip", f"-{ip_version}", "route", "del", *route], check=True))
        opening.start()
        try:
            ring.connect()
        finally:
            opening.join()
        ring.verify(1 << 20)
        ring.quit()


def test_addresses_that_are_still_tentative() -> None:
    with Lab(ip_versions=(6,)) as lab:
        for host in range(2):
            lab.run(host, ["ip", "-6", "addr", "flush", "dev", "eth0"], check=True)
            lab.run(host, ["sysctl", "-q", "-w", "net.ipv6.conf.eth0.dad_transmits=3"], check=True)
            lab.run(host, ["ip", "addr", "add", f"fd99::{host + 1}/64", "dev", "eth0"], check=True)
        with Ring(lab, env={"NCCL_SOCKET_FAMILY": "AF_INET6"}) as ring:
            ring.connect()
            ring.verify(1 << 20)
            ring.quit()


def test_one_nic_of_two_by_its_exact_name() -> None:
    with Lab(nics=2) as lab, Ring(lab, env={"NCCL_SOCKET_IFNAME": "=eth1"}) as ring:
        assert {name.partition("#")[0] for name in ring.listening[0]["devices"]} == {"eth1"}
        ring.connect()
        ring.verify(1 << 20)
        assert _transmitted_bytes(lab, 0, "eth0") < 100_000
        assert _transmitted_bytes(lab, 0, "eth1") > 1 << 20
        ring.quit()


def test_three_hosts_at_a_switch_with_a_slow_link() -> None:
    with Lab(hosts=3, rate_mbit=1000, uneven_mbit={(2, 0): 200}, mtu=9000) as lab, Ring(lab) as ring:
        _run_all_sizes(ring)


def test_an_interface_setting_that_fits_nothing_is_named(tmp_path: Path) -> None:
    none = "no usable network interface"
    with Lab(ip_versions=(4,)) as lab:
        for setting, named in (
            ({"NCCL_SOCKET_IFNAME": "nosuch"}, ["NCCL_SOCKET_IFNAME=nosuch", f"{none} matches", "eth0"]),
            ({"NCCL_SOCKET_IFNAME": "=eth"}, ["NCCL_SOCKET_IFNAME==eth", f"{none} matches", "eth0"]),
            ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, [none, "NCCL_SOCKET_FAMILY"]),
            ({"NCCL_SOCKET_FAMILY": "IPv6"}, ["NCCL_SOCKET_FAMILY=IPv6", "must be AF_INET"]),
        ):
            driver = ring_driver(lab, 0, ["--nranks", 2], setting, tmp_path / "log")
            try:
                said = driver.expect_failure() + driver.log()
            finally:
                driver.end()
            assert all(part in said for part in named), said


def test_link_local_addresses_where_the_hosts_number_their_interfaces_differently(tmp_path: Path) -> None:
    with Lab(ip_versions=(6,)) as lab, ExitStack() as drivers:
        # A handle names the listener's interface by its number, which means another or nothing on the other host.
        for host, name in ((0, "eth0"), (1, "other")):
            lab.run(host, ["ip", "-6", "addr", "flush", "dev", "eth0", "scope", "global"], check=True)
            if name != "eth0":
                lab.run(host, ["ip", "link", "set", "eth0", "down"], check=True)
                add = ["ip", "link", "add", name, "index", "4242", "link", "eth0", "type", "macvlan", "mode", "private"]
                lab.run(host, add, check=True)
                lab.run(host, ["ip", "link", "set", "eth0", "up"], check=True)
                lab.run(host, ["ip", "link", "set", name, "up"], check=True)
        _wait_for_link_local_addresses(lab)
        started = []
        for host, name in ((0, "eth0"), (1, "other")):
            environment = {"NCCL_SOCKET_FAMILY": "AF_INET6", "NCCL_SOCKET_IFNAME": name}
            arguments = ["--nranks", 2, "--device", 0, "--timeout-ms", 30000]
            driver = ring_driver(lab, host, arguments, environment, tmp_path / name)
            drivers.callback(driver.end)
            started.append(driver)
        listening = [driver.expect("listening") for driver in started]
        for driver, peer in zip(started, reversed(listening), strict=True):
            driver.say("connect " + " ".join(peer["handles"]))
        for driver in started:
            driver.expect("connected")
        for driver in started:
            driver.say(f"verify {1 << 20}")
        for driver in started:
            assert driver.expect("verified", 60)["wrong_elements"] == 0


def _wait_for_link_local_addresses(lab: Lab) -> None:
    """Until none is tentative: the kernel looks for duplicates for a second."""
    deadline = time.monotonic() + 60
    for host in range(2):
        command = ["ip", "-6", "addr", "show", "scope", "link", "up"]
        while not (text := lab.run(host, command, check=True).stdout) or "tentative" in text:
            assert time.monotonic() < deadline, text
            time.sleep(0.1)


def _listening_ports(lab: Lab, host: int, table: str = "tcp") -> list[int]:
    """Ports on which anyone on the host listens, from the kernel: what a port scanner finds."""
    rows = lab.run(host, ["cat", f"/proc/net/{table}"], check=True).stdout.splitlines()[1:]
    fields = [row.split() for row in rows]
    return [int(field[1].rpartition(":")[2], 16) for field in fields if field[3] == "0A"]
