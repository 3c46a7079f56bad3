"""netlab's delays: is a round trip as long as promised, is the rest of the network what it was, and is nothing left.

The forwarder's parts are tested in tests/cpp/tools/delay_line_test.cc. All traffic stays inside network namespaces that
the test made.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.lab_traffic import PATIENCE_S, assert_sum_holds, connections, measure, until
from support.processes import is_alive, wait_until

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tools") not in sys.path:
    sys.path.append(str(_ROOT / "tools"))

from netlab import (  # noqa: E402
    Lab,
    NetlabError,
    cli,
    delayed_wires,
    missing_privilege,
    missing_tap_device,
    tap,
)

_LACKING = missing_privilege() or missing_tap_device()

needs_delays = pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))


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


# --- delay and rate ---


@needs_delays
@pytest.mark.netns
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


@needs_delays
@pytest.mark.netns
def test_the_rate_holds_with_a_delay() -> None:
    with Lab(rate_mbit=60, delay_ms=2, tcp_buffer_bytes=8 << 20) as lab:
        assert_sum_holds(60, lab, 0, 1)


@needs_delays
@pytest.mark.netns
@pytest.mark.parametrize("offload", [True, False])
def test_packets_pass_as_tcp_made_them(offload: bool) -> None:
    with Lab(delay_ms=1, segmentation_offload=offload) as lab:
        measure(lab, 0, 1)
        most = max(usage.bytes / max(1, usage.packets) for usage in lab.delay_usage())
    assert most > 16_000 if offload else most < 1600


@needs_delays
@pytest.mark.netns
def test_bytes_arrive_unchanged_both_ways_at_once() -> None:
    sent = [os.urandom(8 << 20) for _ in range(2)]
    received: list[bytes] = [b"", b""]

    def send(end: socket.socket, data: bytes) -> None:
        end.sendall(data)

    def receive(place: int, end: socket.socket) -> None:
        parts = []
        while sum(map(len, parts)) < len(sent[place]):
            parts.append(end.recv(1 << 20))
        received[place] = b"".join(parts)

    with Lab(delay_ms=3, mtu=9000) as lab, connections(lab, 0, 1, [0]) as ((one,), (other,)):
        for end in (one, other):
            end.settimeout(20)
        threads = [threading.Thread(target=send, args=pair) for pair in ((one, sent[0]), (other, sent[1]))]
        threads += [threading.Thread(target=receive, args=pair) for pair in ((0, other), (1, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        usages = lab.delay_usage()
    assert received == sent
    assert len(usages) == 2
    assert all(usage.bytes > 8 << 20 for usage in usages)
    assert all(usage.mean_late_ms <= usage.most_late_ms for usage in usages)


# --- nothing is left behind ---


@needs_delays
@pytest.mark.netns
def test_leaving_the_block_ends_the_forwarder_and_its_descriptors() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with Lab(hosts=3, delay_ms=1):
        (forwarder,) = _forwarders_of(os.getpid())
    assert not is_alive(forwarder)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert not list(Path("/run/netns").glob(f"netlab-{os.getpid()}-*"))


_HOLDER = """
import sys, time
sys.path.append(sys.argv[1])
from netlab import Lab
with Lab(delay_ms=1):
    print("ready", flush=True)
    time.sleep(60)
"""


@needs_delays
@pytest.mark.netns
def test_the_forwarder_ends_with_a_killed_owner() -> None:
    command = [sys.executable, "-c", _HOLDER, str(_ROOT / "tools")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        (forwarder,) = _forwarders_of(owner.pid)
        owner.kill()
    wait_until(lambda: not is_alive(forwarder), "the end of the forwarder")


# --- what is lacking ---


@needs_delays
@pytest.mark.netns
def test_without_tap_devices_check_says_so_and_the_rest_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tap, "_TUN", tmp_path / "tun")
    assert "does not exist here: load the module (modprobe tun)" in str(missing_tap_device())
    with pytest.raises(NetlabError, match="does not exist here"):
        Lab(delay_ms=1).__enter__()
    assert cli.main(["check"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("netlab can build networks here")
    assert told[1].startswith("netlab cannot delay packets here: delays need")


@pytest.mark.parametrize(
    ("compiler", "says"), [("no-such-compiler", "no 'no-such-compiler' on the PATH"), ("false", "could not compile")]
)
def test_without_a_compiler_the_error_names_the_remedy(
    compiler: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(delayed_wires, "_CACHE", tmp_path / "cache")
    with pytest.raises(NetlabError, match=says):
        delayed_wires.forwarder_program()
