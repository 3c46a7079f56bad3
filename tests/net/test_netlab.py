"""tools/netlab: its networks hold what tests and measurements rely on, and leave nothing behind.

All traffic stays inside network namespaces that the test made.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.lab_traffic import PATIENCE_S, assert_sum_holds, connections, until
from support.labs import Lab, needs_lab
from support.processes import is_alive, wait_until
from support.sweeps import each_value_once

# isort: split
from netlab import NetlabError, cli, missing_privilege, missing_tap_device, tap

_ROOT = Path(__file__).resolve().parents[2]
_NO_DELAYS = missing_privilege() or missing_tap_device()


def needs_delays(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.netns(pytest.mark.skipif(_NO_DELAYS is not None, reason=str(_NO_DELAYS))(test))


# --- links ------------------------------------------------------------------------------------------------------------


@needs_lab
def test_rates_hold_in_both_directions_on_uneven_links_and_by_nic() -> None:
    with Lab(hosts=3, rate_mbit=60, uneven_mbit={(2, 0): 20}) as lab:
        assert_sum_holds(60, lab, 0, 1)
        assert_sum_holds(60, lab, 1, 0, (0, 0, 0), ip_version=6)
        assert_sum_holds(20, lab, 0, 2)
        assert_sum_holds(20, lab, 2, 0)
    with Lab(nics=2, rate_mbit=(20, 80)) as lab:
        assert_sum_holds(20, lab, 0, 1, nic=0)
        assert_sum_holds(80, lab, 0, 1, nic=1)


_READS_SYSFS = """
import json, os
from bagua.net.bench.machine import describe_machine
nic = "/sys/class/net/eth0"
device = os.path.realpath(nic + "/device")
name_of = lambda link: os.path.basename(os.path.realpath(link)) if os.path.exists(link) else None
files = [open(f"{nic}/{name}").read().strip() for name in ("speed", "mtu")]
print(json.dumps([*files, name_of(nic + "/subsystem"), name_of(device + "/subsystem"), describe_machine().links()]))
"""


@needs_lab
@pytest.mark.parametrize(
    ("speed", "delay_ms"), each_value_once(["told", "veth", "unknown"], [0, 1] if _NO_DELAYS is None else [0])
)
def test_what_programs_are_told_of_a_link(speed: str, delay_ms: float) -> None:
    told, bus, reported = {
        "told": ("400", "platform", "400 Mb/s"),  # of "pci", NCCL would look for its place in the machine
        "veth": ("10000", None, "10000 Mb/s"),
        "unknown": ("-1", None, "unknown"),
    }[speed]
    with Lab(rate_mbit=400, mtu=9000, delay_ms=delay_ms, speed=speed) as lab:
        for _ in range(2):  # the second command finds what the first one left
            seen = json.loads(lab.run(1, [sys.executable, "-P", "-c", _READS_SYSFS], check=True).stdout)
            assert seen == [told, "9000", "net", bus, f"link speed: eth0 {reported}"]


@needs_lab
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


# --- delays -----------------------------------------------------------------------------------------------------------


def _round_trips_ms(lab: Lab, source: int, target: int, ip_version: int = 4) -> list[float]:
    """Of a byte and its answer, the shortest first."""
    with connections(lab, source, target, [0], ip_version) as ((sender,), (receiver,)):
        receiver.settimeout(PATIENCE_S)
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(8):
            began = time.monotonic()
            sender.send(b"?")
            receiver.recv(1)
            receiver.send(b"!")
            sender.recv(1)
            times.append((time.monotonic() - began) * 1e3)
    return sorted(times)


@needs_delays
@pytest.mark.parametrize(("hosts", "ip_version"), [(2, 6), (3, 4)])
def test_a_round_trip_takes_the_delay_twice(hosts: int, ip_version: int) -> None:
    """On a wire and through a switch. Real time, as a delay is one. A busy machine makes packets late, never early: the
    best of several counts."""
    with Lab(hosts, delay_ms=20) as lab:
        for source, target in ((0, 1), (hosts - 1, 0)):
            shortest = until(
                lambda times: times[0] < 70,
                lambda ends=(source, target): _round_trips_ms(lab, *ends, ip_version)[:1],
            )
            assert 40 <= shortest[0] < 70


# --- commands on hosts ------------------------------------------------------------------------------------------------


@needs_lab
def test_a_command_sees_its_host_and_nothing_of_the_machine() -> None:
    with Lab(nics=2) as lab:
        variables = [lab.rank_environment(host) for host in range(2)]
        assert variables[0]["NCCL_HOSTID"] != variables[1]["NCCL_HOSTID"]
        assert (variables[1]["NCCL_SOCKET_IFNAME"], variables[1]["WORLD_SIZE"]) == ("=eth0,eth1", "2")
        listed = lab.run(1, ["ls", "/sys/class/net"], check=True).stdout.split()
        assert sorted(listed) == ["eth0", "eth1", "lo"]
        assert lab.run(1, ["cat", "/sys/class/net/eth1/operstate"]).stdout == "up\n"
        script = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
        lab.run(1, [sys.executable, "-c", script], check=True)
        result = lab.run(0, ["sh", "-c", "cat; echo $A; echo oops >&2; exit 7"], {"A": "value"}, stdin_text="in,")
        assert (result.returncode, result.stdout, result.stderr) == (7, "in,value\n", "oops\n")
        missing = lab.run(0, ["no-such-program"])
        assert (missing.returncode, missing.stderr) == (127, "netlab: command 'no-such-program' not found\n")


# --- nothing is left behind -------------------------------------------------------------------------------------------


@needs_lab
def test_leaving_the_block_removes_namespaces_and_processes_also_detached_ones() -> None:
    interfaces = sorted(Path("/sys/class/net").iterdir())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with Lab(hosts=3, delay_ms=0 if _NO_DELAYS else 1) as lab:
        detached = int(lab.run(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]).stdout)
        stubborn = lab.start(1, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done"], stdout=-1)
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"ready\n"
        assert is_alive(detached)
    assert not is_alive(detached)
    assert stubborn.wait(60) == -signal.SIGKILL
    stubborn.stdout.close()
    assert sorted(Path("/sys/class/net").iterdir()) == interfaces
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    with pytest.raises(NetlabError, match="not running"):
        lab.run(0, ["true"])


_HOLDER = """
import sys, time
sys.path.append(sys.argv[1])
from netlab import Lab
with Lab(delay_ms=float(sys.argv[2])) as lab:
    held = lab.run(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]).stdout
    print(held, flush=True)
    time.sleep(60)
"""


@contextmanager
def _holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds a lab, and a detached process in that lab."""
    command = [sys.executable, "-c", _HOLDER, str(_ROOT / "tools"), "0" if _NO_DELAYS else "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def _forwarders_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and "forwarder-" in (entry / "cmdline").read_text():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(entry.name)] if int(parent) == pid else []
        except OSError:
            continue  # ended meanwhile
    return found


@needs_lab
def test_a_signal_ends_the_lab_in_order() -> None:
    with _holder() as (process, detached):
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert not is_alive(detached)
    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)


@needs_lab
def test_a_killed_process_leaves_only_what_detached_itself() -> None:
    with _holder() as (killed, orphan):
        forwarders = _forwarders_of(killed.pid)
        assert _NO_DELAYS is not None or forwarders
        killed.kill()
        killed.wait(60)
        wait_until(lambda: not any(map(is_alive, forwarders)), "the end of the forwarder")
        os.kill(orphan, signal.SIGKILL)


# --- the command line -------------------------------------------------------------------------------------------------


def _netlab(*arguments: str) -> subprocess.CompletedProcess[str]:
    # `-m tools.netlab` is meant for the root of the repository, so the directory has to count.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", "tools.netlab", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240)


@needs_lab
def test_run_gives_ranks_marks_output_and_returns_the_worst_code() -> None:
    script = (
        'echo "$RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $NCCL_SOCKET_IFNAME $X"; echo err >&2; exit $((RANK * 3))'
    )
    result = _netlab("run", "--hosts", "3", "--rate", "1G", "--mtu", "9000", "--env", "X=y", "--", "sh", "-c", script)
    assert result.returncode == 6, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[h{rank}] {rank}/3 10.77.0.1:29500 =eth0 y" for rank in range(3)]
    assert {f"[h{rank}] err" for rank in range(3)} < set(result.stderr.splitlines())
    assert "netlab: host 2 exited with code 6" in result.stderr


@needs_lab
def test_run_ends_the_others_after_a_failure_and_all_after_the_timeout() -> None:
    failed = _netlab("run", "--grace", "0.5", "--", "sh", "-c", "test $RANK = 1 && kill -9 $$; sleep 60")
    assert failed.returncode == 137
    assert "host 1 was ended by SIGKILL" in failed.stderr
    assert "hosts [0] still run 0.5 s after the failure" in failed.stderr
    late = _netlab("run", "--timeout", "0.5", "--", "sleep", "60")
    assert late.returncode == 124
    assert "hosts [0, 1] still run after 0.5 s (--timeout)" in late.stderr


def test_errors_name_the_value_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--rate", "10", "--", "true"], "rate '10' is not a number with a unit: write 400M, 2.5G or 10G"),
        (["--rate", "900G", "--", "true"], "rate is 900000 Mbit/s; it must be 1 to 400000 Mbit/s"),
        (["--rate", "1G"], "no command; write it after --, as in: PYTHONPATH=tools python -m netlab run "),
        (["--delay", "1ms", "--mtu", "65535", "--", "true"], "with a delay it must be at most 65521 bytes"),
        (["--slow-flows", "1/4", "--", "true"], "write 1/4=40M for one flow in four"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["run", *words])
        assert ended.value.code == 2, "125 is for a network that cannot be built"
        assert message in capsys.readouterr().err
    told = str(missing_privilege(~(1 << 21) & ((1 << 40) - 1)))
    assert "lacks CAP_SYS_ADMIN: run it as root (sudo)" in told
    assert "lacks CAP_NET_ADMIN and CAP_SYS_ADMIN" in str(missing_privilege(0))


@needs_delays
def test_without_tap_devices_the_rest_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tap, "_TUN", tmp_path / "tun")
    with pytest.raises(NetlabError, match="does not exist here: load the module"):
        Lab(delay_ms=1).__enter__()
    assert cli.main(["check"]) == 0
    assert "netlab cannot delay packets here: delays need" in capsys.readouterr().out
