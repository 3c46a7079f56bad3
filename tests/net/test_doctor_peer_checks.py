"""What `bagua-net doctor --peer` concludes from what two hosts tell, and from rates between them."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from bagua.net.doctor.finding import Section, Status
from bagua.net.doctor.peer.bandwidth import RECEIVED, SENT, Bandwidth, Rate
from bagua.net.doctor.peer.checks import (
    check_mtu,
    check_names,
    check_ports,
    check_reach,
    check_route,
    check_secrets,
    check_versions,
    is_same_host,
)
from bagua.net.doctor.peer.facts import HostFacts, InterfaceFacts, TcpFacts, tcp_facts
from bagua.net.doctor.peer.reach import reach_of

ETH = InterfaceFacts("eth0", ("10.0.0.1",), 1500, 10_000, used=True)
HERE = HostFacts(
    "a", "1.0", "kernel-a", ("10.0.0.1",), cpus=8, tcp_wmem_max=4 << 20, tcp_rmem_max=6 << 20, interfaces=(ETH,)
)
THERE = replace(
    HERE,
    host="b",
    identity="kernel-b",
    own_addresses=("10.0.0.2",),
    interfaces=(replace(ETH, addresses=("10.0.0.2",)),),
)


def statuses(section: Section) -> list[Status]:
    return [finding.status for finding in section.findings]


def rates(one: float, four: float, sixteen: float, cpus: float = 0.5) -> Bandwidth:
    """In Gb/s, the same each way."""
    return Bandwidth(
        [
            Rate(direction, streams, rate / 8e-9, rate / 8e-9, rate / 8e-9, cpus)
            for direction in (SENT, RECEIVED)
            for streams, rate in ((1, one), (4, four), (16, sixteen))
        ]
    )


@pytest.mark.parametrize(
    ("found", "speed_mbps", "round_trip_s", "limit", "streams"),
    [
        (rates(9.0, 9.3, 9.4), 10_000, 1e-4, "link", 1),
        (rates(0.4, 1.6, 6.0), 10_000, 1e-4, "connection", 16),
        (rates(0.4, 1.6, 1.62), 10_000, 1e-4, "path", 4),
        (rates(0.4, 1.6, 6.0), 0, 0.08, "buffers", 16),
        (rates(20, 22, 21, cpus=13.0), 100_000, 1e-4, "cpu", 4),
        (rates(5, 5, 5), 10_000, None, "path", 1),
    ],
)
def test_what_limits_an_all_reduce(
    found: Bandwidth, speed_mbps: int, round_trip_s: float | None, limit: str, streams: int
) -> None:
    reach = reach_of(found, HERE, THERE, speed_mbps, round_trip_s)
    assert reach is not None
    assert (reach.limit, reach.streams) == (limit, streams)


def test_the_slower_direction_counts_and_without_one_there_is_no_estimate() -> None:
    found = rates(8, 8, 8)
    found.rates = [replace(rate, median=rate.median / 2) if rate.direction == SENT else rate for rate in found.rates]
    reach = reach_of(found, HERE, THERE, 0, None)
    assert reach is not None
    assert reach.busbw_bytes_per_s == pytest.approx(0.5e9)
    plain, encrypted = (check_reach(reach, 1e-3, is_encrypted=one).findings for one in (False, True))
    assert (encrypted[:-1], encrypted[-1].text.partition(";")[0]) == (plain, "all rates are of plain TCP")
    found.rates = [rate for rate in found.rates if rate.direction == SENT]
    assert reach_of(found, HERE, THERE, 0, None) is None


def test_versions_that_differ_are_named() -> None:
    assert statuses(check_versions(HERE, THERE)) == [Status.OK]
    other = replace(THERE, version="0.9", nccl="2.28.9")
    texts = [finding.text for finding in check_versions(HERE, other).findings]
    assert texts == ["bagua is 1.0 here and 0.9 there", "NCCL is not installed here and 2.28.9 there"]


def test_host_names_that_others_cannot_reach() -> None:
    loop = replace(THERE, own_addresses=("127.0.1.1",))
    (_, finding) = check_names("b", ["10.0.0.2"], "10.0.0.2", HERE, loop).findings
    assert finding.remedy.startswith("correct /etc/hosts there")
    ours = replace(HERE, own_addresses=("127.0.1.1",))
    assert (
        check_names("b", ["10.0.0.2"], "10.0.0.2", ours, THERE).findings[1].remedy.startswith("correct /etc/hosts here")
    )
    assert "the host name b is 127.0.1.1 there" in finding.text
    assert statuses(check_names("127.0.0.1", ["127.0.0.1"], "127.0.0.1", HERE, loop)) == [Status.OK]
    unknown = replace(THERE, own_addresses=())
    assert "cannot be resolved there" in check_names("b", ["10.0.0.2"], "10.0.0.2", HERE, unknown).findings[1].text


def test_a_route_over_another_interface_than_a_job_uses() -> None:
    assert statuses(check_route("10.0.0.1", "10.0.0.2", HERE, THERE)) == [Status.OK, Status.OK]
    fast = InterfaceFacts("eth1", ("10.1.0.2",), 9000, used=True)
    other = replace(THERE, interfaces=(replace(THERE.interfaces[0], used=False), fast))
    finding = check_route("10.0.0.1", "10.0.0.2", HERE, other).findings[1]
    assert "the route to the peer takes eth0, and a job would use eth1" in finding.text
    translated = check_route("10.0.0.1", "203.0.113.7", HERE, THERE).findings[1]
    assert "203.0.113.7 there is on no interface" in translated.text
    without = replace(THERE, interfaces_error="no interface can be used; bring one up")
    assert check_route("10.0.0.1", "10.0.0.2", HERE, without).status is Status.FAIL


def test_addresses_of_different_families() -> None:
    four, six = (
        replace(THERE, interfaces=(replace(THERE.interfaces[0], address=address),))
        for address in ("10.0.0.2", "fd00::2")
    )
    assert statuses(check_route("10.0.0.1", "10.0.0.2", four, four)) == [Status.WARN, Status.OK]  # of another host's
    finding = check_route("10.0.0.2", "10.0.0.2", four, six).findings[-1]
    assert "addresses of IPv4 here and of IPv6 there" in finding.text
    assert "NCCL_SOCKET_FAMILY" in finding.remedy
    # A version that does not tell them.
    assert statuses(check_route("10.0.0.1", "10.0.0.2", HERE, six)) == [Status.OK, Status.OK]


@pytest.mark.parametrize(
    ("here", "there", "status", "said"),
    [
        (("none", False), ("none", False), Status.OK, "no secret on either"),
        (("1f36", True), ("1f36", True), Status.OK, "the secret 1f36 on both; both encrypt"),
        (("1f36", False), ("2cd2", False), Status.WARN, "the secret 1f36, does not encrypt here; the secret 2cd2"),
        (("1f36", True), ("1f36", False), Status.WARN, "encrypts here; the secret 1f36, does not encrypt there"),
        (("1f36", False), ("none", False), Status.WARN, "no secret, does not encrypt there"),
        (("1f36", False), ("unreadable", False), Status.FAIL, "BAGUA_NET_SECRET_FILE cannot be used there"),
        (("none", False), ("", False), Status.SKIP, "does not tell"),
    ],
)
def test_secrets(here: tuple[str, bool], there: tuple[str, bool], status: Status, said: str) -> None:
    ends = [replace(facts, secret=one[0], encrypts=one[1]) for facts, one in ((HERE, here), (THERE, there))]
    (finding,) = check_secrets(*ends).findings
    assert finding.status is status
    assert said in finding.text


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("bind to 10.0.0.2:0: Address already in use (errno 98)", "widen net.ipv4.ip_local_port_range"),
        ("connect to 10.0.0.2:5: Cannot assign requested address", "widen net.ipv4.ip_local_port_range"),
        ("driver cannot be started (Too many open files)", "ulimit -n"),
        ("no answer within 8 s while connecting", "open all TCP ports"),
    ],
)
def test_what_a_host_lacks_is_no_firewall(why: str, remedy: str) -> None:
    found = rates(1, 1, 1)
    found.failed[SENT] = why
    finding = check_ports({}, found, "10.0.0.1", "10.0.0.2").findings[0]
    assert finding.status is Status.FAIL
    assert why in finding.text
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("path", "here", "there", "said"),
    [
        (1500, 1500, 1500, ["packets hold 1500 bytes"]),
        (1400, 1500, 1500, ["packets of the path hold 1400 bytes, less than the interfaces do"]),
        (1300, 1300, 1300, ["packets hold 1300 bytes, fewer than Ethernet's 1500"]),
        (1500, 9000, 1500, ["packets hold 1500 bytes", "the interfaces differ: 9000 here, 1500 there"]),
        (9000, 9000, 1500, ["packets hold 1500 bytes", "the interfaces differ: 9000 here, 1500 there"]),
        (9000, 9000, 9000, ["packets hold 9000 bytes"]),
        (None, 1500, 1500, ["the kernel does not tell"]),
    ],
)
def test_mtu(path: int | None, here: int, there: int, said: list[str]) -> None:
    ends = [
        replace(facts, interfaces=(replace(facts.interfaces[0], mtu=mtu),))
        for facts, mtu in ((HERE, here), (THERE, there))
    ]
    section = check_mtu("10.0.0.1", "10.0.0.2", ends[0], ends[1], TcpFacts(1e-4, path, 0), True)
    assert [text in finding.text for finding, text in zip(section.findings, said, strict=True)] == [True] * len(said)


def test_a_peer_that_is_this_host_raises_no_alarm() -> None:
    loop = InterfaceFacts("lo", ("127.0.0.1",), 65536, loopback=True)
    own = replace(HERE, interfaces=(*HERE.interfaces, loop))
    for local, remote in (("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("127.0.0.1", "127.0.1.1")):
        assert is_same_host(local, remote, own, own)
    at = ("127.0.0.1", "127.0.0.1", own, own)
    assert Status.WARN in statuses(check_route(*at))
    assert Status.WARN in statuses(check_mtu(*at, TcpFacts(1e-4, 65535, 0), True))
    assert statuses(check_route(*at, same_host=True)) == [Status.SKIP]
    assert statuses(check_mtu(*at, TcpFacts(1e-4, 65535, 0), True, same_host=True)) == [Status.SKIP]
    (said, _) = check_names("b", ["10.0.0.1"], "10.0.0.1", own, own, same_host=True).findings
    assert said.text.startswith("b is this host: this shows that")
    # Two network namespaces of one kernel have a network between them.
    namespace = replace(THERE, identity=HERE.identity)
    assert not is_same_host("10.0.0.1", "10.0.0.2", HERE, namespace)
    assert not is_same_host("10.0.0.1", "10.0.0.1", replace(HERE, identity=""), replace(HERE, identity=""))


def test_addresses_that_do_not_answer() -> None:
    section = check_ports({"10.1.0.2": "timed out", "10.2.0.2": ""}, rates(1, 1, 1), "10.0.0.1", "10.0.0.2")
    assert statuses(section) == [Status.WARN, Status.OK, Status.OK]
    assert section.findings[0].text.endswith("10.1.0.2: timed out")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_tells_round_trip_and_mtu(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server, socket.socket(family) as client:
        client.connect(server.getsockname())
        facts = tcp_facts(client)
    assert facts.path_mtu is not None
    assert facts.path_mtu >= 65535  # of loopback
    assert facts.min_rtt_s is not None
    assert 0 < facts.min_rtt_s < 1
