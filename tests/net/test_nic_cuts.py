"""A NIC is cut off while data moves and returns, again and again: every byte arrives, and no communicator ends.

The host, the NIC, the way, the moment and the duration are drawn from a seed. With one NIC the transfer waits for its
return, so no cut is longer than recovery allows; with several it has to end during the cut. Moments and durations are
real time: a slow machine moves a cut to another moment of the transfer, and nothing depends on which. Long form:

    BAGUA_TEST_CUTS=1000 BAGUA_TEST_SEED=7 BAGUA_TEST_NICS=2 python -m pytest -s tests/net/test_nic_cuts.py
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from support.lab_ring import Ring
from support.labs import NEEDS_LAB, NIC_CUTS, Lab, cut_nic

pytestmark = [*NEEDS_LAB, pytest.mark.timeout(0 if "BAGUA_TEST_CUTS" in os.environ else 300)]

_CUTS = int(os.environ.get("BAGUA_TEST_CUTS", "4"))
_SEED = int(os.environ.get("BAGUA_TEST_SEED", "0"))
_NICS = [int(word) for word in os.environ.get("BAGUA_TEST_NICS", "1,2").split(",")]
_RATE_MBIT = 100
# All-reduces one after the other: bytes, and how many. Of all but the smallest, that is 0.6 s of traffic.
_SERIES = ((8, 300), (64 << 10, 120), ((1 << 20) - 1, 8), (8 << 20, 1))
_MOMENTS_S = (0.0, 0.7)  # also at the end, and when nothing moves any more
_ANSWER_S = 90.0


@dataclass(frozen=True)
class _Cut:
    size: int
    count: int
    after_s: float  # the beginning of the series
    host: int
    nic: int
    way: str
    seconds: float

    @classmethod
    def draw(cls, rng: random.Random, nics: int) -> _Cut:
        return cls(
            *rng.choice(_SERIES),
            round(rng.uniform(*_MOMENTS_S), 3),
            rng.randrange(2),
            rng.randrange(nics),
            rng.choice(NIC_CUTS),
            rng.choice((0.02, 0.3, 1.0)),
        )


@pytest.mark.parametrize("nics", _NICS)
def test_cuts_that_are_drawn_from_a_seed(nics: int) -> None:
    rng = random.Random(_SEED)
    environment = {"BAGUA_NET_RAILS": "1"}
    if nics > 1:
        environment["BAGUA_NET_JOIN_NICS"] = "auto"
    waits: list[float] = []
    with (
        Lab(nics=nics, rate_mbit=_RATE_MBIT, ip_versions=(4,)) as lab,
        Ring(lab, env=environment, timeout_ms=120_000) as ring,
    ):
        ring.connect()
        for number in range(_CUTS):
            cut = _Cut.draw(rng, nics)
            print(f"seed {_SEED}, cut {number}: {cut}", end="", flush=True)
            for _ in range(cut.count):
                ring.start_verify(cut.size)
            # Real time, here and below: a slow machine makes the cut at another point of the series, and longer. Every
            # point and every duration up to what recovery allows is one of those that are tested.
            time.sleep(cut.after_s)  # the moment that was drawn
            with ExitStack() as returns:
                returns.enter_context(cut_nic(lab, cut.host, cut.nic, cut.way))
                began = time.monotonic()
                if nics == 1:
                    time.sleep(cut.seconds)  # the cut itself
                    returns.close()
                    began = time.monotonic()
                for _ in range(cut.count):
                    ring.finish_verify(cut.size, _ANSWER_S)
            waits.append(time.monotonic() - began)
            print(f": done {waits[-1]:.2f} s later")
            ring.verify(64 << 10)
        ring.quit()
    print(f"{len(waits)} cuts: waits of {sum(waits) / len(waits):.2f} s on average, at most {max(waits):.2f} s")
