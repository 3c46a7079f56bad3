"""Joined network interfaces with encryption, IPv6, one subnet, and hosts with different numbers of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab, cut_nic
from support.nic_traffic import bytes_carried, run_ip, traffic_until_shared
from support.sweeps import each_value_once, rest_is_deep

pytestmark = NEEDS_LAB

_JOINED = {"BAGUA_NET_JOIN_NICS": "auto", "BAGUA_NET_RAILS": "1"}
_SIZES = (8, (64 << 10) + 4, 4 << 20)
_BYTES = 16 << 20


@pytest.mark.parametrize(("encryption", "ip_version", "workers"), each_value_once(["off", "1"], [4, 6], ["0", "2"]))
def test_an_interface_is_lost_and_returns(encryption: str, ip_version: int, workers: str, tmp_path: Path) -> None:
    environment = {**_JOINED, "BAGUA_NET_NWORKERS": workers}
    if encryption != "off":
        secret = tmp_path / "secret"
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)
        environment |= {"BAGUA_NET_ENCRYPTION": encryption, "BAGUA_NET_SECRET_FILE": str(secret)}
    with (
        Lab(nics=2, rate_mbit=400, ip_versions=(ip_version,)) as lab,
        Ring(lab, env=environment, timeout_ms=60_000) as ring,
    ):
        ring.connect()
        for size in _SIZES:
            ring.verify(size)
        traffic_until_shared(lab, ring, 0, lambda carried: min(carried) > sum(carried) / 5)
        ring.start_verify(_BYTES)
        with cut_nic(lab, 1, 1, "link down"):
            ring.finish_verify(_BYTES)
            carried = bytes_carried(lab, 0, lambda: ring.verify(_BYTES))
            assert carried[1] < carried[0] / 20, carried
        traffic_until_shared(lab, ring, 0, lambda carried: carried[1] > _BYTES // 8)
        ring.quit()


@pytest.mark.parametrize(("few", "ip_version"), rest_is_deep([(1, 4), (2, 4), (4, 6)], 0, 2))
def test_a_host_with_four_interfaces_and_one_with_as_many_or_fewer(few: int, ip_version: int) -> None:
    """Those that only one host uses carry nothing: there is no route from the other host's interfaces to them.

    The connect handle has room for three IPv6 addresses.
    """
    names = ",".join(f"eth{nic}" for nic in range(few))
    with (
        Lab(nics=4, rate_mbit=400, ip_versions=(ip_version,)) as lab,
        Ring(lab, env=[{**_JOINED, "NCCL_SOCKET_IFNAME": "=" + names}, _JOINED]) as ring,
    ):
        assert [event["devices"] for event in ring.listening] == [
            [names.replace(",", "+")],
            ["eth0+eth1+eth2+eth3"],
        ]
        ring.connect()
        for size in _SIZES:
            ring.verify(size)
        for host in (0, 1):
            traffic_until_shared(lab, ring, host, lambda carried: min(carried[:few]) > sum(carried) / (3 * few))
        pairs = ", ".join(f"eth{nic} to {lab.hosts[1].address(nic)}" for nic in range(few))
        said = f"{names.replace(',', '+')} here and 4 interfaces of the peer at 10.77.0.2 are used as {pairs}. "
        log = ring.drivers[0].log()
        assert (said in log) == (few < 4), log
        assert ("of the peer at" in log) == (few < 4), log
        ring.quit()


def test_ipv4_here_and_ipv6_there() -> None:
    """Both hosts have both, so the kernel finds a way, and joined interfaces have no pairs."""
    environments = [{**_JOINED, "NCCL_SOCKET_FAMILY": family} for family in ("AF_INET", "AF_INET6")]
    with Lab(nics=2) as lab, Ring(lab, env=environments) as ring:
        ring.connect()
        for size in _SIZES:
            ring.verify(size)
        for driver in ring.drivers:
            log = driver.log()
            assert "Set NCCL_SOCKET_FAMILY alike on every rank" in log, log
            assert "Invalid argument" not in log, log
        ring.quit()


@pytest.mark.parametrize("ip_version", [4, 6])
def test_all_addresses_are_in_one_subnet(ip_version: int) -> None:
    with Lab(nics=2, rate_mbit=400, ip_versions=(ip_version,)) as lab:
        for host in (0, 1):
            for setting in ("arp_ignore=1", "arp_announce=2"):
                lab.run(host, ["sysctl", "-q", "-w", f"net.ipv4.conf.all.{setting}"], check=True)
            for nic in range(2):
                run_ip(lab, host, "addr", "flush", "dev", f"eth{nic}", "scope", "global")
                number = 1 + host + 2 * nic
                address = f"10.99.0.{number}/24" if ip_version == 4 else f"fd99::{number}/64"
                run_ip(lab, host, "addr", "add", address, "dev", f"eth{nic}", *(["nodad"] if ip_version == 6 else []))
        with Ring(lab, env=_JOINED) as ring:
            ring.connect()
            for size in _SIZES:
                ring.verify(size)
            for host in (0, 1):
                traffic_until_shared(lab, ring, host, lambda carried: min(carried) > sum(carried) / 5)
            ring.quit()
