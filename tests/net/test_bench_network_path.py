"""One path for every backend: --interface, --address, the user's own NCCL_SOCKET_IFNAME."""

from __future__ import annotations

import pytest

from bagua.net import native
from bagua.net.bench.driver import NetworkPath, choose_path, interface_addresses
from bagua.net.bench.errors import UsageError

HOST = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fd00::5"], "down0": []}


def choose(
    address: str | None = None,
    interface: str | None = None,
    environment: dict[str, str] | None = None,
    default: str = "127.0.0.1",
) -> NetworkPath:
    return choose_path(
        address=address, interface=interface, default_address=default, environment=environment or {}, addresses=HOST
    )


def test_a_local_run_uses_the_loopback_interface() -> None:
    assert choose() == NetworkPath("127.0.0.1", "lo")


def test_across_hosts_the_interface_is_the_one_of_the_path() -> None:
    assert choose(default="10.0.0.5") == NetworkPath("10.0.0.5", "eth0")


def test_joined_interfaces_stay_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = native.NicGroups([["eth0", "eth1"], ["eth2"]], [])
    monkeypatch.setattr(native, "nic_groups", lambda _: groups)
    joins = {"BAGUA_NET_JOIN_NICS": "eth0+eth1"}
    assert choose(default="10.0.0.5", environment=joins) == NetworkPath("10.0.0.5", "eth0,eth1")
    assert choose(environment=joins) == NetworkPath("127.0.0.1", "lo")
    assert choose(interface="eth0", environment=joins) == NetworkPath("10.0.0.5", "eth0")


def test_the_users_interfaces_are_kept() -> None:
    assert choose(environment={"NCCL_SOCKET_IFNAME": "eth,ib"}) == NetworkPath("127.0.0.1", "")
    assert choose(interface="eth0", environment={"NCCL_SOCKET_IFNAME": "ib"}) == NetworkPath("10.0.0.5", "eth0")


def test_options() -> None:
    assert choose(interface="eth0") == NetworkPath("10.0.0.5", "eth0")
    assert choose(address="fd00::5") == NetworkPath("fd00::5", "eth0")
    assert choose(address="127.0.0.7") == NetworkPath("127.0.0.7", "lo")
    assert choose(address="fd00::5", interface="eth0") == NetworkPath("fd00::5", "eth0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interface": "eth9"}, r"--interface 'eth9' does not exist on this host; it has lo \(127.0.0.1 ::1\), eth0"),
        ({"interface": "down0"}, "--interface 'down0' has no address"),
        ({"address": "10.0.0.6"}, "--address '10.0.0.6' is no address of this host.*eth0 .10.0.0.5 fd00::5"),
        ({"address": "10.0.0.5", "interface": "lo"}, "--address '10.0.0.5' is not on --interface 'lo'"),
        ({"address": "eth0"}, "--address 'eth0' is no IP address"),
    ],
)
def test_errors_name_what_the_host_has(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(**arguments)


def test_this_host_has_a_loopback_interface() -> None:
    assert "127.0.0.1" in interface_addresses()["lo"]
