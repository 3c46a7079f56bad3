"""What the kernel says of interfaces. The flags: tests/net/test_doctor_network.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.network_interfaces import interface_addresses, mtu_of, source_address

_INET6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000000000000000001 01 40 20 80       lo
20010db8000000000000000000000001 05 40 00 80     gone
"""


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 first, none with link scope, and none of an interface that went in between."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: _INET6)
    addresses = interface_addresses()
    assert addresses["lo"] == ["127.0.0.1", "::1"]
    assert "gone" not in addresses


def test_packet_size() -> None:
    assert mtu_of("lo") == int(Path("/sys/class/net/lo/mtu").read_text(encoding="ascii"))
    assert mtu_of("no-such-nic") == 0


@pytest.mark.parametrize(
    ("target", "source"), [("127.0.0.1", "127.0.0.1"), ("localhost", ""), ("fe80::1%no-such-nic", "")]
)
def test_source_of_packets(target: str, source: str) -> None:
    """A name is not looked up."""
    assert source_address(target) == source
