"""NICs that are cut off and returned while ranks work over the joined device: what it costs, and that nothing changes.

On GPUs, torch's DDP trains twice from the same start, once undisturbed: all losses and the final parameters must have
the same bits. On CPUs, drivers all-reduce and compare every byte.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netlab import NIC_CUTS, Lab, NetlabError, cut_nic

from bagua.net.bench.api import Event
from measure.core.catalogue import REFERENCE
from measure.nics.drivers import DriverRanks
from measure.nics.nic_set import HOSTS
from measure.processes import Ranks

# A NIC carries again when each host has sent so much over it.
_CARRIES_BYTES = 256 << 10
_RETURN_SECONDS = 8.0
_POLL_SECONDS = 0.02
_PROBE_STEPS = 20


@dataclass(frozen=True)
class CutReport:
    """
    Attributes:
        cuts: when each began, and when its NIC was returned, as of time.monotonic().
        differences: what is not as without cuts; empty if all bits are the same.
        undisturbed_s, disturbed_s: of each step or all-reduce.
        lost_s: of each cut, the longest of the steps that it falls into, or that follow within the time it lasts, less
            the median without cuts.
    """

    what: str
    cuts: Sequence[tuple[float, float]]
    differences: list[str]
    undisturbed_s: list[float]
    disturbed_s: list[float]
    lost_s: list[float]

    def lines(self) -> list[str]:
        typical, most = statistics.median(self.lost_s or [0.0]), max(self.lost_s, default=0.0)
        without, during = statistics.median(self.undisturbed_s), statistics.fmean(self.disturbed_s)
        return [
            f"{self.what}: {len(self.cuts)} cuts of a NIC during {len(self.disturbed_s)} steps; "
            + ("the same bits as without cuts" if not self.differences else "; ".join(self.differences)),
            (
                f"a step takes {without * 1e3:.1f} ms without cuts, {during * 1e3:.1f} ms on average with them;"
                f" a cut costs {typical:.2f} s, at most {most:.2f} s"
            ),
        ]


class NicCutter:
    """Cuts one NIC after the other for `down_s`, each in the next way, in a thread; the next one when the last carries
    again. Every other cut is of the other host. Use as a context manager around the work."""

    def __init__(self, lab: Lab, nics: int, down_s: float) -> None:
        self._lab, self._nics, self._down_s = lab, nics, down_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nic-cutter")
        self.cuts: list[tuple[float, float]] = []
        self.error: NetlabError | None = None

    def __enter__(self) -> NicCutter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.wait(self._down_s / 2):
                nic, way = number % self._nics, NIC_CUTS[number // self._nics % len(NIC_CUTS)]
                host = number // self._nics % HOSTS
                began = time.monotonic()
                with cut_nic(self._lab, host, nic, way):
                    self._stop.wait(self._down_s)
                self.cuts.append((began, time.monotonic()))
                self._await_traffic(nic)
                number += 1
        except NetlabError as error:
            self.error = error

    def _await_traffic(self, nic: int) -> None:
        """Until both hosts have sent over it again, or it takes too long."""
        before = [self._lab.sent_bytes(host, nic) for host in range(HOSTS)]
        deadline = time.monotonic() + _RETURN_SECONDS
        while time.monotonic() < deadline and not self._stop.wait(_POLL_SECONDS):
            if all(self._lab.sent_bytes(host, nic) - sent > _CARRIES_BYTES for host, sent in enumerate(before)):
                return


def _report(
    what: str,
    cutter: NicCutter,
    ended: Sequence[float],
    lengths: list[float],
    usual: list[float],
    differences: Sequence[str] = (),
) -> CutReport:
    """`ended`: when each step ended, as the times of the cuts."""
    lost = []
    for began, returned in cutter.cuts:
        last = 2 * returned - began
        own = [length for end, length in zip(ended, lengths, strict=True) if end >= began and end - length <= last]
        lost.append(max(0.0, max(own, default=0.0) - statistics.median(usual)))
    errors = [] if cutter.error is None else [str(cutter.error)]
    return CutReport(what, cutter.cuts, [*errors, *differences], usual, lengths, lost)


def all_reduce_with_cuts(
    ranks: DriverRanks, lab: Lab, nics: int, *, size_bytes: int, seconds: float, down_s: float
) -> CutReport:
    """Raises BenchError: a byte is wrong, or a rank failed."""

    def run(until: Callable[[], bool]) -> tuple[list[float], list[float]]:
        ended, lengths = [], []
        while not until():
            began = time.monotonic()
            ranks.verify(size_bytes)
            ended.append(time.monotonic())
            lengths.append(ended[-1] - began)
        return ended, lengths

    end = time.monotonic() + seconds / 4
    _, undisturbed = run(lambda: time.monotonic() > end)
    end = time.monotonic() + seconds
    with NicCutter(lab, nics, down_s) as cutter:
        ended, disturbed = run(lambda: time.monotonic() > end)
    return _report("all-reduces, all bytes compared", cutter, ended, disturbed, undisturbed)


def train_with_cuts(
    ranks: Ranks, lab: Lab, nics: int, *, size: Mapping[str, Any], seconds: float, down_s: float, timeout_s: float
) -> CutReport:
    """Trains for about `seconds` without cuts, and as many steps with them. Raises BenchError: a rank failed."""

    def train(steps: int) -> list[Event]:
        return ranks.call("turn", timeout_s, algorithm=REFERENCE, steps=steps, warmup=3, **size)

    probe = statistics.median(train(_PROBE_STEPS)[0]["step_seconds"])
    steps = max(_PROBE_STEPS, round(seconds / probe))
    undisturbed = train(steps)
    with NicCutter(lab, nics, down_s) as cutter:
        disturbed = train(steps)
        end = time.monotonic()
    lengths = [max(step) for step in zip(*(event["step_seconds"] for event in disturbed), strict=True)]
    # The answer comes soon after the last step.
    ended = [end - sum(lengths[number + 1 :]) for number in range(len(lengths))]
    usual = [max(step) for step in zip(*(event["step_seconds"] for event in undisturbed), strict=True)]
    differences = []
    for rank, (event, other) in enumerate(zip(disturbed, undisturbed, strict=True)):
        if event["losses"] != other["losses"]:
            first = next(
                n for n, pair in enumerate(zip(event["losses"], other["losses"], strict=True)) if len(set(pair)) > 1
            )
            differences.append(f"losses of rank {rank} differ from step {first} on")
        if event["fingerprint"] != other["fingerprint"]:
            differences.append(f"parameters of rank {rank} differ at the end")
    what = f"DDP training, {steps} losses and the parameters compared"
    return _report(what, cutter, ended, lengths, usual, differences)
