"""`measure all-reduce`: all-reduce, or other collectives, of NCCL's own settings and of Bagua-Net as users enable it,
in a table of networks and sizes.

In each network, all backends start once and take turns. A run that is cut off, or that ends at its time limit, is taken
up by the next one with the same --lines, network by network: one run measures a cell, a size in a network, from its
beginning to its end. Errors: a backend that does not start, fails, computes a wrong sum or used another network than
its own; the others go on without it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from netlab import TOLD, LinkPlan

from bagua.net.bench.api import (
    BEST_TUNED_NAME,
    GPU_COLLECTIVES,
    MISSING,
    RANK_PROGRAM,
    Backend,
    BenchError,
    Column,
    Figure,
    Label,
    backend_label,
    bagua_net_variant,
    figures,
    format_size,
    make_backends,
    names_of,
    parse_size,
    tuned_settings,
    within,
)
from measure.network import NETWORKS, RANKS_PER_HOST, Network, check_hosts, parse_network, told_text
from measure.networks.tool import WARM_UP, WARM_UP_BYTES, log_folder
from measure.nics.drivers import RawTcp
from measure.nics.nic_set import Nic, NicSet
from measure.processes import Placement, Ranks, bagua_net_by_activation, start_all
from measure.runner import Length, Measure, Plan, Row, Sample, Tool, number, several, time_us

COLLECTIVE = "all_reduce"
SIZES = "64K,256K,1M,4M,16M,64M,256M"
TUNED = "2x4,2x2x8,2x2x16"
BELOW = "below"
RAW = "raw TCP"
# A ratio below it is measured again, with processes started anew.
LEAST_RATIO = 0.97
# Medians that differ by less are level, or by less than the second if the quartiles overlap.
_LEVEL, _LEVEL_IF_OVERLAPPING = 0.03, 0.1
# Of processes that load torch and open connections at the same time. One that hangs must not take the others' time.
_START_S = 60.0
_FRESH_TURNS = 3
_MAX_ITERATIONS = 1000
_SINGLE = 5
_VERIFIED_BYTES = 1 << 20
# Raw TCP in each direction: what the connections of all backends share, and as many as a limit per connection needs.
_RAW_STREAMS = 8
_RAW_FROM_BYTES = 16 << 20


@dataclass(frozen=True)
class Cell:
    network: str
    size_bytes: int
    is_fresh: bool = False  # every sample is of processes of its own
    collective: str = COLLECTIVE

    def __str__(self) -> str:
        named = "" if self.collective == COLLECTIVE else f"/{self.collective}"
        return f"{self.network}{named}/{format_size(self.size_bytes)}" + (", fresh starts" if self.is_fresh else "")


def parse_cell(text: str) -> Cell:
    """`25G:9000/1M`, `25G:9000/all_gather/1M`. Raises ValueError."""
    network, *collective, size = text.split("/")
    if not network or len(collective) > 1 or not set(collective) <= set(GPU_COLLECTIVES):
        raise ValueError(f"cell {text!r} is not NETWORK[/COLLECTIVE]/SIZE; write for example 25G:9000/1M")
    return Cell(network, parse_size(size), collective=(*collective, COLLECTIVE)[0])


def _cells(text: str) -> Any:
    return text if text == BELOW else several(parse_cell)(text)


def quartiles(row: Row, variant: str) -> tuple[float, float, float]:
    """Low, median, high."""
    seconds = row.values(variant=variant)
    if len(seconds) < 2:
        return (*seconds * 3,)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, statistics.median(seconds), high


def best_of(row: Row) -> str | None:
    """The fastest of NCCL's own settings. One of them that failed on the way is not the best."""
    names = [name for case, name in row.turns.samples if case == row.case and name.startswith("NCCL ")]
    counts = {name: len(row.values(variant=name)) for name in names}
    whole = [name for name, count in counts.items() if count == max(counts.values())]
    return min(whole, key=lambda name: row.median(variant=name) or math.inf, default=None)


def over_best(row: Row) -> float:
    """The ratio of the medians: above 1 this backend is faster."""
    return quartiles(row, best_of(row) or "")[1] / quartiles(row, row.variant)[1]


def verdict(row: Row) -> str:
    (low, _, high), (best_low, _, best_high) = quartiles(row, row.variant), quartiles(row, best_of(row) or "")
    limit = _LEVEL_IF_OVERLAPPING if low <= best_high and best_low <= high else _LEVEL
    return "level" if abs(1 - over_best(row)) < limit else "faster" if over_best(row) > 1 else "slower"


def _times(row: Row, variant: str) -> str:
    low, middle, high = map(time_us, quartiles(row, variant))
    return f"{middle} ({low}..{high})"


def _of_raw(row: Row) -> str:
    """The rate of each direction over that of raw TCP; two ranks."""
    raw = row.median(variant=RAW)
    return MISSING if raw is None else number(raw / (row.median() or math.inf), ".2f")


class AllReduce(Tool):
    name = "all-reduce"
    about = "All-reduce, or other collectives, over the plugin and over NCCL's own sockets, by network and size"
    title = "Collectives on {ranks} ranks, by network and size"
    case_type = Cell
    ranks = (2, 128)
    keeps_logs = True
    auto_is_cuda = True
    options = (
        NETWORKS,
        RANKS_PER_HOST,
        ("collectives", names_of("collective", GPU_COLLECTIVES), COLLECTIVE, f"of {', '.join(GPU_COLLECTIVES)}"),
        ("sizes", several(parse_size), SIZES, "of the larger of input and output"),
        ("tuned", str, TUNED, "hand-tuned NCCL, as of bagua-net-bench --nccl --tuned"),
        ("raw", None, False, "also raw TCP in both directions, in emulated networks, for all-reduce of two ranks"),
        ("network_limit", within(float, 1.0, 86400.0), 50.0, "seconds for one network, after the start"),
        ("turn", within(float, 0.001, 60.0), 0.15, "seconds of a turn"),
        WARM_UP,
        ("fresh", within(int, 0, 1000), 0, "measure --cells, with so many starts of each backend"),
        (
            "cells",
            _cells,
            BELOW,
            f"of --fresh, as NETWORK[/COLLECTIVE]/SIZE; {BELOW}: those of --lines below {LEAST_RATIO}",
        ),
    )
    length = Length(7, 560.0, 60.0)
    keeps = "case"
    same = ("ranks_per_host",)
    fails_everywhere = True
    columns = (
        Column("network", "", lambda row: row.case.network, left=True),
        Column("", "", lambda row: "fresh starts" if row.case.is_fresh else "", left=True, optional=True),
        Column("told", "Mb/s", lambda row: told_text(row.case.network), optional=True),
        Column("collective", "", lambda row: row.case.collective, left=True),
        Column("size", "", lambda row: format_size(row.case.size_bytes)),
        Column("backend", "", lambda row: row.variant, left=True),
        Column("rounds", "", lambda row: str(len(row.values()))),
        Column("time", "us", lambda row: _times(row, row.variant)),
        Column("best of NCCL", "us", lambda row: _times(row, best_of(row) or "")),
        Column("", "", lambda row: (best_of(row) or "").removeprefix("NCCL "), left=True),
        Column("over best", "x", lambda row: f"{over_best(row):.2f}"),
        Column("", "", verdict, left=True),
        Column("of raw TCP", "x", _of_raw, optional=True),
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--variant",
            action="append",
            default=[],
            metavar="NAME:VAR=VALUE,...",
            help="the plugin with variables set, besides the plugin without; may be repeated",
        )

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        super().check(parser, given)
        check_hosts(parser, given)

    def __init__(self, given: argparse.Namespace) -> None:
        own = make_backends(library=None, tuned=tuned_settings([given.tuned]), variants=[], with_shared_memory=False)
        ours = bagua_net_by_activation()
        variants = [bagua_net_variant(text, ours) for text in given.variant]
        self.ours = ours.name
        self.backends = {backend.name: backend for backend in (*own, ours, *variants)}
        super().__init__(given)

    @property
    def rounds(self) -> int:
        return self.given.fresh or self.given.rounds

    @property
    def rounds_first(self) -> bool:  # type: ignore[override]
        """Of fresh starts, one start after the other."""
        return bool(self.given.fresh)

    def plan(self) -> Mapping[Network, Plan]:
        given, names = self.given, list(self.backends)
        found: dict[Network, dict[Cell, list[str]]] = {}
        if given.fresh:
            rows = {row.case: row for row in self.rows() if row.variant == self.ours and not row.case.is_fresh}
            below = [cell for cell, row in rows.items() if over_best(row) < LEAST_RATIO]
            for cell in below if given.cells == BELOW else given.cells:
                both = [best_of(rows[cell]) or "", self.ours] if cell in rows else names
                found.setdefault(parse_network(cell.network), {})[replace(cell, is_fresh=True)] = both
            return found
        for network in given.networks:
            raw = [RAW] if given.raw and network.is_emulated and given.ranks == 2 else []
            cells = [Cell(network.name, size, collective=name) for name in given.collectives for size in given.sizes]
            found[network] = {
                cell: [*names, *(raw if cell.size_bytes >= _RAW_FROM_BYTES and cell.collective == COLLECTIVE else [])]
                for cell in cells
            }
        return found

    def left_out(self, left_s: float) -> str | None:
        enough = left_s >= self.given.network_limit
        return None if enough else "left for the next run with the same --lines: --time-limit"

    def end_of(self, began: float, started: float, deadline: float, groups_left: int) -> float:
        given = self.given
        self._is_last = bool(given.fresh) or deadline - started < given.network_limit
        limit = "--time-limit" if self._is_last else "--network-limit"
        self.limit = f"{limit} {given.time_limit if self._is_last else given.network_limit:g}"
        return deadline if self._is_last else started + given.network_limit

    def is_final(self, case: Cell, variants: Sequence[str]) -> bool:
        """A cell that another run can measure with more time is not left with a part of its rounds."""
        needed = [name for name in variants if name == self.ours or name.startswith("NCCL ")]
        enough = self.rounds if self._is_last else 1
        return all(len(self.turns.of(case, name)) >= enough for name in needed)

    @contextlib.contextmanager
    def session(self, network: Network, plan: Plan) -> Iterator[Measure]:
        names = {name for found in plan.values() for name in found}
        backends = [backend for name, backend in self.backends.items() if name in names]
        with network.placement(self.given) as placement, contextlib.ExitStack() as stack:
            raw = self._raw(network, placement, stack) if RAW in names else None

            def start() -> StartedBackends:
                found = stack.enter_context(StartedBackends(self, network, backends, placement))
                self.errors += [f"{network}: {error}" for error in found.errors]
                return found

            running, running_round = start(), 0
            self.learn(running.facts)
            self._usable = {*running.ranks, *([RAW] if raw is not None else [])}

            def measure(cell: Cell, name: str, number: int) -> Sample:
                nonlocal running, running_round
                if self.given.fresh and number != running_round:
                    running.close(failed=False)
                    running, running_round = start(), number
                if name == RAW:
                    assert raw is not None
                    return {"seconds": cell.size_bytes / raw.rate([0], self.given.turn), "single_seconds": None}
                count = _FRESH_TURNS if self.given.fresh else 1
                found = [running.measure(name, cell, self.given.turn) for _ in range(count)]
                singles = [single for _, single in found if single is not None]
                return {
                    "seconds": statistics.median(seconds for seconds, _ in found),
                    "single_seconds": statistics.median(singles) if singles else None,
                }

            yield measure
            if self.given.device == "cuda":
                self.lines += [f"{network}, {name}: {ranks.network_seen()}" for name, ranks in running.ranks.items()]

    def variants(self, case: Cell, planned: Sequence[str]) -> Sequence[str]:
        return [name for name in planned if name in self._usable]

    def _raw(self, network: Network, placement: Placement, stack: contextlib.ExitStack) -> RawTcp | None:
        told = LinkPlan(network.rate_mbit).speed_mbit(TOLD)
        try:
            nics = NicSet(network.name, (Nic(told),))
            return stack.enter_context(RawTcp(nics, placement.lab, self.given.timeout, streams=_RAW_STREAMS))
        except BenchError as error:
            self.errors.append(f"{network}: {RAW} did not start: {error}")
            return None

    def rows(self) -> list[Row]:
        """Network by network, size by size. None of a cell without one of NCCL's own settings."""
        found = dict.fromkeys(case for case, _ in self.turns.samples)
        networks = list(dict.fromkeys(cell.network for cell in found))
        names = list(GPU_COLLECTIVES)
        cells = sorted(
            found,
            key=lambda cell: (
                networks.index(cell.network), names.index(cell.collective), cell.size_bytes, cell.is_fresh
            ),
        )  # fmt: skip
        rows = [Row(self.turns, cell, name) for cell in cells for of, name in self.turns.samples if of == cell]
        return [row for row in rows if not row.variant.startswith("NCCL ") and row.variant != RAW and best_of(row)]

    def is_loud(self, row: Row) -> bool:
        return verdict(row) == "slower"

    def figures(self, row: Row) -> list[Figure]:
        cell, found = row.case, []
        fresh: dict[str, Label] = {"fresh_starts": True} if cell.is_fresh else {}
        labels = {"collective": cell.collective, "size_bytes": cell.size_bytes, **fresh}
        labels |= {**parse_network(cell.network).labels(), **self.where}
        others = [name for of, name in self.turns.samples if of == cell and (name.startswith("NCCL ") or name == RAW)]
        for name in [*(others if row.variant == self.ours else []), row.variant]:
            times = [seconds * 1e6 for seconds in row.values(variant=name)]
            found += figures({"backend": backend_label(name), **labels}, {("time", "us"): times})
        case = {"backend": backend_label(row.variant), "baseline": backend_label(BEST_TUNED_NAME)}
        case |= {"setting": best_of(row) or "", "verdict": verdict(row), **labels}
        return [*found, Figure(case, "speedup", "x", over_best(row), repetitions=len(row.values()))]

    def closing(self, rows: Sequence[Row]) -> Iterator[str]:
        for name in dict.fromkeys(row.variant for row in rows):
            mine = {row.case: row for row in rows if row.variant == name}
            for fresh in [cell for cell in mine if cell.is_fresh]:
                mine.pop(replace(fresh, is_fresh=False), None)  # measured again, which is what counts
            below = [row for row in mine.values() if over_best(row) < LEAST_RATIO]
            slower = [row for row in below if not (row.case.is_fresh and verdict(row) == "level")]
            cells = ", ".join(f"{row.case} {over_best(row):.2f}" for row in slower)
            yield f"{name}: {len(mine)} cells, {len(slower)} below {LEAST_RATIO}" + (f": {cells}" if cells else "")

    def parameters(self) -> Mapping[str, Any]:
        return {"backends": {name: backend.settings for name, backend in self.backends.items()}}


class StartedBackends:
    """The backends in one network, alive together. A context manager.

    Attributes:
        ranks: Of the backends that have started, and have not failed since.
        errors: Why others have not started.
    """

    def __init__(self, tool: AllReduce, network: Network, backends: Sequence[Backend], placement: Placement) -> None:
        self._given = tool.given
        self._seconds: dict[tuple[str, str, int], float] = {}
        self.ranks = {
            backend.name: Ranks(
                tool.given,
                "",
                placement=placement,
                backend=backend,
                logs=log_folder(tool.folder, f"{network}-{backend.name}"),
                tcp_only=tool.given.ranks_per_host == 1,
                renews=False,
                program=RANK_PROGRAM,
            )
            for backend in backends
        }
        failures = start_all(self.ranks, self._form)
        for name in failures:
            del self.ranks[name]
        self.errors = [f"{name} did not start: {failure}" for name, failure in failures.items()]
        for name in list(self.ranks):
            self._warm_up(name)
        self.facts = next((ranks.facts for ranks in self.ranks.values()), {})

    def __enter__(self) -> StartedBackends:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool) -> None:
        for ranks in self.ranks.values():
            ranks.close(failed=failed)

    def _form(self, name: str) -> None:
        ranks = self.ranks[name]
        ranks.form(_START_S, dtype="float32")
        # Opens the connections.
        for collective in dict.fromkeys((COLLECTIVE, *self._given.collectives)):
            answers = ranks.ask("verify", _START_S, collective=collective, bytes=_VERIFIED_BYTES, salt=1)
            if wrong := sum(answer["wrong_elements"] for answer in answers):
                raise BenchError(f"{wrong} elements of {collective} of {format_size(_VERIFIED_BYTES)} are wrong")
        if self._given.device == "cuda" and (fault := ranks.network_fault(name)):
            raise BenchError(fault)

    def _warm_up(self, name: str) -> None:
        """The all-reduces of --warm-up, before the first turn, so that all rounds take as long."""
        seconds = self._given.turn
        end, each = time.monotonic() + self._given.warm_up, seconds
        try:
            while time.monotonic() < end:
                each, _ = self._ask(name, COLLECTIVE, WARM_UP_BYTES, self._count(seconds, each))
        except BenchError as error:
            self.errors.append(f"{name} failed before its first turn: {error}")
            del self.ranks[name]

    def measure(self, name: str, cell: Cell, seconds: float) -> tuple[float, float | None]:
        """Seconds of one of several collectives that take about `seconds` together, and of one alone, None if there was
        no time for several. The first time at a size, as many go before. Raises BenchError, after which the backend has
        ended."""
        what = cell.collective, cell.size_bytes
        known = self._seconds.get((name, *what))
        if known is None:
            # Not counted: a job's connections know their path from the steps before.
            known, _ = self._ask(name, *what, 1)
            known, _ = self._ask(name, *what, self._count(seconds, known))
        found = self._ask(name, *what, self._count(seconds, known))
        self._seconds[name, *what] = found[0]
        return found

    @staticmethod
    def _count(seconds: float, each: float) -> int:
        return max(1, min(_MAX_ITERATIONS, round(seconds / each)))

    def _ask(self, name: str, collective: str, size_bytes: int, count: int) -> tuple[float, float | None]:
        if name not in self.ranks:
            raise BenchError("it has ended")
        fields = {"collective": collective, "bytes": size_bytes, "iterations": count, "warmup": min(count, 2)}
        answers = self.ranks[name].ask("time", **fields, single=min(count - 1, _SINGLE))
        seconds = max(answer["seconds"] for answer in answers) / count
        singles = [max(ranks) for ranks in zip(*(answer["single_seconds"] for answer in answers), strict=True)]
        return seconds, statistics.median(singles) if singles else None


main = AllReduce.main
