"""tools/netlab: its networks hold what tests and measurements rely on, and leave nothing behind.

All traffic stays inside network namespaces that the test made.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.lab_traffic import PATIENCE_S, assert_sum_holds, connections, until
from support.labs import Lab, needs_lab
from support.processes import is_alive, wait_until

# isort: split
from netlab import NetlabError, missing_privilege, missing_tap_device

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
def test_a_killed_process_leaves_only_what_detached_itself() -> None:
    with _holder() as (killed, orphan):
        forwarders = _forwarders_of(killed.pid)
        assert _NO_DELAYS is not None or forwarders
        killed.kill()
        killed.wait(60)
        wait_until(lambda: not any(map(is_alive, forwarders)), "the end of the forwarder")
        os.kill(orphan, signal.SIGKILL)
