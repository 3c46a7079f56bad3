"""netlab's delays: is a round trip as long as promised, is the rest of the network what it was, and is nothing left.

The forwarder's parts are tested in tests/cpp/delay_line_test.cc. All traffic stays inside network namespaces that the
test made.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.lab_traffic import assert_sum_holds, connections, measure, until
from support.processes import is_alive, wait_until

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tools") not in sys.path:
    sys.path.append(str(_ROOT / "tools"))

from netlab import (  # noqa: E402
    DelayUsage,
    Lab,
    NetlabError,
    cli,
    delayed_wires,
    describe_delays,
    missing_privilege,
    missing_tap_device,
    parse_delay_ms,
    tap,
)

_LACKING = missing_privilege() or missing_tap_device()

needs_delays = pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))


def _round_trips_ms(lab: Lab, source: int, target: int, ip_version: int = 4) -> list[float]:
    """Of a byte and its answer, the shortest first."""
    with connections(lab, source, target, [0], ip_version) as ((sender,), (receiver,)):
        receiver.settimeout(5)
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
@pytest.mark.parametrize(("hosts", "ip_version"), [(2, 4), (2, 6), (3, 4)])
def test_a_round_trip_takes_the_delay_twice(hosts: int, ip_version: int) -> None:
    """On a wire and through a switch. A busy machine makes packets late, never early: the best of several counts."""
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
    with Lab(rate_mbit=200, delay_ms=2, tcp_buffer_bytes=8 << 20) as lab:
        for source, target in ((0, 1), (1, 0)):
            assert_sum_holds(200, lab, source, target)


@needs_delays
@pytest.mark.netns
def test_several_senders_share_a_receiver_s_link_behind_a_switch() -> None:
    with Lab(3, rate_mbit=100, delay_ms=1) as lab, connections(lab, 1, 0, [0]) as first:
        assert lab.delay_usage()
        del first
        assert_sum_holds(100, lab, 2, 0, (0, 0))


@needs_delays
@pytest.mark.netns
def test_a_connection_moves_at_most_its_buffer_in_a_round_trip() -> None:
    """The bandwidth-delay product. A part of the buffer is the kernel's own."""
    buffer_bytes, delay_ms = 512 << 10, 20.0
    bound_mbit = buffer_bytes * 8e-6 / (2 * delay_ms * 1e-3)
    with Lab(delay_ms=delay_ms, tcp_buffer_bytes=buffer_bytes) as lab:
        one, three = until(
            lambda sums: 0.1 * bound_mbit < sums[0] <= bound_mbit and sums[1] > 1.5 * sums[0],
            lambda: [sum(measure(lab, 0, 1, [0] * flows)) for flows in (1, 3)],
        )
        assert 0.1 * bound_mbit < one <= bound_mbit
        assert three > 1.5 * one, "each connection has its own"


@needs_delays
@pytest.mark.netns
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("offload", [True, False])
def test_packets_pass_as_tcp_made_them(hosts: int, offload: bool) -> None:
    with Lab(hosts, delay_ms=1, segmentation_offload=offload) as lab:
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


@needs_delays
@pytest.mark.netns
def test_an_interface_reports_the_speed_of_a_veth_and_runs() -> None:
    with Lab(delay_ms=1) as lab:
        told = lab.run(0, ["cat", "/sys/class/net/eth0/speed", "/sys/class/net/eth0/operstate"], check=True).stdout
    assert told.split() == ["10000", "up"]


@needs_delays
@pytest.mark.netns
def test_without_a_delay_there_is_no_forwarder() -> None:
    with Lab(delay_ms=0) as lab:
        assert _forwarders_of(os.getpid()) == []
        assert lab.delay_usage() == []


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


@needs_delays
@pytest.mark.netns
def test_a_forwarder_that_ends_early_is_an_error_and_not_a_hang() -> None:
    with Lab(delay_ms=1) as lab:
        (forwarder,) = _forwarders_of(os.getpid())
        os.kill(forwarder, 9)
        wait_until(lambda: not is_alive(forwarder), "the end of the forwarder")
        with pytest.raises(NetlabError, match="the forwarder ended"):
            lab.delay_usage()


@needs_delays
@pytest.mark.netns
def test_a_failure_while_building_removes_devices_and_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise NetlabError("no cable")

    monkeypatch.setattr(delayed_wires, "plug_in", fail)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(NetlabError, match="no cable"):
        Lab(delay_ms=1).__enter__()
    assert _forwarders_of(os.getpid()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


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


def test_the_forwarder_is_compiled_once_for_each_state_of_its_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(delayed_wires, "_CACHE", tmp_path / "cache")
    program = delayed_wires.forwarder_program()
    made = program.stat().st_ino
    assert delayed_wires.forwarder_program() == program
    assert program.stat().st_ino == made
    refused = subprocess.run([str(program), "3:x:5"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert refused.returncode == 2
    assert "'3:x:5' is not FIRST:SECOND:DELAY_NS:RING_BYTES" in refused.stderr
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in delayed_wires._SOURCES.iterdir():
        (sources / path.name).write_text(path.read_text() + "\n")
    monkeypatch.setattr(delayed_wires, "_SOURCES", sources)
    assert delayed_wires.forwarder_program() != program


# --- spellings ---


@pytest.mark.parametrize(
    ("text", "delay_ms"), [("5ms", 5), ("0.5ms", 0.5), ("250us", 0.25), ("0.1s", 100), ("0", 0), ("0ms", 0)]
)
def test_delays_have_a_unit(text: str, delay_ms: float) -> None:
    assert parse_delay_ms(text) == pytest.approx(delay_ms)


@pytest.mark.parametrize("text", ["", "5", "ms", "-1ms", "1e3ms", "5 ms", "1us", "11s", "5m", "..ms"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="delay"):
        parse_delay_ms(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"delay_ms": 20_000.0}, "it must be 0.01 to 10000 ms"),
        ({"delay_ms": -1.0}, "it must be 0.01 to 10000 ms"),
        ({"delay_ms": 1.0, "mtu": 65535}, "mtu is 65535; with a delay it must be at most 65521"),
        ({"tcp_buffer_bytes": 10}, "tcp_buffer_bytes is 10; it must be 65536 to"),
    ],
)
def test_a_lab_checks_its_values(arguments: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Lab(**arguments)  # type: ignore[arg-type]


def _usages(*late: tuple[int, float, float], full: int = 0) -> Sequence[DelayUsage]:
    return [DelayUsage(packets, packets * 1000, 0, full, mean, most) for packets, mean, most in late]


def test_lateness_is_the_mean_over_packets() -> None:
    text = describe_delays(5, _usages((100, 0.1, 0.5), (300, 0.5, 2.0)))
    assert text == "packets were kept 5 ms and 0.400 ms more, at most 2.00 ms more"
    assert "full at times" in describe_delays(5, _usages((1, 0, 0), full=3))
    assert describe_delays(5, _usages((0, 0, 0))).startswith("packets were kept 5 ms and 0.000 ms")
