"""What `bagua-net doctor` says of interfaces, RDMA, and what to use on this network."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from bagua import network_interfaces
from bagua.net import native
from bagua.net.doctor import network_check
from bagua.net.doctor.choice import EXPECTATIONS, PAGE, check_choice
from bagua.net.doctor.finding import Finding, Section, Status

_ETH0 = native.Interface("eth0", "192.0.2.1", 25000, 0, "/sys/devices/x", False, True, "first")
_ETH1 = replace(_ETH0, name="eth1", address="192.0.2.2", used=False, reason="skipped: not eth0")
_LO = native.Interface("lo", "127.0.0.1", 0, -1, "", True, False, "loopback, and eth0 is usable")


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ([_ETH0, replace(_LO, address="")], None),
        ([replace(_LO, used=True)], "only loopback is used (lo): jobs of one host work, jobs of several do not"),
        ([replace(_ETH0, name="docker0", address="172.17.0.1", pci_path="")], "docker0 (172.17.0.1)"),
        ([_ETH0, replace(_ETH0, name="bridge", address="172.17.0.1", pci_path="")], "bridge (172.17.0.1)"),
        ([_ETH0, replace(_LO, used=True)], "loopback (lo) is used beside eth0: other hosts"),
        ([replace(_ETH0, address="172.17.0.1")], None),  # a real network may have that address
    ],
)
def test_interfaces_that_lead_to_no_other_host(
    monkeypatch: pytest.MonkeyPatch, used: list[native.Interface], named: str | None
) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: used)
    section = network_check.check_interfaces({})
    assert only(section).status is (Status.OK if named is None else Status.WARN)
    assert named is None or named in only(section).text
    assert [row[0] for row in section.table[1:]] == [one.name for one in used]


@pytest.mark.parametrize(
    ("rows", "status", "text"),
    [
        (
            [_ETH0, _ETH1],
            Status.WARN,
            "1 of 2 NICs with a link and an address are used; not eth1 (25 Gb/s, skipped: not",
        ),
        ([_ETH0, replace(_ETH1, speed_mbps=1000)], Status.OK, "not eth1 (1 Gb/s, skipped: not eth0)"),
        ([replace(_ETH0, speed_mbps=0), _ETH1], Status.OK, "not eth1 (25 Gb/s"),  # nothing to compare it with
        ([_ETH0, replace(_ETH1, used=True)], None, ""),
        ([_ETH0, replace(_ETH1, address="")], None, ""),  # a port that nobody has set up
        ([_ETH0, replace(_ETH1, pci_path="")], None, ""),  # a bridge
    ],
)
def test_nics_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch, rows: list[native.Interface], status: Status | None, text: str
) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: rows)
    monkeypatch.setattr(network_check, "has_lost_carrier", lambda _: False)
    section = network_check.check_interfaces({})
    assert len(section.findings) == (1 if status is None else 2)
    if status is not None:
        assert section.findings[1].status is status
        assert text in section.findings[1].text
    if status is Status.WARN:
        assert section.findings[1].remedy.startswith("set NCCL_SOCKET_IFNAME=eth0,eth1 if ")


def test_devices_that_nccl_is_told_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [_ETH0, replace(_ETH1, used=True)]
    monkeypatch.setattr(native, "interfaces", lambda _: both)
    monkeypatch.setattr(native, "nic_groups", lambda _: native.NicGroups([["eth0"], ["eth1"]], []))
    monkeypatch.setattr(
        native,
        "nccl_joins",
        lambda _, groups: native.NcclJoins(["eth0", "eth1", "eth0#1", "eth1#1"], [""] * len(groups)),
    )
    section = network_check.check_interfaces({"NCCL_NET_FORCE_MERGE": "eth0,eth1:1;eth0#1,eth2"})
    joined, missing = section.findings[1:]
    assert (joined.status, missing.status) == (Status.OK, Status.WARN)
    assert "makes one device of eth0, eth1" in joined.text
    assert "names eth2" in missing.text


def test_a_nic_without_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: [_ETH0, _ETH1, replace(_ETH1, name="docker0", pci_path="")])
    monkeypatch.setattr(network_check, "has_lost_carrier", lambda name: name != "eth0")
    _, finding = network_check.check_interfaces({}).findings
    assert finding.status is Status.WARN
    assert finding.text == "eth1 (192.0.2.2) is switched on but has no link: it is not RUNNING"


def test_flags_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up without RUNNING; up and RUNNING; switched off."""
    assert not network_interfaces.has_lost_carrier("lo")
    assert not network_interfaces.has_lost_carrier("no-such-nic")
    for flags, lost in ((0x1003, True), (0x1043, False), (0x1002, False)):
        answer = struct.pack("16sH", b"eth1", flags) + bytes(238)
        monkeypatch.setattr(network_interfaces.fcntl, "ioctl", lambda *_, answer=answer: answer)
        assert network_interfaces.has_lost_carrier("eth1") is lost


def test_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("NCCL_SOCKET_IFNAME=eth9 matches nothing of lo, eth0; correct it")

    monkeypatch.setattr(native, "interfaces", refuse)
    finding = only(network_check.check_interfaces({}))
    assert finding == Finding(Status.FAIL, "NCCL_SOCKET_IFNAME=eth9 matches nothing of lo, eth0", "correct it")


def make_port(sysfs: Path, device: str, state: str, link: str = "InfiniBand") -> None:
    folder = sysfs / "class/infiniband" / device / "ports/1"
    folder.mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", link), ("rate", "400 Gb/sec (4X NDR)")):
        (folder / name).write_text(text + "\n")


def test_rdma_that_is_there_and_not_used(tmp_path: Path) -> None:
    """Which ports NCCL would use is tested in C++."""
    devices = tmp_path / "dev"
    devices.mkdir()

    def finding(**environment: str) -> Finding:
        return only(network_check.check_rdma(environment, str(tmp_path), devices))

    assert finding() == Finding(Status.OK, "no RDMA port that NCCL would use")
    make_port(tmp_path, "mlx5_1", "1: DOWN", "Ethernet")
    assert finding() == Finding(Status.OK, "no RDMA port that NCCL would use (mlx5_1 is DOWN)")
    make_port(tmp_path, "mlx5_0", "4: ACTIVE")
    assert finding() == Finding(
        Status.WARN,
        f"mlx5_0 (InfiniBand, 400 Gb/sec) is up, and this environment cannot use it: {devices} is missing",
        f"start the container with --device={devices} to use RDMA, or set NCCL_IB_DISABLE=1 if TCP is wanted",
    )
    (devices / "uverbs0").touch()
    assert finding() == Finding(
        Status.WARN,
        "mlx5_0 (InfiniBand, 400 Gb/sec) is up, and NCCL uses TCP through Bagua-Net: is that wanted? RDMA is usually"
        " faster",
        "set ENABLE_BAGUA_NET=0 to use RDMA, or NCCL_IB_DISABLE=1 to keep TCP without this question",
    )
    for name, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket"), ("NCCL_IB_HCA", "^mlx5_0")):
        said = "no RDMA port that NCCL would use (mlx5_0 is ACTIVE, mlx5_1 is DOWN)"
        assert finding(**{name: value}) == Finding(Status.OK, said)
    facts = network_check.check_rdma({}, str(tmp_path), devices).facts["ports"]
    assert [(port["name"], port["would_be_used"]) for port in facts] == [("mlx5_0", True), ("mlx5_1", False)]


def test_joined_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_ETH0, replace(_ETH1, used=True, speed_mbps=2500), replace(_ETH0, name="eth2")]
    lost = "BAGUA_NET_JOIN_NICS names eth7, and NCCL uses eth0, eth1, eth2 on this host: joined without"
    monkeypatch.setattr(native, "interfaces", lambda _: rows)
    monkeypatch.setattr(native, "nic_groups", lambda _: native.NicGroups([["eth0", "eth1"], ["eth2"]], [lost]))
    monkeypatch.setattr(network_check, "has_lost_carrier", lambda _: False)
    section = network_check.check_interfaces({})
    _, joined, left_out = section.findings
    assert joined.status is Status.OK
    assert joined.text == "one device: eth0 (192.0.2.1, 25 Gb/s) + eth1 (192.0.2.2, 2.5 Gb/s), 27.5 Gb/s in all"
    assert (left_out.status, left_out.text) == (Status.WARN, lost)
    assert section.facts["joined"] == [["eth0", "eth1"]]


@pytest.mark.parametrize(("value", "said"), [("auto", True), ("off", False), ("", False)])
def test_nothing_to_join(value: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: [_ETH0])
    monkeypatch.setattr(native, "nic_groups", lambda _: native.NicGroups([["eth0"]], []))
    monkeypatch.setattr(network_check, "has_lost_carrier", lambda _: False)
    section = network_check.check_interfaces({"BAGUA_NET_JOIN_NICS": value})
    texts = [one.text for one in section.findings if one.status is Status.OK]
    assert ("BAGUA_NET_JOIN_NICS=auto: nothing to join, only eth0" in texts) == said


def test_a_host_without_any_interface_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> native.NicGroups:
        raise ValueError("BAGUA_NET_JOIN_NICS names eth8, eth9\nName interfaces that NCCL_SOCKET_IFNAME selects")

    monkeypatch.setattr(native, "interfaces", lambda _: [_ETH0])
    monkeypatch.setattr(native, "nic_groups", refuse)
    section = network_check.check_interfaces({})
    assert section.status is Status.FAIL
    assert section.findings[1].remedy == "Name interfaces that NCCL_SOCKET_IFNAME selects"


_RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
_USED_LO = replace(_LO, used=True)


def said(*interfaces: native.Interface, has_rdma: bool = False) -> str:
    section = check_choice(interfaces, has_rdma=has_rdma)
    assert (_RESULTS.parents[1] / PAGE).is_file()
    assert PAGE in section.findings[-1].text
    return section.findings[0].text


@pytest.mark.parametrize(
    ("mbps", "rate"),
    [(1000, 10), (10_000, 10), (16_000, 10), (20_000, 25), (25_000, 25), (40_000, 40), (50_000, 40), (200_000, 100)],
)
def test_the_row_of_the_fastest_interface(mbps: int, rate: float) -> None:
    interfaces = [replace(_ETH0, name="slow", speed_mbps=100), replace(_ETH0, speed_mbps=mbps), _USED_LO]
    section = check_choice(interfaces, has_rdma=False)
    assert section.facts["expected"]["rate_gbps"] == rate
    assert said(*interfaces).startswith(f"eth0 has {mbps / 1000:g} Gb/s. At {rate} Gb/s, ")


def test_no_figure_where_none_was_measured() -> None:
    for text, expected in (
        (said(_ETH0, has_rdma=True), "RDMA: leave the plugin off"),
        (said(_USED_LO), "no network between hosts"),
        (said(), "no network between hosts"),
        (said(replace(_ETH0, speed_mbps=0)), "the speed of eth0 is unknown"),
        (said(replace(_ETH0, speed_mbps=400_000)), "eth0 has 400 Gb/s: NCCL tuned by hand may be faster"),
    ):
        assert text.startswith(expected)
        assert " times as fast" not in text


def test_the_figures_are_those_of_the_result_files() -> None:
    steps, sharded = (_figures(name) for name in ("steps-by-network-2h200", "fsdp-2h200"))
    for one in EXPECTATIONS:
        link = {"model": "gpt2", "rate_gbps": one.rate_gbps}
        assert one.over_default == _median(steps, **link, backend="plugin", baseline="nccl", delay_ms=0.0)
        assert one.over_tuned == _median(steps, **link, backend="plugin", baseline="nccl_tuned", delay_ms=0.0)
        assert one.int4 == _median(steps, **link, backend="plugin_bytegrad_int4", baseline="plugin", delay_ms=0.0)
        assert one.fsdp2 == _median(sharded, **link, backend="plugin_fsdp_int4_differences", sequences=4)


def _figures(name: str) -> list[dict[str, object]]:
    figures = json.loads((_RESULTS / f"{name}.json").read_text())["figures"]
    return [{**figure["case"], "median": figure["median"]} for figure in figures if figure["metric"] == "speedup"]


def _median(figures: list[dict[str, object]], **case: object) -> object:
    found = [figure["median"] for figure in figures if case.items() <= figure.items()]
    assert len(found) <= 1
    return found[0] if found else None
