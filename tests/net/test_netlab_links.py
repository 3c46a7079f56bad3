"""tools/netlab: do its networks hold what they promise: rate, cap, MTU, NICs, losses.

All traffic stays inside network namespaces that the test made.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.lab_traffic import (
    assert_each_holds,
    assert_sum_holds,
    connections,
    holds,
    measure,
    measure_until,
)
from support.labs import NEEDS_LAB, Lab

# isort: split
from netlab import SlowFlows, data_flows, describe_flows

pytestmark = NEEDS_LAB


def test_link_rate_holds_in_both_directions() -> None:
    with Lab(rate_mbit=60) as lab:
        assert_sum_holds(60, lab, 0, 1)
        assert_sum_holds(60, lab, 1, 0, (0, 0, 0), ip_version=6)


@pytest.mark.parametrize("delay_ms", [0, 1])
def test_links_report_their_rates(delay_ms: float) -> None:
    def reported(lab: Lab, host: int) -> list[str]:
        files = [f"/sys/class/net/{name}/speed" for name in lab.hosts[host].interfaces]
        return lab.run(host, ["cat", *files], check=True).stdout.split()

    with Lab(nics=2, rate_mbit=(400, 100_000), uneven_mbit={(1, 1): 2500}, delay_ms=delay_ms) as lab:
        assert reported(lab, 0) == ["400", "100000"]
        assert reported(lab, 1) == ["400", "2500"]
    with Lab(delay_ms=delay_ms) as lab:
        assert reported(lab, 0) == ["100000"], "no rate"


_READS_SYSFS = """
import json, os
from bagua.net.bench.machine import describe_machine
nic = "/sys/class/net/eth0"
device = os.path.realpath(nic + "/device")
name_of = lambda link: os.path.basename(os.path.realpath(link)) if os.path.exists(link) else None
files = [open(f"{nic}/{name}").read().strip() for name in ("speed", "mtu")]
print(json.dumps([*files, name_of(nic + "/subsystem"), name_of(device + "/subsystem"), describe_machine().links()]))
"""


@pytest.mark.parametrize(
    ("speed", "told", "bus", "reported"),
    [
        ("told", "400", "platform", "400 Mb/s"),  # of "pci", NCCL would look for its place in the machine
        ("veth", "10000", None, "10000 Mb/s"),
        ("unknown", "-1", None, "unknown"),
    ],
)
@pytest.mark.parametrize("delay_ms", [0, 1])
def test_what_programs_are_told_of_the_speed(
    speed: str, told: str, bus: str | None, reported: str, delay_ms: float
) -> None:
    with Lab(rate_mbit=400, mtu=9000, delay_ms=delay_ms, speed=speed) as lab:
        for _ in range(2):  # the second command finds what the first one left
            seen = json.loads(lab.run(1, [sys.executable, "-P", "-c", _READS_SYSFS], check=True).stdout)
            assert seen == [told, "9000", "net", bus, f"link speed: eth0 {reported}"]


def test_each_flow_is_capped_and_several_add_up() -> None:
    with Lab(rate_mbit=2000, per_flow_mbit=50) as lab:
        assert_sum_holds(50, lab, 0, 1, ip_version=6)
        assert_each_holds(50, lab, 0, 1, (40000, 40001, 40002, 40008))


def test_one_flow_in_four_is_slow() -> None:
    def good(flows: list[float]) -> bool:
        # Two of eight neighbours are slow; three where the numbers of the classes begin anew between them.
        slow = [flow for flow in flows if flow < 16]
        return len(slow) in (2, 3) and all(holds(flow, 8 if flow < 16 else 40) for flow in flows)

    with Lab(per_flow_mbit=40, slow_flows=SlowFlows(4, 8)) as lab:
        flows = measure_until(good, lab, 0, 1, range(40000, 40016, 2))
    assert good(flows), flows


def test_flows_that_carried_data_are_told_with_their_caps() -> None:
    with Lab(per_flow_mbit=40, slow_flows=SlowFlows(2, 8)) as lab:
        assert describe_flows(lab.flow_usage(0)) == "no data"
        measure(lab, 0, 1, (40000, 40002))
        used = data_flows(lab.flow_usage(0))
        assert [usage.cap_mbit for usage in used] in ([40, 8], [8, 8])  # two neighbours, or the classes begin anew
        assert all(usage.bytes_sent > 100_000 for usage in used)
        received = lab.flow_usage(1)
        assert max(usage.bytes_sent for usage in received) < used[0].bytes_sent / 10, "acknowledgements only"
    with Lab(rate_mbit=100) as lab:
        assert lab.flow_usage(0) == []


def test_an_uneven_link_limits_what_its_host_sends_and_receives() -> None:
    with Lab(hosts=3, rate_mbit=100, uneven_mbit={(2, 0): 20}) as lab:
        assert_sum_holds(100, lab, 0, 1)
        assert_sum_holds(20, lab, 0, 2)
        assert_sum_holds(20, lab, 2, 0)


def test_nics_have_rates_of_their_own_and_carry_their_own_traffic() -> None:
    with Lab(nics=2, rate_mbit=(20, 80)) as lab:
        assert lab.hosts[0].interfaces == ["eth0", "eth1"]
        assert_sum_holds(20, lab, 0, 1, nic=0)
        idle_before = _transmitted_at_rest(lab, "eth0")
        assert_sum_holds(80, lab, 0, 1, nic=1)
        assert _transmitted(lab, "eth0", "bytes") - idle_before < 10_000


def _transmitted_at_rest(lab: Lab, interface: str) -> int:
    """Bytes, once what waited in the link's queue is gone: closed connections leave it there."""
    deadline = time.monotonic() + 10
    before, now = -1, _transmitted(lab, interface, "bytes")
    while now != before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        before, now = now, _transmitted(lab, interface, "bytes")
    return now


def _transmitted(lab: Lab, interface: str, unit: str) -> int:
    return int(lab.run(0, ["cat", f"/sys/class/net/{interface}/statistics/tx_{unit}"], check=True).stdout)


def test_the_mtu_is_what_tcp_finds() -> None:
    mtu = 9000
    with Lab(mtu=mtu) as lab, connections(lab, 0, 1, (0,)) as (senders, _):
        # 40 bytes of headers, and 12 of the timestamp option.
        assert senders[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) == mtu - 52
        assert lab.run(1, ["cat", "/sys/class/net/eth0/mtu"]).stdout == f"{mtu}\n"


def test_without_offload_no_packet_is_larger_than_the_mtu() -> None:
    total = 4 << 20
    packets = {}
    for offload in (True, False):
        with Lab(segmentation_offload=offload) as lab, connections(lab, 0, 1, (0,)) as (senders, receivers):
            before = _transmitted(lab, "eth0", "packets")
            sending = threading.Thread(target=senders[0].sendall, args=(bytes(total),))
            sending.start()
            left = total
            while left:
                left -= len(receivers[0].recv(1 << 20))
            sending.join(60)
            packets[offload] = _transmitted(lab, "eth0", "packets") - before
    assert packets[False] >= total // 1448
    assert packets[True] < packets[False] / 2


def test_a_share_of_the_packets_is_lost() -> None:
    count = 4000
    with Lab(loss=0.1, ip_versions=(4,)) as lab, ExitStack() as sockets:
        with lab.inside(1):
            receiver = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        receiver.bind((lab.hosts[1].address(), 0))
        with lab.inside(0):
            sender = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        received = 0
        for sent in range(count):
            sender.sendto(b"x", receiver.getsockname())
            # So that the buffer always has room: until nothing comes any more.
            while sent % 100 == 99 and select.select([receiver], [], [], 0.01 if sent + 1 < count else 0.5)[0]:
                received += len(receiver.recv(1))
    # Of 400, the standard deviation is 19.
    assert 0.875 * count < received < 0.925 * count


def test_congestion_control_is_chosen_for_the_lab_only() -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    outside = setting.read_text()
    with Lab(congestion_control="reno") as lab:
        assert [lab.run(host, ["cat", str(setting)]).stdout for host in (0, 1)] == ["reno\n", "reno\n"]
        assert setting.read_text() == outside


def test_one_ip_version_only() -> None:
    with Lab(ip_versions=(6,)) as lab:
        assert lab.rank_environment(1)["MASTER_ADDR"] == "fd77:0:0:0::1"
        assert lab.rank_environment(1)["NCCL_SOCKET_FAMILY"] == "AF_INET6"
        with connections(lab, 0, 1, (0,), ip_version=6):
            pass
        with pytest.raises(OSError, match="assign requested address"), connections(lab, 0, 1, (0,), ip_version=4):
            pass
    with Lab(ip_versions=(4,)) as lab:
        assert "NCCL_SOCKET_FAMILY" not in lab.rank_environment(1)
        with lab.inside(0):
            assert Path("/proc/net/if_inet6").read_text() == ""
