"""Networks that fail under the plugin: connections that are reset, links that go down, addresses that go, lost packets.

Recovery is on, as always between hosts. Load drivers on two hosts of a netlab network check every byte of each
all-reduce. Long form, each outage of each length and with the plugin's threads as well:

    BAGUA_TEST_OUTAGES=1,5,20 BAGUA_TEST_ROUNDS=200 python -m pytest tests/net/test_plugin_faults.py
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab
from support.load_driver import sent_bytes
from support.processes import ahead_of_others

pytestmark = NEEDS_LAB

_OUTAGES_S = [float(text) for text in os.environ.get("BAGUA_TEST_OUTAGES", "0.3").split(",")]
_ROUNDS = int(os.environ.get("BAGUA_TEST_ROUNDS", "2"))
_IS_LONG = "BAGUA_TEST_OUTAGES" in os.environ
_WORKERS = ["0", "2"] if _IS_LONG else ["0"]
# Of a link with 200 Mb/s, about a second.
_RATE_MBIT = 200
_BYTES = 16 << 20
_ANSWER_S = 90.0


def _ip(lab: Lab, host: int, *words: str) -> None:
    lab.run(host, ["ip", *words], check=True)


def _reset_connections(lab: Lab, host: int) -> int:
    """Resets those of the host that transfer data, as `ss -K` does: how many there were."""
    listed = lab.run(host, ["ss", "-K", "-H", "-t", "-n", "state", "established"], check=True).stdout
    return len(listed.splitlines())


def _stop_within_verify(ring: Ring, size: int) -> None:
    """Stops both drivers where neither can end an all-reduce without the other, however busy the machine is.

    So it is while each has sent less than half of its bytes: it still lacks some of the other's for its sums. A driver
    that was not stopped in time ends its all-reduce and begins another. We look ahead of other processes: with the turn
    that a busy machine gives, each all-reduce could be over.
    """
    deadline = time.monotonic() + 60
    while True:
        begins = [sent_bytes("eth0", ring.pid(rank)) for rank in range(2)]
        ring.start_verify(size)
        with ahead_of_others():
            while sent_bytes("eth0", ring.pid(0)) - begins[0] < size // 8:
                assert time.monotonic() < deadline, "no traffic, or never stopped within an all-reduce"
                time.sleep(0.002)
            _signal(ring, signal.SIGSTOP, 0, 1)
            if all(sent_bytes("eth0", ring.pid(rank)) - begin < size // 2 for rank, begin in enumerate(begins)):
                return
        _signal(ring, signal.SIGCONT, 0, 1)
        ring.finish_verify(size, _ANSWER_S)


def _signal(ring: Ring, number: signal.Signals, *ranks: int) -> None:
    for rank in ranks:
        ring.drivers[rank].process.send_signal(number)


def _reset(lab: Lab) -> Callable[[], None]:
    assert sum(_reset_connections(lab, host) for host in range(2)) > 0
    return lambda: None


def _take_link_down(lab: Lab) -> Callable[[], None]:
    _ip(lab, 0, "link", "set", "eth0", "down")
    return lambda: _ip(lab, 0, "link", "set", "eth0", "up")


def _take_address_away(lab: Lab) -> Callable[[], None]:
    address = f"{lab.hosts[0].address()}/24"
    _ip(lab, 0, "addr", "del", address, "dev", "eth0")
    return lambda: _ip(lab, 0, "addr", "add", address, "dev", "eth0")


def _reset_and_take_link_down(lab: Lab) -> Callable[[], None]:
    # As a router that fails over: both ends know at once, and new connections are not answered for a while.
    _reset(lab)
    return _take_link_down(lab)


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize(
    ("begin", "outage_s"),
    [(begin, outage_s) for begin in (_take_link_down, _take_address_away) for outage_s in _OUTAGES_S]
    # Longer than a process that was killed goes unnoticed.
    + [(_reset_and_take_link_down, max(2.5, outage_s)) for outage_s in _OUTAGES_S]
    + [(_reset, 0.0)] * (_ROUNDS - 1),
)
def test_an_outage(begin: Callable[[Lab], Callable[[], None]], outage_s: float, workers: str) -> None:
    """The outage is real time, as the timers of two kernels and of the plugin run through it. A slow machine makes
    it longer, which changes nothing until the answer takes 90 s.
    """
    environment = {"BAGUA_NET_NWORKERS": workers}
    with (
        Lab(rate_mbit=_RATE_MBIT, ip_versions=(4,)) as lab,
        Ring(lab, env=environment, timeout_ms=120_000) as ring,
    ):
        ring.connect()
        _stop_within_verify(ring, _BYTES)
        end = begin(lab)
        _signal(ring, signal.SIGCONT, 0, 1)
        time.sleep(outage_s)  # the outage itself
        assert outage_s == 0 or not any(driver.has_event() for driver in ring.drivers)
        end()
        began = time.monotonic()
        ring.finish_verify(_BYTES, _ANSWER_S)
        print(f"done {time.monotonic() - began:.1f} s after an outage of {outage_s:g} s")
        # Whatever was lost has been replaced.
        ring.verify(_BYTES // 8)
        assert outage_s > 0 or any("was lost" in driver.log() for driver in ring.drivers)
        ring.quit()
        if _IS_LONG:
            print("\n".join(line for driver in ring.drivers for line in driver.log().splitlines() if "lost" in line))


@pytest.mark.parametrize("workers", _WORKERS)
def test_lost_packets(workers: str) -> None:
    environment = {"BAGUA_NET_NWORKERS": workers}
    with (
        Lab(rate_mbit=1000, loss=0.01, segmentation_offload=False, ip_versions=(4,)) as lab,
        Ring(lab, env=environment) as ring,
    ):
        ring.connect()
        for _ in range(_ROUNDS):
            for size in (8, 1 << 10, (64 << 10) + 4, (1 << 20) - 1, 8 << 20):
                ring.verify(size)
        ring.quit()


# --- peers ---


def _expect_error_of(ring: Ring, lab: Lab, rank: int) -> None:
    """Of the rank, about the other one, by its address."""
    driver = ring.drivers[rank]
    message = driver.expect("error", _ANSWER_S)["message"]
    assert lab.hosts[1 - rank].address() in message + driver.log(), message


@pytest.mark.parametrize(("recovery", "words"), [("0", "set eth0 down"), ("1", "set eth0 down"), ("1", "delete eth0")])
def test_an_interface_that_goes_is_an_error(recovery: str, words: str) -> None:
    environment = {"BAGUA_NET_KEEPALIVE_S": "30" if _IS_LONG else "3", "BAGUA_NET_RECOVERY": recovery}
    with (
        Lab(rate_mbit=_RATE_MBIT, ip_versions=(4,)) as lab,
        Ring(lab, env=environment, timeout_ms=120_000) as ring,
    ):
        ring.connect()
        _stop_within_verify(ring, _BYTES)
        _ip(lab, 0, "link", *words.split())
        _signal(ring, signal.SIGCONT, 0, 1)
        began = time.monotonic()
        for rank in range(2):
            _expect_error_of(ring, lab, rank)
            print(f"rank {rank} noticed after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("recovery", ["0", "1"])
def test_a_killed_process_is_an_error_of_its_peer(recovery: str, workers: str) -> None:
    environment = {"BAGUA_NET_NWORKERS": workers, "BAGUA_NET_RECOVERY": recovery}
    with Lab(rate_mbit=_RATE_MBIT, ip_versions=(4,)) as lab, Ring(lab, env=environment) as ring:
        ring.connect()
        _stop_within_verify(ring, _BYTES)
        ring.drivers[1].process.kill()
        _signal(ring, signal.SIGCONT, 0)
        began = time.monotonic()
        _expect_error_of(ring, lab, 0)
        print(f"noticed after {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("recovery", ["0", "1"] if _IS_LONG else ["1"])
def test_a_stopped_process_is_waited_for(recovery: str, workers: str) -> None:
    """For longer than a host may be silent: this one's kernel answers, in real time. On a slow machine it is longer."""
    keepalive_s, stopped_s = (10, 20) if _IS_LONG else (1, 2.5)
    environment = {
        "BAGUA_NET_NWORKERS": workers,
        "BAGUA_NET_RECOVERY": recovery,
        "BAGUA_NET_KEEPALIVE_S": str(keepalive_s),
    }
    with (
        Lab(rate_mbit=_RATE_MBIT, ip_versions=(4,)) as lab,
        Ring(lab, env=environment, timeout_ms=120_000) as ring,
    ):
        ring.connect()
        _stop_within_verify(ring, _BYTES)
        _signal(ring, signal.SIGCONT, 0)
        time.sleep(stopped_s)  # that it is stopped
        assert not ring.drivers[0].has_event()
        _signal(ring, signal.SIGCONT, 1)
        ring.finish_verify(_BYTES, _ANSWER_S)
        ring.quit()
