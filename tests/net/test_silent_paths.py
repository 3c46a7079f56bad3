"""What tells a silent path of joined interfaces from one that is healthy, and one that loses large packets only.

Load drivers on the hosts of a netlab network check every byte of each all-reduce.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab, cut_nic
from support.nic_traffic import bytes_carried, traffic_until
from support.processes import ahead_of_others
from support.sweeps import rest_is_deep

pytestmark = NEEDS_LAB

_JOINED = {"BAGUA_NET_JOIN_NICS": "eth0+eth1", "BAGUA_NET_RAILS": "1"}


def _losses(ring: Ring) -> int:
    return sum(driver.log().count("was lost (") for driver in ring.drivers)


def test_a_path_that_is_silent_for_a_moment_after_a_pause_is_not_left() -> None:
    """What was sent has been unanswered for that moment, although the last answer is older than a silent path's.

    Real time: the kernel's timers of retransmission decide, and nobody can set them. A slow machine makes the moment
    longer, up to that of a path which is silent: then it does not count, and there is another try. The decision itself
    is tested in tests/cpp/peer_silence_test.cc, with a clock that is passed in.
    """
    with Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab, Ring(lab, env=_JOINED) as ring:
        ring.connect()
        ring.verify(16 << 20)
        moments = tries = 0
        while moments < 12:
            time.sleep(0.9 + tries % 5 * 0.1)  # the pause; nothing is due
            before = _losses(ring)
            with ahead_of_others():  # with the commands that cut it off, so that the moment is as long as said
                began = time.monotonic()
                with cut_nic(lab, 0, tries % 2, "silent"):
                    ring.start_verify(8)
                    time.sleep(0.45)  # the moment
                lasted = time.monotonic() - began
            ring.finish_verify(8)
            tries += 1
            if lasted > 0.6:  # the whole machine was paused, say: it was silent for long
                assert tries < 60
                continue
            moments += 1
            assert _losses(ring) == before, (tries, lasted, [driver.log() for driver in ring.drivers])
        ring.quit()


def test_a_machine_whose_cores_are_busy_has_no_silent_path() -> None:
    with Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab, Ring(lab, env=_JOINED) as ring:
        ring.connect()
        ring.verify(1 << 20)
        before = [driver.log() for driver in ring.drivers]
        loops = len(os.sched_getaffinity(0))
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
        try:
            for size in (8, 4 << 20, 64 << 10, 8, 4 << 20):
                time.sleep(0.9)  # real time: the pause in which nothing is due. A longer one is as healthy
                ring.verify(size)
        finally:
            for one in busy:
                one.kill()
                one.wait()
        for driver, earlier in zip(ring.drivers, before, strict=True):
            assert "was lost (" not in driver.log().removeprefix(earlier), [one.log() for one in ring.drivers]
        ring.quit()


def test_a_peer_says_over_the_other_interface_that_an_address_is_lost() -> None:
    """The link stays up, as with a switch in between, so the other host's kernel knows nothing."""
    with (
        Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab,
        Ring(lab, env={**_JOINED, "BAGUA_NET_NWORKERS": "2"}) as ring,
    ):
        ring.connect()
        ring.verify(16 << 20)

        def is_told() -> bool:
            """On a busy machine its silence may be noticed first."""
            with cut_nic(lab, 1, 1, "address removed"):
                ring.verify(16 << 20)
            traffic_until(ring, lambda: bytes_carried(lab, 0, lambda: ring.verify(2 << 20))[1] > 256 << 10)
            return " over eth1: the peer has lost its address 10.77.1.2" in ring.drivers[0].log()

        traffic_until(ring, is_told, 60)
        ring.quit()


@pytest.mark.parametrize("workers", rest_is_deep(["0", "2"], 1))
def test_a_path_that_loses_large_packets_is_named_and_not_tried_with_data(workers: str) -> None:
    """A switch with a smaller MTU than both hosts."""

    def set_mtu(size: int) -> None:
        words = ["nsenter", f"--net={lab.switches[1].path}", "ip", "link", "set", "port1", "mtu", str(size)]
        subprocess.run(words, check=True)

    with (
        Lab(
            nics=2,
            rate_mbit=400,
            uneven_mbit={(1, 1): 401},  # so that there is a switch
            mtu=9000,
            ip_versions=(4,),
            segmentation_offload=False,  # what is segmented later passes any switch
        ) as lab,
        Ring(lab, env={**_JOINED, "BAGUA_NET_NWORKERS": workers}) as ring,
    ):

        def carries() -> bool:
            return bytes_carried(lab, 0, lambda: ring.verify(2 << 20))[1] > 256 << 10

        ring.connect()
        traffic_until(ring, carries)
        set_mtu(1500)
        said = "connections to 10.77.1.2 over eth1 open, and packets of 9000 bytes are not answered"
        traffic_until(ring, lambda: said in ring.drivers[0].log())
        # Real time: twice its pause after a loss, in which it is not to be tried. On a slow machine there are fewer
        # all-reduces meanwhile.
        end = time.monotonic() + 5
        while time.monotonic() < end:
            ring.verify(2 << 20)
            time.sleep(0.2)  # otherwise it takes both cores
        log = ring.drivers[0].log()
        assert log.count(said) == 1, log
        assert "moves back to eth1" not in log.partition(said)[2], log
        assert not carries()
        set_mtu(9000)
        traffic_until(ring, carries)
        ring.quit()
