"""tools/netlab: do its networks hold what they promise (rate, cap, MTU, NICs), and does it leave nothing behind.

All traffic stays inside network namespaces that the test made.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.lab_traffic import (
    assert_each_holds,
    assert_sum_holds,
    connections,
    holds,
    mbit_per_flow,
    measure,
    measure_until,
    until,
)
from support.processes import is_alive, wait_until

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tools") not in sys.path:
    sys.path.append(str(_ROOT / "tools"))  # behind everything else: `tools` holds programs, not an installed package

import netlab  # noqa: E402
from netlab import (  # noqa: E402
    FlowUsage,
    Lab,
    LinkPlan,
    NetlabError,
    SlowFlows,
    cli,
    data_flows,
    describe_flows,
    missing_privilege,
    parse_rate_mbit,
    parse_slow_flows,
)
from netlab.netlink import Netlink  # noqa: E402
from netlab.tc_request import send_tc_request  # noqa: E402

# Lacking pyroute2 or a kernel feature is a failure, not a reason to skip: the test set-up promises both.
_LACKING = missing_privilege()
_RUN_DIR = Path("/run/netns")

needs_namespaces = pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))


def _namespaces_of(pid: int) -> list[str]:
    return sorted(path.name for path in _RUN_DIR.glob(f"netlab-{pid}-*"))


# --- rates, caps, MTU ---


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("ip_version", [4, 6])
def test_link_rate_holds_in_both_directions(ip_version: int) -> None:
    with Lab(rate_mbit=200) as lab:
        for source, target in ((0, 1), (1, 0)):
            assert_sum_holds(200, lab, source, target, ip_version=ip_version)
            assert_sum_holds(200, lab, source, target, (0, 0, 0), ip_version)


@needs_namespaces
@pytest.mark.netns
def test_link_without_a_rate_is_not_limited() -> None:
    """What the other tests find limited is limited by the link, and not by the way they measure."""
    with Lab() as lab:
        assert sum(measure_until(lambda flows: sum(flows) > 600, lab, 0, 1)) > 300


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("ip_version", [4, 6])
def test_each_flow_is_capped_and_several_add_up(ip_version: int) -> None:
    with Lab(rate_mbit=2000, per_flow_mbit=50) as lab:
        assert_sum_holds(50, lab, 0, 1, ip_version=ip_version)
        assert_each_holds(50, lab, 0, 1, (40000, 40001, 40002, 40008), ip_version)


@needs_namespaces
@pytest.mark.netns
def test_flows_whose_ports_differ_by_the_number_of_classes_share_one_cap() -> None:
    """The documented limit of the cap: it belongs to one of 509 classes, not to the connection itself."""
    with Lab(rate_mbit=2000, per_flow_mbit=50) as lab:
        assert_sum_holds(50, lab, 0, 1, (40000, 40509))


@needs_namespaces
@pytest.mark.netns
def test_capped_flows_together_stay_within_the_link() -> None:
    with Lab(rate_mbit=120, per_flow_mbit=50) as lab:
        assert_sum_holds(120, lab, 0, 1, range(40000, 40008))


@needs_namespaces
@pytest.mark.netns
def test_caps_hold_on_a_link_without_a_rate() -> None:
    with Lab(per_flow_mbit=50) as lab:
        assert_each_holds(50, lab, 0, 1, (40000, 40001))


@needs_namespaces
@pytest.mark.netns
def test_one_flow_in_four_is_slow() -> None:
    def good(flows: list[float]) -> bool:
        # Two of eight neighbours are slow; three where the numbers of the classes begin anew between them.
        slow = [flow for flow in flows if flow < 16]
        return len(slow) in (2, 3) and all(holds(flow, 8 if flow < 16 else 40) for flow in flows)

    with Lab(per_flow_mbit=40, slow_flows=SlowFlows(4, 8)) as lab:
        flows = measure_until(good, lab, 0, 1, range(40000, 40016, 2))
    assert good(flows), flows


@needs_namespaces
@pytest.mark.netns
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


@needs_namespaces
@pytest.mark.netns
def test_an_uneven_link_limits_what_its_host_sends_and_receives() -> None:
    with Lab(hosts=3, rate_mbit=300, uneven_mbit={(2, 0): 60}) as lab:
        assert_sum_holds(300, lab, 0, 1)
        assert_sum_holds(60, lab, 0, 2)
        assert_sum_holds(60, lab, 2, 0)


@needs_namespaces
@pytest.mark.netns
def test_two_hosts_with_uneven_links_go_at_the_rate_of_the_slower() -> None:
    with Lab(rate_mbit=300, uneven_mbit={(1, 0): 60}) as lab:
        assert_sum_holds(60, lab, 0, 1)


@needs_namespaces
@pytest.mark.netns
def test_two_senders_to_one_receiver_share_its_link() -> None:
    with Lab(hosts=3, rate_mbit=100) as lab:

        def flows_of_both() -> list[float]:
            with connections(lab, 0, 2, (0,)) as first, connections(lab, 1, 2, (0,), ip_version=6) as second:
                return mbit_per_flow(first[0] + second[0], first[1] + second[1])

        flows = until(lambda flows: holds(sum(flows), 100), flows_of_both)
    assert holds(sum(flows), 100), flows


@needs_namespaces
@pytest.mark.netns
def test_nics_have_rates_of_their_own_and_carry_their_own_traffic() -> None:
    with Lab(nics=2, rate_mbit=(60, 240)) as lab:
        assert lab.hosts[0].interfaces == ["eth0", "eth1"]
        assert_sum_holds(60, lab, 0, 1, nic=0)
        idle_before = _transmitted_at_rest(lab, "eth0")
        assert_sum_holds(240, lab, 0, 1, nic=1)
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


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("mtu", [1500, 9000])
def test_the_mtu_is_what_tcp_finds(mtu: int) -> None:
    with Lab(mtu=mtu) as lab, connections(lab, 0, 1, (0,)) as (senders, _):
        # 40 bytes of headers, and 12 of the timestamp option.
        assert senders[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) == mtu - 52
        assert lab.run(1, ["cat", "/sys/class/net/eth0/mtu"]).stdout == f"{mtu}\n"


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("hosts", [2, 3])
def test_without_offload_no_packet_is_larger_than_the_mtu(hosts: int) -> None:
    total = 4 << 20
    packets = {}
    for offload in (True, False):
        with Lab(hosts, segmentation_offload=offload) as lab, connections(lab, 0, 1, (0,)) as (senders, receivers):
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


@needs_namespaces
@pytest.mark.netns
@needs_namespaces
@pytest.mark.parametrize("rate_mbit", [None, 1000])
def test_a_share_of_the_packets_is_lost(rate_mbit: float | None) -> None:
    count = 4000
    with Lab(loss=0.1, rate_mbit=rate_mbit, ip_versions=(4,)) as lab, ExitStack() as sockets:
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


@pytest.mark.netns
def test_congestion_control_is_chosen_for_the_lab_only() -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    outside = setting.read_text()
    with Lab(congestion_control="reno") as lab:
        assert [lab.run(host, ["cat", str(setting)]).stdout for host in (0, 1)] == ["reno\n", "reno\n"]
        assert setting.read_text() == outside


@needs_namespaces
@pytest.mark.netns
def test_an_unknown_congestion_control_names_those_that_there_are() -> None:
    with pytest.raises(NetlabError, match=r"'vegetables' is not available; this kernel has .*reno.*modprobe"):
        Lab(congestion_control="vegetables").__enter__()
    assert _namespaces_of(os.getpid()) == []


@needs_namespaces
@pytest.mark.netns
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


# --- commands on hosts ---


@needs_namespaces
@pytest.mark.netns
def test_a_command_sees_its_host_and_nothing_of_the_machine() -> None:
    with Lab(nics=2) as lab:
        listed = lab.run(1, ["ls", "/sys/class/net"], check=True).stdout.split()
        assert sorted(listed) == ["eth0", "eth1", "lo"]
        assert lab.run(1, ["cat", "/sys/class/net/eth1/operstate"]).stdout == "up\n"
        cgroups = sorted(entry.name for entry in Path("/sys/fs/cgroup").iterdir())
        assert sorted(lab.run(1, ["ls", "-A", "/sys/fs/cgroup"], check=True).stdout.split()) == cgroups
        script = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
        lab.run(1, [sys.executable, "-c", script], check=True)


@needs_namespaces
@pytest.mark.netns
def test_environment_input_output_and_exit_codes() -> None:
    with Lab() as lab:
        result = lab.run(0, ["sh", "-c", "cat; echo $A; echo oops >&2; exit 7"], {"A": "value"}, stdin_text="in,")
        assert (result.returncode, result.stdout, result.stderr) == (7, "in,value\n", "oops\n")
        with pytest.raises(subprocess.CalledProcessError):
            lab.run(0, ["false"], check=True)
        missing = lab.run(0, ["no-such-program"])
        assert (missing.returncode, missing.stderr) == (127, "netlab: command 'no-such-program' not found\n")
        barred = lab.run(0, [str(Path(__file__))])
        assert barred.returncode == 126
        assert "cannot be started: Permission denied" in barred.stderr
        with pytest.raises(ValueError, match="host is 2; this lab has hosts 0 to 1"):
            lab.run(2, ["true"])
        with pytest.raises(ValueError, match="command is empty"):
            lab.run(0, [])


@needs_namespaces
@pytest.mark.netns
def test_a_command_that_takes_too_long_is_killed() -> None:
    with Lab() as lab, pytest.raises(subprocess.TimeoutExpired):
        lab.run(0, ["sleep", "3600"], timeout=0.3)


@needs_namespaces
@pytest.mark.netns
def test_hosts_differ_in_what_nccl_calls_a_host() -> None:
    with Lab(hosts=3, nics=2) as first, Lab() as second:
        ids = [first.rank_environment(host)["NCCL_HOSTID"] for host in range(3)]
        ids += [second.rank_environment(host)["NCCL_HOSTID"] for host in range(2)]
        assert len(set(ids)) == 5
        environment = first.rank_environment(2)
        assert environment["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"
        assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "3", "0")


# --- nothing is left behind ---


@needs_namespaces
@pytest.mark.netns
def test_leaving_the_block_removes_namespaces_and_processes_also_detached_ones() -> None:
    interfaces = sorted(Path("/sys/class/net").iterdir())
    with Lab(hosts=3) as lab:
        assert len(_namespaces_of(os.getpid())) == 4
        detached = int(lab.run(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]).stdout)
        stubborn = lab.start(1, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done"], stdout=-1)
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"ready\n"
        assert is_alive(detached)
    assert not is_alive(detached)
    assert stubborn.wait(60) == -signal.SIGKILL
    stubborn.stdout.close()
    assert _namespaces_of(os.getpid()) == []
    assert sorted(Path("/sys/class/net").iterdir()) == interfaces
    lab.close()
    with pytest.raises(NetlabError, match="not running"):
        lab.run(0, ["true"])


@needs_namespaces
@pytest.mark.netns
def test_an_exception_in_the_block_removes_everything_and_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), Lab():
        raise ZeroDivisionError
    assert _namespaces_of(os.getpid()) == []


@needs_namespaces
@pytest.mark.netns
def test_a_failure_while_building_removes_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NetlabError("no more links")

    monkeypatch.setattr(Netlink, "join_bridge", fail)
    with pytest.raises(NetlabError, match="no more links"):
        Lab(hosts=3).__enter__()
    assert _namespaces_of(os.getpid()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


_HOLDER = """
import sys, time
sys.path.append(sys.argv[1])
from netlab import Lab
with Lab() as lab:
    held = lab.run(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]).stdout
    print(held, flush=True)
    time.sleep(60)
"""


@contextmanager
def _holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds a lab, and a detached process in that lab."""
    command = [sys.executable, "-c", _HOLDER, str(_ROOT / "tools")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_the_lab_in_order(number: signal.Signals) -> None:
    with _holder() as (process, detached):
        assert len(_namespaces_of(process.pid)) == 2
        process.send_signal(number)
        process.wait(60)
        assert _namespaces_of(process.pid) == []
        assert not is_alive(detached)
    assert process.returncode in (128 + number, -number)


@needs_namespaces
@pytest.mark.netns
def test_sweep_removes_what_a_killed_process_left_and_nothing_else() -> None:
    with Lab() as lab, _holder() as (live, _), _holder() as (killed, orphan):
        killed.kill()
        killed.wait(60)
        left = _namespaces_of(killed.pid)
        assert len(left) == 2
        swept = netlab.sweep()
        # Labs of other tests sweep as they begin: each name is removed by one of us.
        wait_until(lambda: _namespaces_of(killed.pid) == [], "the end of the namespaces")
        assert not set(swept) & set(_namespaces_of(live.pid))
        wait_until(lambda: not is_alive(orphan), "the end of the orphan inside")
        assert len(_namespaces_of(live.pid)) == 2
        assert lab.run(0, ["true"]).returncode == 0


@needs_namespaces
@pytest.mark.netns
def test_a_new_lab_sweeps_first() -> None:
    with _holder() as (killed, _):
        killed.kill()
        killed.wait(60)
        with Lab():
            wait_until(lambda: _namespaces_of(killed.pid) == [], "the end of the namespaces")


# --- what the kernel lacks ---


@needs_namespaces
@pytest.mark.netns
def test_a_missing_qdisc_or_link_type_names_the_kernel_option() -> None:
    with Lab() as lab, lab.inside(0), Netlink() as netlink:
        index = netlink.interface_index("eth0")
        with (
            pytest.raises(NetlabError, match=r"limiting failed: .* lack CONFIG_NET_SCH_PIGEON: .*modprobe sch_pigeon"),
            netlab.errors.translated("limiting", "CONFIG_NET_SCH_PIGEON"),
        ):
            send_tc_request(36, index=index, handle=0x10000, parent=0xFFFFFFFF, kind="pigeon", options=b"")
        with (
            pytest.raises(NetlabError, match=r"lack CONFIG_PIGEON: .*modprobe pigeon"),
            netlab.errors.translated("linking", "CONFIG_PIGEON"),
        ):
            netlink._route.link("add", ifname="bird", kind="pigeon")
        with pytest.raises(NetlabError, match="no interface 'eth7'"):
            netlink.set_up("eth7")


def test_lacking_capabilities_are_named_with_the_remedy() -> None:
    without_admin = ~(1 << 21) & ((1 << 40) - 1)
    text = missing_privilege(without_admin)
    assert text is not None
    assert "lacks CAP_SYS_ADMIN: run it as root (sudo)" in text
    assert "--cap-add SYS_ADMIN" in text
    assert "lacks CAP_NET_ADMIN and CAP_SYS_ADMIN" in str(missing_privilege(0))


# --- command line ---

# `-m tools.netlab` is meant for the root of the repository, so the directory has to count.
_CLI_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def _netlab(
    *arguments: str, before: Sequence[str] = (), preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *before, "-m", "tools.netlab", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, env=_CLI_ENVIRONMENT, capture_output=True, text=True, timeout=240, preexec_fn=preexec_fn
    )


def _drop_capabilities() -> None:
    """Between fork and exec: nothing is left in this process or gained by the program it becomes."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(41):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails, harmlessly, for one that was not there


def test_cli_without_capabilities_says_what_is_lacking() -> None:
    for action in (["run", "--", "true"], ["sweep"], ["check"]):
        result = _netlab(*action, preexec_fn=_drop_capabilities)
        assert result.returncode == 125, result
        assert "lacks CAP_NET_ADMIN and CAP_SYS_ADMIN: run it as root" in result.stderr
        assert "Traceback" not in result.stderr


@needs_namespaces
def test_cli_without_pyroute2_says_how_to_get_it() -> None:
    result = _netlab("check", before=["-S"])  # no site-packages
    assert result.returncode == 125
    assert "pip install pyroute2" in result.stderr


@needs_namespaces
@pytest.mark.netns
def test_cli_check_builds_a_network() -> None:
    result = _netlab("check")
    assert result.returncode == 0, result.stderr
    assert "can build networks" in result.stdout


@needs_namespaces
@pytest.mark.netns
def test_cli_run_gives_ranks_marks_output_and_returns_the_worst_code() -> None:
    script = (
        'echo "$RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $NCCL_SOCKET_IFNAME $X"; echo err >&2; exit $((RANK * 3))'
    )
    result = _netlab("run", "--hosts", "3", "--rate", "1G", "--mtu", "9000", "--env", "X=y", "--", "sh", "-c", script)
    assert result.returncode == 6, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[h{rank}] {rank}/3 10.77.0.1:29500 =eth0 y" for rank in range(3)]
    assert {f"[h{rank}] err" for rank in range(3)} < set(result.stderr.splitlines())
    assert "netlab: host 2 exited with code 6" in result.stderr


_RENDEZVOUS = """
import os, socket
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        server.settimeout(20)
        peers = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
        print(sorted(peer.recv(1) for peer in peers))
else:
    for attempt in range(200):
        try:
            peer = socket.create_connection(address, timeout=20)
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.1)
    peer.sendall(os.environ["RANK"].encode())
    peer.recv(1)
"""


@needs_namespaces
@pytest.mark.netns
def test_cli_ranks_meet_at_the_master_address() -> None:
    result = _netlab("run", "--hosts", "3", "--rate", "100M", "--", sys.executable, "-c", _RENDEZVOUS)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[h0] [b'1', b'2']\n"


@needs_namespaces
@pytest.mark.netns
def test_cli_ends_the_others_after_a_failure_and_all_after_the_timeout() -> None:
    failed = _netlab("run", "--grace", "0.5", "--", "sh", "-c", "test $RANK = 1 && kill -9 $$; sleep 60")
    assert failed.returncode == 137
    assert "host 1 was ended by SIGKILL" in failed.stderr
    assert "hosts [0] still run 0.5 s after the failure" in failed.stderr
    late = _netlab("run", "--timeout", "0.5", "--", "sleep", "60")
    assert late.returncode == 124
    assert "hosts [0, 1] still run after 0.5 s (--timeout)" in late.stderr


@needs_namespaces
@pytest.mark.netns
def test_cli_terminated_leaves_nothing() -> None:
    command = [sys.executable, "-m", "tools.netlab", "run", "--", "sh", "-c", "echo $$; sleep 60"]
    with subprocess.Popen(command, cwd=_ROOT, env=_CLI_ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.terminate()
        assert process.wait(60) == 143
    assert not any(is_alive(pid) for pid in started)
    assert _namespaces_of(process.pid) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--rate", "10", "--", "true"], "rate '10' is not a number with a unit: write 400M, 2.5G or 10G"),
        (["run", "--rate", "900G", "--", "true"], "rate is 900000 Mbit/s; it must be 1 to 400000 Mbit/s"),
        (["run", "--uneven", "1=1G", "--", "true"], "'1=1G' is not HOST:NIC=RATE; write 1:0=2.5G"),
        (["run", "--uneven", "5:0=1G", "--", "true"], "--uneven names 5:0; with --hosts 2 --nics 1 the last is 1:0"),
        (["run", "--rate", "1G,2G", "--", "true"], "--rate has 2 values for --nics 1; give one value"),
        (["run", "--mtu", "500", "--", "true"], "--mtu: 500 is outside 1280..65535"),
        (["run", "--hosts", "1", "--", "true"], "--hosts: 1 is outside 2..64"),
        (["run", "--nics", "17", "--", "true"], "--nics: 17 is outside 1..16"),
        (["run", "--env", "A", "--", "true"], "'A' is not NAME=VALUE"),
        (["run", "--timeout", "-1", "--", "true"], "'-1' is out of range; give 0 or more seconds"),
        (["run", "--rate", "1G"], "no command; write it after --, as in: PYTHONPATH=tools python -m netlab run "),
        (["run", "--show-flows", "--", "true"], "--show-flows needs --per-flow"),
        (["run", "--slow-flows", "1/4=40M", "--", "true"], "--slow-flows needs --per-flow, the cap of the other flows"),
        (
            ["run", "--delay", "1ms", "--mtu", "65535", "--", "true"],
            "--mtu 65535: with --delay it must be at most 65521",
        ),
        (["run", "--tcp-buffer", "1024", "--", "true"], "--tcp-buffer: 1024 is outside 1..1023"),
        (["run", "--loss", "1", "--", "true"], "loss '1' is not a percentage: write 1% or 0.1%"),
        (["run", "--loss", "60%", "--", "true"], "loss is 0.6; it must be 0 to 0.5"),
        (["run", "--slow-flows", "1/4", "--", "true"], "write 1/4=40M for one flow in four"),
        (
            ["run", "--per-flow", "40M", "--slow-flows", "1/4=80M", "--", "true"],
            "--slow-flows at 80 Mbit/s are faster than the others, which --per-flow caps at 40 Mbit/s",
        ),
        (["run", "--", ""], "no command; write it after --"),
    ],
)
def test_cli_errors_name_the_value_and_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2, "125 is for a network that cannot be built"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["tools.netlab", "netlab"])
def test_cli_examples_of_the_help_are_commands_that_exist(module: str) -> None:
    """Under both names: the one needs the root of the repository on the path, the other tools/."""
    environment = dict(_CLI_ENVIRONMENT)
    if module == "netlab":
        environment |= {"PYTHONPATH": "tools", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", module, "run", "--help"]
    text = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240).stdout
    program = "python -m tools.netlab" if module == "tools.netlab" else "PYTHONPATH=tools python -m netlab"
    assert text.startswith(f"usage: {program} run ")
    assert text.count(f"\n  {program} run --") == 5


# --- spellings ---


@pytest.mark.parametrize(
    ("text", "mbit"), [("10G", 10_000), ("2.5g", 2500), ("400M", 400), ("1500kbit", 1.5), ("100Gbit/s", 100_000)]
)
def test_rates_are_bits_a_second_in_powers_of_ten(text: str, mbit: float) -> None:
    assert parse_rate_mbit(text) == pytest.approx(mbit)


@pytest.mark.parametrize("text", ["", "10", "G", "10GB", "-1G", "1e3M", "nan", "10 G"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number with a unit"):
        parse_rate_mbit(text)


def test_link_plans_check_their_values() -> None:
    with pytest.raises(ValueError, match=r"per_flow_mbit is 0.5 Mbit/s; it must be 1 to 400000"):
        LinkPlan(per_flow_mbit=0.5)
    with pytest.raises(ValueError, match="rate_mbit is nan"):
        LinkPlan(rate_mbit=float("nan"))
    with pytest.raises(ValueError, match="slow_flows without per_flow_mbit; give the cap of the other flows"):
        LinkPlan(slow_flows=SlowFlows(4, 8))
    with pytest.raises(ValueError, match="one slow flow in 65; it must be one in 1 to 64"):
        SlowFlows(65, 8)


@pytest.mark.parametrize("text", ["4=8M", "1/4", "1/4=8", "1/x=8M", "2/4=8M"])
def test_other_spellings_of_slow_flows_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 1/4=40M|is not a number with a unit"):
        parse_slow_flows(text)


def test_flows_are_counted_by_cap() -> None:
    usages = [FlowUsage(20, 50), FlowUsage(200, 1000), FlowUsage(200, 900), FlowUsage(200, 3), FlowUsage(20, 0)]
    assert describe_flows(usages) == "3 flows: 2 of up to 200 Mbit/s, 1 of up to 20 Mbit/s; together 420 Mbit/s"
    assert describe_flows(usages[:1]) == "1 flow: 1 of up to 20 Mbit/s; together 20 Mbit/s"
    assert describe_flows(usages[4:]) == "no data"


def test_slow_flows_are_spelled_as_a_share_and_a_rate() -> None:
    assert parse_slow_flows("1/8=40M") == SlowFlows(8, 40.0)


def test_importing_netlab_needs_neither_pyroute2_nor_root() -> None:
    assert importlib.util.find_spec("netlab") is not None
    code = "import sys; sys.path.append(sys.argv[1]); import netlab; assert 'pyroute2' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code, str(_ROOT / "tools")], check=True, timeout=240)
