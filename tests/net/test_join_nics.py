"""One device over several network interfaces, between namespaces with shaped links: with encryption, IPv6, one subnet,
and hosts with different numbers of them, too.

Load drivers on the hosts of a netlab network check every byte of each all-reduce.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab, cut_nic
from support.nic_traffic import bytes_carried, run_ip, sent_bytes, traffic_until, traffic_until_shared
from support.sweeps import each_value_once, rest_is_deep

pytestmark = NEEDS_LAB

_JOINED = {"BAGUA_NET_JOIN_NICS": "eth0+eth1", "BAGUA_NET_RAILS": "1"}
_AUTO = {"BAGUA_NET_JOIN_NICS": "auto", "BAGUA_NET_RAILS": "1"}
# A loss that only the time limit of a silent host would end takes more than three times the deadline of an answer.
_WITHOUT_LIMIT = {**_JOINED, "BAGUA_NET_KEEPALIVE_S": "600"}
_SIZES = (8, 1 << 10, (64 << 10) + 4, (1 << 20) - 1, 8 << 20)
_BYTES = 16 << 20


@pytest.mark.parametrize(("workers", "ip_version"), each_value_once(["0", "2"], [4, 6]))
def test_two_interfaces_are_one_device_that_uses_both(workers: str, ip_version: int) -> None:
    environment = {**_JOINED, "BAGUA_NET_NWORKERS": workers}
    with Lab(nics=2, rate_mbit=500, ip_versions=(ip_version,)) as lab, Ring(lab, env=environment) as ring:
        assert [event["devices"] for event in ring.listening] == [["eth0+eth1"]] * 2
        ring.connect()
        for size in _SIZES:
            ring.verify(size)
        traffic_until_shared(lab, ring, 0, lambda carried: min(carried) > sum(carried) / 4)
        ring.quit()


def test_two_interfaces_share_by_speed() -> None:
    with Lab(nics=2, rate_mbit=(200, 100)) as lab, Ring(lab, env=_JOINED) as ring:
        ring.connect()
        ring.verify(_BYTES)
        traffic_until_shared(lab, ring, 0, lambda carried: 1.4 * carried[1] < carried[0] < 3 * carried[1])
        ring.quit()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_first_messages_do_not_wait_for_a_slow_interface(workers: str) -> None:
    """The kernel says the same of both. At the speed of the other one, it would get half."""
    environment = {**_JOINED, "BAGUA_NET_NWORKERS": workers}
    with (
        Lab(nics=2, rate_mbit=(400, 40), speed="veth", ip_versions=(4,)) as lab,
        Ring(lab, env=environment, channels=1) as ring,
    ):
        ring.connect()
        carried = bytes_carried(lab, 0, lambda: ring.run(512 << 10, 3))
        assert carried[1] < sum(carried) / 8, carried
        ring.quit()


@pytest.mark.parametrize(
    ("workers", "speeds"),
    each_value_once(["0", "2"], [((400, 400), (0.5, 0.5)), ((400, 100), (1, 0)), ((100, 400), (0, 1))]),
)
def test_small_messages_take_the_fastest_interfaces_in_turn(
    speeds: tuple[tuple[int, int], tuple[float, float]], workers: str
) -> None:
    """Each of four comms sends all of its own over one. On a busy machine, a path may look long, and miss a turn."""
    rates, shares = speeds
    environment = {**_JOINED, "BAGUA_NET_NWORKERS": workers}
    with Lab(nics=2, rate_mbit=rates, ip_versions=(4,)) as lab, Ring(lab, env=environment, channels=4) as ring:
        ring.connect()
        for host in (0, 1):
            carried = bytes_carried(lab, host, lambda: ring.run(64 << 10, 20))
            assert [one / sum(carried) for one in carried] == pytest.approx(shares, abs=0.3)
        ring.quit()


def _move_to_one_subnet(lab: Lab, host: int, ip_version: int) -> None:
    for setting in ("arp_ignore=1", "arp_announce=2"):
        lab.run(host, ["sysctl", "-q", "-w", f"net.ipv4.conf.all.{setting}"], check=True)
    for nic in range(2):
        run_ip(lab, host, "addr", "flush", "dev", f"eth{nic}", "scope", "global")
        number = 1 + host + 2 * nic
        address = f"10.99.0.{number}/24" if ip_version == 4 else f"fd99::{number}/64"
        run_ip(lab, host, "addr", "add", address, "dev", f"eth{nic}", *(["nodad"] if ip_version == 6 else []))


def _bridge_both(lab: Lab, host: int, address: str) -> None:
    run_ip(lab, host, "link", "add", "br0", "type", "bridge")
    for nic in range(2):
        run_ip(lab, host, "addr", "flush", "dev", f"eth{nic}")
        run_ip(lab, host, "link", "set", f"eth{nic}", "master", "br0")
    run_ip(lab, host, "addr", "add", address, "dev", "br0")
    run_ip(lab, host, "link", "set", "br0", "up")
    deadline = time.monotonic() + 20
    while lab.run(host, ["cat", "/sys/class/net/br0/operstate"], check=True).stdout.strip() != "up":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_interfaces_here_and_one_there() -> None:
    """All in one subnet, where the kernel of the host with two would send everything over eth0.

    The links are shaped: without, the CPUs are what limits, and one interface is as fast as both.
    """
    with Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab:
        _bridge_both(lab, 1, "10.99.0.2/24")
        _move_to_one_subnet(lab, 0, 4)
        with Ring(lab, env=[_JOINED, {**_JOINED, "NCCL_SOCKET_IFNAME": "=br0", "BAGUA_NET_JOIN_NICS": "off"}]) as ring:
            assert [event["devices"] for event in ring.listening] == [["eth0+eth1"], ["br0"]]
            ring.connect()
            for host in (0, 1):
                traffic_until_shared(lab, ring, host, lambda carried: min(carried) > sum(carried) / 8)
            ring.quit()


def test_interfaces_that_this_host_does_not_have_are_named() -> None:
    with Lab(nics=2, ip_versions=(4,)) as lab:
        for value, said in (
            ("eth0+eth7", "BAGUA_NET_JOIN_NICS names eth7, and NCCL uses eth0, eth1 on this host: nothing is joined"),
            ("auto", "joined eth0+eth1"),
        ):
            with Ring(lab, env={**_JOINED, "BAGUA_NET_JOIN_NICS": value}) as ring:
                ring.connect()
                ring.verify(1 << 20)
                assert said in ring.drivers[0].log(), ring.drivers[0].log()
                ring.quit()


@pytest.mark.parametrize("value", ["eth0+eth1", "auto"])
def test_an_interface_without_a_link_at_the_start_is_named(value: str) -> None:
    with Lab(nics=2, ip_versions=(4,)) as lab:
        run_ip(lab, 1, "link", "set", "eth1", "down")
        with Ring(lab, env={**_JOINED, "BAGUA_NET_JOIN_NICS": value}) as ring:
            assert ring.listening[1]["devices"] == ["eth0"]
            ring.connect()
            ring.verify(1 << 20)
            log = ring.drivers[1].log()
            assert "eth1 is not joined, also if that changes before the job ends: skipped: not running" in log, log
            ring.quit()


def _carries(lab: Lab, ring: Ring, nic: int) -> bool:
    return bytes_carried(lab, 0, lambda: ring.verify(2 << 20))[nic] > 256 << 10


@pytest.mark.parametrize(("workers", "nic"), each_value_once(["0", "2"], [0, 1]))
def test_a_pair_of_interfaces_that_cannot_connect_at_the_start_is_used_once_it_can(nic: int, workers: str) -> None:
    with Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab:
        # The link is up on both sides, and nothing gets through.
        run_ip(lab, 1, "link", "set", f"eth{nic}", "arp", "off")
        run_ip(lab, 1, "neigh", "flush", "dev", f"eth{nic}")
        with Ring(lab, env={**_JOINED, "BAGUA_NET_NWORKERS": workers}) as ring:
            ring.connect()
            # Until it has been tried again in vain, which costs nothing but that.
            asked = sent_bytes(lab, 0)[nic]
            carried = bytes_carried(lab, 0, lambda: traffic_until(ring, lambda: sent_bytes(lab, 0)[nic] > asked))
            assert carried[nic] < 1 << 16 < carried[1 - nic], carried
            for host, driver in enumerate(ring.drivers):
                said = f"{lab.hosts[1 - host].address(nic)} cannot be reached over eth{nic}"
                assert driver.log().count(said) == 1, driver.log()
                assert "was lost (" not in driver.log(), driver.log()
            run_ip(lab, 1, "link", "set", f"eth{nic}", "arp", "on")
            traffic_until(ring, lambda: _carries(lab, ring, nic))
            ring.quit()


@contextmanager
def _without(lab: Lab, host: int, way: str) -> Iterator[None]:
    """Cuts eth1 off as `cut_nic` does, or takes its route away, and undoes that."""
    if way != "no route":
        with cut_nic(lab, host, 1, way):
            yield
        return
    words = ("10.77.1.0/24", "dev", "eth1", "src", lab.hosts[host].address(1))
    run_ip(lab, host, "route", "del", *words)
    yield
    run_ip(lab, host, "route", "add", *words)


@pytest.mark.parametrize(
    ("way", "host", "ip_version", "encryption", "workers"),
    [("link down", 1, 6, "1", "0"), ("address removed", 0, 4, "0", "2"), ("no route", 1, 4, "1", "2")],
)
def test_an_interface_that_is_lost_is_done_without_and_used_again(
    way: str, host: int, ip_version: int, encryption: str, workers: str, tmp_path: Path
) -> None:
    """Without its address or route its link stays up, as with a switch in between: the other host is told nothing."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    settings = {"BAGUA_NET_ENCRYPTION": encryption, "BAGUA_NET_SECRET_FILE": str(secret), "BAGUA_NET_NWORKERS": workers}
    with (
        Lab(nics=2, rate_mbit=400, ip_versions=(ip_version,)) as lab,
        Ring(lab, env={**_WITHOUT_LIMIT, **settings}, timeout_ms=60_000) as ring,
    ):
        peer = lab.hosts[1 - host].address(1, ip_version)
        said = f"there is no route to {peer} over eth1" if way == "no route" else "the network interface eth1 is gone"
        ring.connect()
        for size in (*_SIZES, _BYTES):
            ring.verify(size)
        ring.start_verify(_BYTES)
        with _without(lab, host, way):
            ring.finish_verify(_BYTES)
            # The kernel sends on without the route, so the transfer may have ended before the event. Of the hosts, both
            # of which lose their carrier, the first to notice says it.
            traffic_until(ring, lambda: any(said in driver.log() for driver in ring.drivers))
            traffic_until(ring, lambda: not _carries(lab, ring, 1))
        # How often it is tried is tested in tests/cpp, with a clock that is passed in.
        traffic_until(ring, lambda: _carries(lab, ring, 1))
        # As before, also of messages that are short compared with what was under way then.
        traffic_until_shared(lab, ring, 0, lambda carried: min(carried) > sum(carried) / 6, size=2 << 20)
        ring.quit()


def _lowest_free_descriptor(pid: int) -> int:
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(used) + 1) if number not in used)


def test_the_only_connection_stays_where_it_is_while_the_peer_cannot_accept_another() -> None:
    """The peer's kernel opens connections, and its process has no descriptor for them."""
    environment = {**_JOINED, "BAGUA_NET_NSTREAMS": "1", "BAGUA_NET_NWORKERS": "0"}
    with Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab, Ring(lab, env=environment, channels=1) as ring:
        ring.connect()
        carried = bytes_carried(lab, 0, lambda: ring.verify(2 << 20))
        nic = carried.index(max(carried))
        run_ip(lab, 1, "link", "set", f"eth{nic}", "down")
        traffic_until(ring, lambda: not _carries(lab, ring, nic))
        pid = ring.pid(1)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_lowest_free_descriptor(pid), before[1]))
        run_ip(lab, 1, "link", "set", f"eth{nic}", "up")
        traffic_until(ring, lambda: "no further connection to" in ring.drivers[0].log())
        assert not _carries(lab, ring, nic)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        traffic_until(ring, lambda: _carries(lab, ring, nic))
        assert "was lost (" not in ring.drivers[0].log().partition("no further connection to")[2]
        ring.quit()


@pytest.mark.parametrize("delay_ms", rest_is_deep([((2.5, 150),), ((150, 2.5),)], 0))
def test_slow_networks_and_peers_that_do_not_read_lose_no_path(delay_ms: tuple[float, float]) -> None:
    """The situations that are nearest to a silent path: a long one, and a process that stands still for seconds."""
    with Lab(nics=2, rate_mbit=400, delay_ms=delay_ms, ip_versions=(4,)) as lab, Ring(lab, env=_JOINED) as ring:
        ring.connect()
        ring.verify(_BYTES)
        ring.start_verify(_BYTES)
        process = ring.drivers[1].process
        process.send_signal(signal.SIGSTOP)
        # Real time: longer than any silent path may be, and no event tells that nothing happened. A slow machine only
        # makes it longer, which is as healthy.
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        ring.finish_verify(_BYTES)
        ring.verify(_BYTES)
        for driver in ring.drivers:
            assert "was lost (" not in driver.log(), driver.log()
        ring.quit()


def test_a_silent_path_and_the_loss_of_different_interfaces_at_both_ends() -> None:
    environment = {**_WITHOUT_LIMIT, "BAGUA_NET_JOIN_NICS": "auto"}
    with Lab(nics=3, rate_mbit=400, ip_versions=(4,)) as lab, Ring(lab, env=environment) as ring:
        assert ring.listening[0]["devices"] == ["eth0+eth1+eth2"]
        ring.connect()
        ring.verify(_BYTES)
        ring.start_verify(_BYTES)
        # What they send goes to nobody. No event tells either host.
        for host, nic in ((0, 0), (1, 1)):
            peer = lab.hosts[1 - host].address(nic)
            nobody = ["lladdr", "02:00:00:00:00:99", "dev", f"eth{nic}", "nud", "permanent"]
            run_ip(lab, host, "neigh", "replace", peer, *nobody)
        ring.finish_verify(_BYTES)
        traffic_until(ring, lambda: not _carries(lab, ring, 0) and not _carries(lab, ring, 1))
        ring.quit()


@pytest.mark.parametrize(("few", "ip_version"), rest_is_deep([(1, 4), (2, 4), (4, 6)], 0, 2))
def test_a_host_with_four_interfaces_and_one_with_as_many_or_fewer(few: int, ip_version: int) -> None:
    """Those that only one host uses carry nothing: there is no route from the other host's interfaces to them.

    The connect handle has room for three IPv6 addresses.
    """
    names = ",".join(f"eth{nic}" for nic in range(few))
    with (
        Lab(nics=4, rate_mbit=400, ip_versions=(ip_version,)) as lab,
        Ring(lab, env=[{**_AUTO, "NCCL_SOCKET_IFNAME": "=" + names}, _AUTO]) as ring,
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
    environments = [{**_AUTO, "NCCL_SOCKET_FAMILY": family} for family in ("AF_INET", "AF_INET6")]
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
            _move_to_one_subnet(lab, host, ip_version)
        with Ring(lab, env=_AUTO) as ring:
            ring.connect()
            for size in _SIZES:
                ring.verify(size)
            for host in (0, 1):
                traffic_until_shared(lab, ring, host, lambda carried: min(carried) > sum(carried) / 5)
            ring.quit()
