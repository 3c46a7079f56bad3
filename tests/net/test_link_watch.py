"""What the plugin says of network interfaces that go down, lose their address or are removed, and of their return.

The situations next to these, in which an interface stays usable, must not be reported.
"""

from __future__ import annotations

import signal
import time

from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab
from support.nic_traffic import traffic_until
from support.processes import wait_until

pytestmark = NEEDS_LAB

_REPORTED = "network interface "
_APART = {"BAGUA_NET_JOIN_NICS": "off", "BAGUA_NET_RAILS": "1"}


def _ip(lab: Lab, host: int, *lines: str) -> None:
    """Each line a command of `ip`, in one process, before any other may run: they follow each other within
    milliseconds. Real time: what is undone within 100 ms (LinkWatch::kQuietMs) is not reported. Other processes cannot
    come between; only a virtual machine that is itself stopped for as long would have it reported."""
    lab.run(host, ["chrt", "--fifo", "1", "ip", "-batch", "-"], stdin_text="\n".join(lines), check=True)


def _reports(ring: Ring, rank: int = 0) -> list[str]:
    lines = ring.drivers[rank].log().splitlines()
    return [line.partition(_REPORTED)[2] for line in lines if _REPORTED in line]


def _wait_for_report(ring: Ring, text: str, rank: int = 0) -> None:
    wait_until(lambda: any(text in report for report in _reports(ring, rank)), f"a report {text!r}")


def test_interfaces_that_go_and_return_are_reported() -> None:
    with Lab(nics=2, ip_versions=(4,)) as lab, Ring(lab, env=_APART, timeout_ms=60_000) as ring:
        ring.connect()
        for name, command, report, undo in (
            ("eth0", "link set eth0 down", "was set down", "link set eth0 up"),
            ("eth1", "addr del 10.77.1.1/24 dev eth1", "lost its address 10.77.1.1", "addr add 10.77.1.1/24 dev eth1"),
        ):
            began = time.monotonic()
            _ip(lab, 0, command)
            _wait_for_report(ring, f"{name} {report}")
            print(f"{report}: reported {time.monotonic() - began:.2f} s after the command was started")
            _ip(lab, 0, undo)
            _wait_for_report(ring, f"{name} can be used again")
            ring.verify(1 << 20)
        # The other end of eth1's cable.
        _ip(lab, 1, "link set eth1 down")
        _wait_for_report(ring, "eth1 has no carrier")
        _wait_for_report(ring, "eth1 was set down", rank=1)
        _ip(lab, 1, "link delete eth1")
        for rank in range(2):
            _wait_for_report(ring, "eth1 was removed", rank)
        ring.verify(1 << 20)
        ring.quit()


# Commands that leave eth0 usable.
_HARMLESS = {
    "an address is announced again": ["addr change 10.77.0.1/24 dev eth0 valid_lft 600 preferred_lft 600"],
    "a DHCP client replaces its address": ["addr del 10.77.0.1/24 dev eth0", "addr add 10.77.0.1/24 dev eth0"],
    "a second address": ["addr add 10.99.0.1/24 dev eth0", "addr del 10.99.0.1/24 dev eth0"],
    "a short flap": ["link set eth0 down", "link set eth0 up"],
    "containers start and end": [
        "link add veth0 type veth peer name veth1",
        "link set veth0 up",
        "addr add 10.98.0.1/24 dev veth0",
        "link set veth0 down",
        "link delete veth0",
    ],
    "a bridge port": ["link add br0 type bridge", "link set eth0 master br0", "link set eth0 nomaster", "link del br0"],
    "routes": ["route add 10.97.0.0/24 via 10.77.0.2 dev eth0", "route del 10.97.0.0/24"],
    "another MTU": ["link set eth0 mtu 1400", "link set eth0 mtu 1500"],
    "IPv6 addresses that change": ["addr add fd99::1/64 dev eth0 nodad", "addr del fd99::1/64 dev eth0"],
}


def test_interfaces_that_stay_usable_are_not_reported() -> None:
    with Lab(nics=1 + len(_HARMLESS)) as lab, Ring(lab, env=_APART, timeout_ms=60_000) as ring:
        ring.connect()
        expected = []
        for nic, (situation, commands) in enumerate(_HARMLESS.items(), start=1):
            _ip(lab, 0, *commands)
            ring.verify(1 << 16)
            # Its state and that of eth0 are read together.
            _ip(lab, 0, f"link set eth{nic} down")
            expected.append(f"eth{nic} was set down")
            _wait_for_report(ring, expected[-1])
            assert _reports(ring) == expected, situation
        ring.quit()


def test_an_interface_that_is_renamed_stays_in_use() -> None:
    environment = {"BAGUA_NET_JOIN_NICS": "eth0+eth1", "BAGUA_NET_RAILS": "1"}
    with Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab, Ring(lab, env=environment) as ring:

        def carries(name: str) -> bool:
            count = ["cat", f"/sys/class/net/{name}/statistics/tx_bytes"]
            before = int(lab.run(0, count, check=True).stdout)
            ring.verify(4 << 20)
            return int(lab.run(0, count, check=True).stdout) - before > 256 << 10

        ring.connect()
        traffic_until(ring, lambda: carries("eth1"))
        _ip(lab, 0, "link set eth1 down", "link set eth1 name lan9", "link set lan9 up")
        traffic_until(ring, lambda: carries("lan9"))
        _ip(lab, 0, "route add 10.97.0.0/24 via 10.77.0.2 dev eth0", "route del 10.97.0.0/24")
        # Its connections are opened again, under its new name.
        _ip(lab, 0, "link set lan9 down")
        _wait_for_report(ring, "eth1 was set down")
        _ip(lab, 0, "link set lan9 up")
        traffic_until(ring, lambda: carries("lan9"))
        assert not any("was removed" in report for report in _reports(ring))
        ring.quit()


def test_messages_that_were_dropped_do_not_hide_a_change() -> None:
    with Lab(nics=2, ip_versions=(4,)) as lab, Ring(lab, env=_APART, timeout_ms=60_000) as ring:
        ring.connect()
        ring.verify(1 << 16)
        ring.drivers[0].process.send_signal(signal.SIGSTOP)
        _ip(lab, 0, *["addr add 10.99.0.1/24 dev eth0", "addr del 10.99.0.1/24 dev eth0"] * 500)
        _ip(lab, 0, "link set eth1 down")
        # Columns 2, 3 and 9: protocol (0: routes), process, messages dropped.
        rows = [line.split() for line in lab.run(0, ["cat", "/proc/net/netlink"]).stdout.splitlines()[1:]]
        assert any(int(row[8]) > 0 for row in rows if row[1] == "0"), "no socket has overflowed"
        ring.drivers[0].process.send_signal(signal.SIGCONT)
        _wait_for_report(ring, "eth1 was set down")
        assert _reports(ring) == ["eth1 was set down"]
        ring.verify(1 << 16)
        ring.quit()
