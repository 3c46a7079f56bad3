"""What statistics say of network interfaces: made-up pages, and a real ring of which one NIC is cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.lab_ring import Ring
from support.labs import Lab, cut_nic, needs_lab
from support.processes import wait_until
from support.stats_page import Comm, Nic, Stream, page_bytes, page_of_this_process

from bagua.cli.stats_table import rendered
from bagua.cli.terminal import Terminal
from bagua.net.exporter.metrics import PeerSums, families_of
from bagua.net.stats import ProcessReport, Snapshot, report, snapshot
from bagua.net.stats.nics import host_line, state_text
from bagua.net.stats.report_json import report_from_json
from bagua.net.trace.trace_file import TraceFile

RECEIVE = 1


def _of_pages(earlier: bytes, later: bytes, seconds: float = 2.0) -> ProcessReport:
    """Of the second page, with rates since the first."""
    found: list[Snapshot] = []
    for content in (earlier, later):
        with page_of_this_process(content):
            found.append(snapshot(os.getpid()))
    first, second = found
    object.__setattr__(second.processes[0], "taken_s", first.processes[0].taken_s + seconds)
    return report(first, second).processes[0]


def _page(streams: Sequence[Stream], received: Sequence[Stream], *nics: Nic) -> bytes:
    return page_bytes([Comm(streams=streams), Comm(direction=RECEIVE, streams=received)], nics=nics, started_ms=1)


def _moved(nic: int, amount: int, elsewhere: int = 0, index: int = 0, state: int = 1) -> Stream:
    return Stream(index, state, counters={"bytes": amount}, nic=nic, bytes_over_other_nics=elsewhere)


ETH0, ETH1 = Nic(speed_mbps=25_000), Nic("eth1")


def test_what_each_nic_carries_is_of_the_streams_over_it() -> None:
    earlier = _page([_moved(1, 1000), _moved(2, 100, index=1)], [_moved(1, 50)], ETH0, ETH1)
    # Stream 1 was replaced over eth0, and eth1 keeps what it had carried.
    later = _page(
        [_moved(1, 5000), _moved(1, 700, elsewhere=300, index=1)],
        [_moved(1, 250), _moved(2, 600, index=1, state=4)],
        ETH0,
        replace(ETH1, closed_sent_bytes=300, streams_lost=1),
    )
    eth0, eth1 = _of_pages(earlier, later).nics
    assert (eth0.name, eth0.sent_bytes, eth0.received_bytes, eth0.speed_mbps) == ("eth0", 5400, 250, 25_000)
    assert (eth1.name, eth1.sent_bytes, eth1.received_bytes, eth1.speed_mbps) == ("eth1", 300, 600, None)
    assert (eth0.sent_bytes_per_s, eth0.received_bytes_per_s) == (2200, 100)
    assert (eth1.sent_bytes_per_s, eth1.received_bytes_per_s) == (100, 300)
    assert eth0.share == pytest.approx(2300 / 2700)
    assert eth0.share + (eth1.share or 0) == pytest.approx(1)
    with page_of_this_process(later):
        shown = rendered(report(None, snapshot(os.getpid())), Terminal(80, False), None, streams=True).splitlines()
    [first] = [number for number, line in enumerate(shown) if " comm " in line and " NIC " in line]
    assert [word for line in shown[first + 1 :] for word in line.split() if word.startswith("eth")] == [
        *["eth0"] * 3,
        "eth1",
    ]
    assert [one.streams_live for one in (eth0, eth1)] == [3, 0]
    assert [one.streams_lost for one in (eth0, eth1)] == [0, 1]


def test_streams_without_a_nic_and_numbers_that_mean_nothing() -> None:
    page = _page([_moved(0, 1000), _moved(16, 7, index=1), _moved(17, 7, index=2)], [], ETH0, Nic("eth1", state=77))
    nics = _of_pages(page, page).nics
    assert [(one.name, one.sent_bytes, one.share) for one in nics] == [("eth0", 0, None)]
    assert [stream.nic for stream in _of_pages(page, page).comms[0].streams] == [None, None, None]


def test_states_are_read_and_their_age() -> None:
    page = _page([], [], *(Nic(f"eth{state}", state, since_ms=5) for state in range(1, 6)))
    nics = _of_pages(page, page).nics
    assert [one.state for one in nics] == ["up", "removed", "down", "no carrier", "no address"]
    assert all(one.state_age_s is not None for one in nics)
    texts = [state_text(replace(one, state_age_s=4)) for one in nics]
    assert texts[3] == "eth4 has no carrier, for 4.00 s"
    assert state_text(replace(nics[0], state_age_s=None)) == "eth1 is up"


def test_a_state_that_nothing_watches_is_not_known() -> None:
    with page_of_this_process(_page([_moved(1, 1), _moved(2, 1, index=1)], [], Nic(state=0), Nic("eth1", state=0))):
        found = report(None, snapshot(os.getpid()))
    nics = found.processes[0].nics
    assert [(one.name, one.state, one.streams_live) for one in nics] == [("eth0", None, 1), ("eth1", None, 1)]
    shown = rendered(found, Terminal(80, False), None, streams=False)
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("  eth")] == ["-", "-"]
    assert "eth0 is" not in shown
    assert (host_line([nics]) or "").count("None") == 0
    up = next(one for one in families_of(found, PeerSums()) if one.name == "bagua_net_nic_up")
    assert up.samples == []
    assert report_from_json(json.dumps(found.as_json()), "node2") == found


def test_a_single_nic_without_troubles_is_not_shown_apart() -> None:
    page = _page([_moved(1, 1)], [], ETH0)
    with page_of_this_process(page):
        quiet = rendered(report(None, snapshot(os.getpid())), Terminal(80, False), None, streams=False)
    assert "NIC" not in quiet
    for nics in ([ETH0, ETH1], [replace(ETH0, state=4, since_ms=1)], [replace(ETH0, downs=1)]):
        with page_of_this_process(_page([_moved(1, 1)], [], *nics)):
            shown = rendered(report(None, snapshot(os.getpid())), Terminal(80, False), None, streams=False)
        assert "NIC" in shown
        assert ("eth0 has no carrier, for" in shown) == (nics[0].state == 4)


def test_the_line_of_a_host_adds_its_processes_up() -> None:
    page = _page([_moved(1, 0), _moved(2, 0, index=1)], [], ETH0, ETH1)
    later = _page([_moved(1, 1800), _moved(2, 200, index=1)], [], ETH0, replace(ETH1, state=4, since_ms=1))
    nics = _of_pages(page, later).nics
    assert host_line([nics, nics]) == "eth0 1.80 kB/s, 90 %; eth1 200 B/s, 10 %, no carrier"
    assert host_line([nics[:1]]) is None


def test_metrics_of_nics() -> None:
    page = _page([_moved(1, 10), _moved(2, 20, index=1)], [_moved(1, 5)], ETH0, replace(ETH1, state=3, downs=2))
    with page_of_this_process(page):
        found = report(None, snapshot(os.getpid()))
    families = {one.name: one for one in families_of(found, PeerSums())}
    values = {
        name: [sample.value for sample in families[f"bagua_net_nic_{name}"].samples]
        for name in ("sent_bytes", "received_bytes", "up", "downs", "streams")
    }
    assert values == {
        "sent_bytes": [10, 20],
        "received_bytes": [5, 0],
        "up": [1, 0],
        "downs": [0, 2],
        "streams": [2, 0],
    }
    assert [one.labels[2] for one in families["bagua_net_nic_up"].samples] == ["eth0", "eth1"]


def test_a_report_of_another_host_has_its_nics() -> None:
    with page_of_this_process(_page([_moved(1, 10)], [], ETH0, ETH1)):
        found = report(None, snapshot(os.getpid()))
    assert report_from_json(json.dumps(found.as_json()), "node2") == found


@needs_lab
def test_a_nic_that_is_cut_off_is_shown_with_its_state_and_its_traffic(tmp_path: Path) -> None:
    trace = str(tmp_path / "%r.%h.%p.json")
    environment = {"NCCL_SOCKET_IFNAME": "eth", "BAGUA_NET_RAILS": "1", "BAGUA_NET_TRACE": trace}
    with Lab(nics=2, ip_versions=(4,)) as lab, Ring(lab, device="all", env=environment, timeout_ms=60_000) as ring:
        ring.connect()

        def process() -> ProcessReport:
            return report(None, snapshot(ring.pid(0))).processes[0]

        ring.verify(8 << 20)
        nics = process().nics
        assert [(one.name, one.state, one.downs, one.streams_lost) for one in nics] == [
            ("eth0", "up", 0, 0),
            ("eth1", "up", 0, 0),
        ]
        # Two channels, one on each device: half of the 8 MiB each.
        for nic in nics:
            assert 4 << 20 < nic.sent_bytes < 5 << 20
            assert 4 << 20 < nic.received_bytes < 5 << 20
            assert nic.streams_live > 0
        with cut_nic(lab, 0, 1, "address removed"):
            wait_until(lambda: process().nics[1].state == "no address", "the state of eth1")
            assert process().nics[0].state == "up"
        wait_until(lambda: process().nics[1].state == "up", "its return")
        assert [one.downs for one in process().nics] == [0, 1]
        ring.quit()
        with Ring(lab, env={"NCCL_SOCKET_IFNAME": "eth", "BAGUA_NET_RECOVERY": "0"}) as unwatched:
            unwatched.connect()
            nics = report(None, snapshot(unwatched.pid(0))).processes[0].nics
            assert [one.state for one in nics] == [None, None]
            unwatched.quit()
    [path] = tmp_path.glob("0.*.json")
    events = TraceFile.read(path).events
    names = [event["name"] for event in events]
    assert names.index("eth1 lost its address 10.77.1.1") < names.index("eth1 is up")
    connected = [event["args"]["detail"] for event in events if event["name"] == "connected"]
    assert {detail.rpartition(" over ")[2] for detail in connected} == {"eth0", "eth1"}


@needs_lab
def test_the_nics_of_a_joined_device_are_shown_apart(tmp_path: Path) -> None:
    trace = str(tmp_path / "%r.%h.%p.json")
    environment = {"BAGUA_NET_JOIN_NICS": "auto", "BAGUA_NET_RAILS": "1", "BAGUA_NET_TRACE": trace}
    size = 8 << 20
    with (
        Lab(nics=2, rate_mbit=(400, 200), ip_versions=(4,)) as lab,
        Ring(lab, env=environment, timeout_ms=60_000) as ring,
    ):
        ring.connect()
        pid = ring.pid(0)

        def between(work: Callable[[], None]) -> tuple[ProcessReport, list[int]]:
            """What is reported of that time, and what each interface carried in both directions according to the
            kernel: the peer finds out its rates by itself."""
            counters = [f"/sys/class/net/eth{nic}/statistics/{way}_bytes" for nic in range(2) for way in ("tx", "rx")]
            read = [lab.run(0, ["cat", *counters], check=True).stdout.split()]
            earlier = snapshot(pid)
            work()
            later = snapshot(pid)
            read.append(lab.run(0, ["cat", *counters], check=True).stdout.split())
            moved = [int(b) - int(a) for a, b in zip(*read, strict=True)]
            return report(earlier, later).processes[0], [sum(moved[:2]), sum(moved[2:])]

        def some() -> None:
            for _ in range(3):
                ring.verify(size)

        def are_shared_by_rate() -> bool:
            found, carried = between(some)
            assert [(one.name, one.state) for one in found.nics] == [("eth0", "up"), ("eth1", "up")]
            shares = [one.share or 0 for one in found.nics]
            assert sum(shares) == pytest.approx(1)
            assert shares[0] == pytest.approx(carried[0] / sum(carried), abs=0.1)
            assert {comm.interface for comm in found.comms} == {"eth0+eth1"}
            return 0.05 < shares[1] < shares[0]

        # Until the rates are known.
        wait_until(are_shared_by_rate, "bytes over both NICs, more over the faster one")

        ring.start_verify(4 * size)
        with cut_nic(lab, 0, 1, "link down"):
            ring.finish_verify(4 * size)
            found, _ = between(some)
            eth0, eth1 = found.nics
            assert (eth1.state, eth1.downs, eth1.streams_live, eth1.sent_bytes_per_s) == ("down", 1, 0, 0)
            assert eth1.streams_lost > 0
            assert (eth0.state, eth0.share) == ("up", 1)
            assert (host_line([found.nics]) or "").endswith("eth1 0 B/s, 0 %, down")
            values = {
                (sample.labels[2], family.name): sample.value
                for family in families_of(report(None, snapshot(pid)), PeerSums())
                for sample in family.samples
                if family.name in ("bagua_net_nic_up", "bagua_net_nic_streams", "bagua_net_nic_streams_lost")
            }
            assert values["eth1", "bagua_net_nic_up"] == 0
            assert values["eth1", "bagua_net_nic_streams"] == 0
        wait_until(lambda: (between(some)[0].nics[1].share or 0) > 0.05, "its return")
        found, _ = between(some)
        assert found.streams_lost == sum(one.streams_lost for one in found.nics)

        def moves_back() -> list[str]:
            return [line for line in ring.drivers[0].log().splitlines() if "moves back to eth1" in line]

        # The share is also of what comes: the peer's connections may move back first.
        wait_until(moves_back, "a connection of this host that moves back")
        assert "WARN" not in moves_back()[0]
        ring.quit()
    [path] = tmp_path.glob("0.*.json")
    names = [event["name"] for event in TraceFile.read(path).events]
    assert any(name.startswith(("eth1 is down", "eth1 was set down")) for name in names), names
    assert "eth1 is up" in names
