"""`measure nics`: what several NICs of a host carry together, and what the loss of one costs.

In each emulated network of two hosts, the ranks of all setups start once and take turns: NCCL's own transport and the
plugin, each with the best NIC and with all, and the plugin with all NICs joined as one device. On CPUs the plugin's
load driver takes the place of NCCL. Raw TCP, and MPTCP where the kernel has it, say what can be had. With --cuts, NICs
are cut off and returned meanwhile. Errors: a sum that is wrong, a turn that fails, a log that shows another network or
no joined device, and training with cuts that does not give the same bits as without.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netlab import Lab

from bagua.net.bench.api import (
    MIN_REPETITIONS,
    MISSING,
    PLUGIN_NETWORK,
    SOCKET_NETWORK,
    Backend,
    BenchError,
    Column,
    Figure,
    Verdict,
    figures,
    format_bandwidth,
    format_size,
    parse_size,
    speedup,
    within,
)
from measure.core.catalogue import REFERENCE
from measure.core.tool import size_of, training
from measure.networks import log_folder
from measure.nics.cuts import CutReport, all_reduce_with_cuts, train_with_cuts
from measure.nics.drivers import DriverRanks, RawTcp
from measure.nics.mptcp import missing_mptcp, mptcp_rate
from measure.nics.nic_set import HOSTS, NicSet, parse_nic_set
from measure.processes import Placement, Ranks, start_all
from measure.runner import Case, Measure, Plan, Row, Sample, Tool, number, ratio, several, time_us

RAW_BEST, RAW_ALL = "best NIC", "all NICs"
_NETWORKS = "10G/2500M"
_SIZES = "8,1K,64K,1M,16M,256M"
_OWN = {"NCCL_NET": SOCKET_NETWORK, "ENABLE_BAGUA_NET": "0"}
# Of one turn.
_ALL_REDUCE_SECONDS = 0.1
_RAW_SECONDS = 0.3
# An all-reduce is done so often in a turn, at least: checked, tried, timed.
_LEAST_RUNS = 5
# A setup that would take longer for a turn is left out: with a NIC that loses packets, one may take a minute.
_MOST_TURN_SECONDS = 8.0
# The time of this size or more grows with the size.
_TELLING_BYTES = 1 << 20
# Of two NICs that differ by less, either may be the better one in a round.
_FLOOR = 0.02
_CUT_SIZE_BYTES = 4 << 20
_MPTCP_SECONDS = 1.0
# Of cut training beyond its steps without cuts.
_CUTS_TIMEOUT_FACTOR = 4


def _plugin(name: str, **settings: str) -> Backend:
    return Backend(name, PLUGIN_NETWORK, {"ENABLE_BAGUA_NET": "1", **settings}, is_ours=True)


BEST, JOINED = "bagua-net best NIC", "bagua-net joined"
# Each with the best NIC alone, or with all; all may be one device.
SETUPS = {
    backend.name: (backend, has_all)
    for backend, has_all in (
        (Backend("NCCL best NIC", SOCKET_NETWORK, _OWN), False),
        (Backend("NCCL all NICs", SOCKET_NETWORK, _OWN), True),
        (_plugin(BEST), False),
        (_plugin("bagua-net all NICs", BAGUA_NET_JOIN_NICS="off"), True),
        (_plugin(JOINED), True),
    )
}


class NicCase(Case):
    """An all-reduce; or raw TCP, of which the sample is the time of a gigabyte in each direction, with a size of 0."""

    def __str__(self) -> str:
        return f"all-reduce {format_size(self.size_bytes)}" if self.size_bytes else "raw TCP, 1 GB"


def raw(row: Row, variant: str) -> float | None:
    """Seconds of a gigabyte, median."""
    return Row(row.turns, NicCase(network=row.case.network, size_bytes=0)).median(variant=variant)


def _rate(row: Row) -> float | None:
    """Of the joined device in each direction, in GB/s: two ranks each send as many bytes as they reduce."""
    joined = row.median()
    return None if joined is None else row.case.size_bytes / joined / 1e9


def _of_raw(row: Row) -> str:
    rate, raw_seconds = _rate(row), raw(row, RAW_ALL)
    return MISSING if rate is None or raw_seconds is None else f"{rate * raw_seconds * 100:.0f}"


class Nics(Tool):
    name = "nics"
    title = "All-reduce over several NICs of two hosts: {networks}"
    case_type = NicCase
    ranks = (HOSTS, HOSTS)
    keeps_logs = True
    options = (
        ("networks", several(parse_nic_set), _NETWORKS, "NICs of a host, best first: RATE[+DELAY][~LOSS]/..; as root"),
        ("sizes", several(parse_size), _SIZES, "of all-reduce"),
        ("cuts", within(float, 0.0, 3600.0), 0.0, "seconds of training, or all-reduces, with cuts"),
        ("down", within(float, 0.1, 600.0), 2.0, "seconds that a cut lasts"),
        *training(("wide",), "; what --cuts trains"),
    )
    length = (3, 60.0, 30.0)
    columns = (
        Column("NICs", "", lambda row: row.case.network, left=True),
        Column("size", "", lambda row: format_size(row.case.size_bytes)),
        *(Column(one, "us", lambda row, one=one: time_us(row.median(variant=one)), optional=True) for one in SETUPS),
        *(
            Column(f"over {one}", "x", lambda row, one=one: ratio(row.over(one)), optional=True)
            for one in [*SETUPS][:-1]
        ),
        Column("joined", "GB/s", lambda row: MISSING if (rate := _rate(row)) is None else format_bandwidth(rate)),
        Column("of raw TCP", "%", _of_raw),
    )

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        # NCCL's own transport needs GPUs.
        self.setups = [one for one in SETUPS if given.device != "cpu" or not one.startswith("NCCL")]
        self._ranks: Mapping[str, Any] = {}
        self._more_figures: list[Figure] = []
        self._lacking_mptcp = missing_mptcp()
        if self._lacking_mptcp is not None:
            self.lines.append(self._lacking_mptcp)

    def plan(self) -> Mapping[NicSet, Plan]:
        """Raw TCP, then all-reduces by size, smallest first."""
        return {
            network: {
                NicCase(network=network.name, size_bytes=size): [*self.setups] if size else [RAW_BEST, RAW_ALL]
                for size in (0, *sorted(self.given.sizes))
            }
            for network in self.given.networks
        }

    @contextlib.contextmanager
    def session(self, network: NicSet, plan: Plan) -> Iterator[Measure]:
        given = self.given
        with network.lab() as lab, RawTcp(network, lab, given.timeout) as raw_tcp, contextlib.ExitStack() as stack:
            ranks = {name: self._ranks_of(network, name, lab) for name in self.setups}
            self._ranks = ranks
            stack.push(lambda kind, *_: [one.close(failed=kind is not None) for one in ranks.values()] and None)
            for name, failure in start_all(ranks).items():
                self.errors.append(f"{network}: {name}: {failure}")
                del ranks[name]
            self.learn(next((one.facts for one in ranks.values()), {}))

            def measure(case: Case, variant: str, _: int) -> Sample:
                if not case.size_bytes:
                    nics = range(len(network.nics) if variant == RAW_ALL else 1)
                    return {"seconds": 1e9 / raw_tcp.rate(nics, _RAW_SECONDS)}
                return {"seconds": self._all_reduce(ranks[variant], case.size_bytes)}

            yield measure
            self.errors += [
                f"{network}: {name}: {fault}"
                for name, one in ranks.items()
                if (fault := self._fault(network, name, one))
            ]
            if self._lacking_mptcp is None:
                self._measure_mptcp(network, lab)
            if given.cuts and network is given.networks[0]:
                self._report_cuts(network.name, self._with_cuts(ranks.get(JOINED), lab, len(network.nics)))

    def _ranks_of(self, network: NicSet, name: str, lab: Lab) -> DriverRanks | Ranks:
        given, (backend, has_all) = self.given, SETUPS[name]
        interfaces = network.interfaces if has_all else network.interfaces[:1]
        if given.device == "cpu":
            return DriverRanks(lab, interfaces, backend.settings, given.timeout)
        gpus = given.ranks if given.sharing is None else given.sharing.gpus
        return Ranks(
            argparse.Namespace(**{**vars(given), "algorithms": (REFERENCE,), "deterministic": True}),
            "measure.core.rank",
            options=("algorithms", "deterministic"),
            placement=Placement(lab, gpus=gpus, interfaces=None if has_all else interfaces),
            backend=backend,
            log_folder=log_folder(self.folder, network.name, name),
            renews=False,
        )

    @staticmethod
    def _all_reduce(ranks: DriverRanks | Ranks, size_bytes: int) -> float:
        if isinstance(ranks, DriverRanks):
            return ranks.all_reduce(size_bytes, _ALL_REDUCE_SECONDS)
        events = ranks.call("all_reduce", size_bytes=size_bytes, seconds=_ALL_REDUCE_SECONDS)
        return max(event["seconds"] for event in events)

    def _fault(self, network: NicSet, name: str, ranks: DriverRanks | Ranks) -> str | None:
        """What of the setup is not there: its network, or the joined device."""
        if isinstance(ranks, Ranks):
            if fault := ranks.network_fault(name):
                return fault
            said = [log.read_text(errors="replace") for log in ranks.logs]
        else:
            said = ranks.devices()
        device = "+".join(network.interfaces)
        missing = [rank for rank, text in enumerate(said) if device not in text]
        return f"rank {missing[0]} has no device {device}" if missing and name == JOINED else None

    def variants(self, case: Case, planned: Sequence[str]) -> Sequence[str]:
        """The setups of which a turn is not too long, by the size before this one where it tells."""
        if not case.size_bytes:
            return planned
        before = max((size for size in self.given.sizes if size < case.size_bytes), default=0)
        found = []
        for name in (name for name in planned if name in self._ranks):
            known = (
                Row(self.turns, NicCase(network=case.network, size_bytes=before), name).median()
                if before >= _TELLING_BYTES
                else 0.0
            )
            expected = math.inf if known is None else known * case.size_bytes / max(1, before) * _LEAST_RUNS
            if expected <= _MOST_TURN_SECONDS:
                found.append(name)
            elif math.isfinite(expected):
                self.notes.append(
                    f"{case.network}, {case} with {name} was left out: a turn would take {expected:.0f} s"
                )
        return found

    def _measure_mptcp(self, network: NicSet, lab: Lab) -> None:
        try:
            rate = mptcp_rate(network, lab, _MPTCP_SECONDS)
        except OSError as error:
            self.lines.append(f"{network}, MPTCP could not be measured: {error}")
            return
        self.lines.append(f"{network}, MPTCP in Gb/s each way, one connection over all NICs: {rate * 8e-9:.2f}")
        self._more_figures += figures({"backend": "mptcp", "nics": network.name}, {("busbw", "GB/s"): [rate / 1e9]})

    def _with_cuts(self, ranks: DriverRanks | Ranks | None, lab: Lab, nics: int) -> CutReport:
        given = self.given
        if isinstance(ranks, Ranks):
            timeout = _CUTS_TIMEOUT_FACTOR * given.cuts + given.timeout
            size = size_of(given, given.model[0])
            return train_with_cuts(
                ranks, lab, nics, size=size, seconds=given.cuts, down_s=given.down, timeout_s=timeout
            )
        if ranks is None:
            raise BenchError("the ranks with joined NICs were not started, so no NIC is cut")
        return all_reduce_with_cuts(ranks, lab, nics, size_bytes=_CUT_SIZE_BYTES, seconds=given.cuts, down_s=given.down)

    def _report_cuts(self, network: str, report: CutReport) -> None:
        self.lines += [f"{network}, {line}" for line in report.lines()]
        self.errors += [f"{network}, cuts: {difference}" for difference in report.differences]
        if not report.cuts:
            self.errors.append(f"{network}: no NIC was cut in the time there was; allow more with --cuts")
        case = {"backend": JOINED, "nics": network}
        for cuts, seconds in ((False, report.undisturbed_s), (True, report.disturbed_s)):
            self._more_figures += figures({**case, "cuts": cuts}, {("step_time", "ms"): [1e3 * s for s in seconds]})
        self._more_figures += figures(case, {("lost_by_cut", "s"): report.lost_s})

    def rows(self) -> list[Row]:
        cases = dict.fromkeys(case for case, _ in self.turns.samples if case.size_bytes)
        return [Row(self.turns, case, JOINED) for case in cases]

    def figures(self, row: Row) -> list[Figure]:
        labels = {"collective": "all_reduce", "size_bytes": row.case.size_bytes, "nics": row.case.network, **self.where}
        found = []
        for name in self.setups:
            times = [one * 1e6 for one in row.values(variant=name)]
            found += figures({"backend": name, **labels}, {("time", "us"): times})
        for name in self.setups:
            if name != JOINED and (over := row.over(name)) is not None:
                found.append(speedup(labels, JOINED, name, over))
        return found

    def all_figures(self, rows: Sequence[Row]) -> list[Figure]:
        found = []
        for case, name in self.turns.samples:
            if not case.size_bytes:
                rates = [1 / seconds for seconds in Row(self.turns, case, name).values()]
                found += figures({"backend": f"raw, {name}", "nics": case.network}, {("busbw", "GB/s"): rates})
        return found + super().all_figures(rows) + self._more_figures

    def closing(self, rows: Sequence[Row]) -> Iterator[str]:
        for network, row in {row.case.network: row for row in rows}.items():
            rates = {variant: raw(row, variant) for variant in (RAW_BEST, RAW_ALL)}
            carried = ", ".join(
                f"{variant} {number(8 / seconds, '.2f')}" for variant, seconds in rates.items() if seconds
            )
            yield f"{network}, raw TCP in Gb/s each way: {carried or 'not measured'}"
        for row in rows:
            over = row.over(BEST)
            if over is None or over.median >= 1 - _FLOOR:
                continue
            rounds = "" if over.repetitions >= MIN_REPETITIONS else f", {over.repetitions} rounds"
            yield (
                f"{row.case.network}, {row.case}: joined NICs have {over.median:.2f}x the speed of the best NIC alone"
                f" ({over.low:.2f}..{over.high:.2f}{rounds})"
            ) + ("" if over.verdict(floor=_FLOOR) is Verdict.LESS else ", which may be noise")


main = Nics.main
