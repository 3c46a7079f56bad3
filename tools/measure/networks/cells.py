"""The table of all-reduce: a cell is a size in a network. Its samples, which a file of JSON lines keeps from run to
run, and what they say of Bagua-Net compared with the best of NCCL's own settings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagua.net.bench.api import Turns, format_size, parse_size

# A ratio below it is measured again, with processes started anew.
LEAST_RATIO = 0.97
# Medians that differ by less are level, or by less than the second if the quartiles overlap.
_LEVEL, _LEVEL_IF_OVERLAPPING = 0.03, 0.1
RAW = "raw TCP"


@dataclass(frozen=True)
class Cell:
    network: str
    size_bytes: int
    is_fresh: bool = False  # every sample is of processes of its own

    def __str__(self) -> str:
        return f"{self.network}/{format_size(self.size_bytes)}" + (", fresh starts" if self.is_fresh else "")


def parse_cell(text: str) -> Cell:
    """`25G:9000/1M`. Raises ValueError."""
    network, slash, size = text.rpartition("/")
    if not slash or not network:
        raise ValueError(f"cell {text!r} is not NETWORK/SIZE; write for example 25G:9000/1M")
    return Cell(network, parse_size(size))


@dataclass(frozen=True)
class Sample:
    """One turn, or the median of those of one start."""

    cell: Cell
    backend: str
    round: int
    seconds: float  # of one of several one after the other; the slowest rank
    single_seconds: float | None = None  # of one alone, the median; None: of raw TCP


class CellLog:
    """The samples by cell, backend and round. With a path, every sample is written as it comes; what a run before this
    one wrote is read, of each cell from the last run that measured it.

    Attributes:
        finished: the cells whose measurement came to its end.
        facts: what the ranks said about themselves, the last ones.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ValueError: the file is of something else."""
        self._path = path
        self.turns: Turns[Sample] = Turns()
        self.finished: set[Cell] = set()
        self.facts: Mapping[str, Any] = {}
        written = path.read_bytes() if path is not None and path.exists() else b""
        *lines, cut = written.split(b"\n")
        try:
            for line in lines:
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} has a line that is no sample of this tool ({error}); name another file"
            ) from error
        if path is not None and cut:  # killed while it wrote
            with path.open("r+b") as file:
                file.truncate(len(written) - len(cut))

    def begin(self, cells: Sequence[Cell], **facts: object) -> None:
        """What was known of these cells is forgotten: one run measures a cell from its beginning to its end."""
        self._add({"begin": [asdict(cell) for cell in cells], **facts})

    def add(self, sample: Sample) -> None:
        self._add({"sample": asdict(sample)})

    def end(self, cells: Sequence[Cell]) -> None:
        self._add({"end": [asdict(cell) for cell in cells]})

    def cells(self) -> list[Cell]:
        """Those with samples: network by network, size by size."""
        found = dict.fromkeys(cell for cell, _ in self.turns.samples)
        networks = list(dict.fromkeys(cell.network for cell in found))
        return sorted(found, key=lambda cell: (networks.index(cell.network), cell.size_bytes, cell.is_fresh))

    def _add(self, record: Mapping[str, Any]) -> None:
        self._take(record)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _take(self, record: Mapping[str, Any]) -> None:
        self.facts = record.get("facts", self.facts)
        for fields in record.get("begin", ()):
            cell = Cell(**fields)
            self.finished.discard(cell)
            self.turns.samples = {key: found for key, found in self.turns.samples.items() if key[0] != cell}
        if fields := record.get("sample"):
            sample = Sample(**{**fields, "cell": Cell(**fields["cell"])})
            self.turns.samples.setdefault((sample.cell, sample.backend), {})[sample.round] = sample
        self.finished |= {Cell(**fields) for fields in record.get("end", ())}


@dataclass(frozen=True)
class Times:
    median: float
    low: float  # quartiles
    high: float


def times_of(samples: Sequence[Sample]) -> Times | None:
    seconds = [sample.seconds for sample in samples]
    if len(seconds) < 2:
        return Times(*seconds * 3) if seconds else None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Times(statistics.median(seconds), low, high)


@dataclass(frozen=True)
class Row:
    """Bagua-Net, or a variant of it, in a cell. Times in seconds."""

    cell: Cell
    backend: str
    rounds: int
    ours: Times
    best: Times
    best_name: str
    all: Mapping[str, Times]  # of every backend
    of_raw: float | None  # rate of each direction over that of raw TCP; two ranks

    @property
    def ratio(self) -> float:
        """Above 1 ours is faster."""
        return self.best.median / self.ours.median

    @property
    def verdict(self) -> str:
        difference = abs(1 - self.ratio)
        overlap = self.ours.low <= self.best.high and self.best.low <= self.ours.high
        if difference < (_LEVEL_IF_OVERLAPPING if overlap else _LEVEL):
            return "level"
        return "faster" if self.ratio > 1 else "slower"


def rows_of(turns: Turns[Sample], cell: Cell) -> list[Row]:
    """None without one of NCCL's own settings. One of them that failed on the way is not the best."""
    names = dict.fromkeys(name for of, name in turns.samples if of == cell)
    all_times = {name: times for name in names if (times := times_of(turns.of(cell, name))) is not None}
    counts = {name: len(turns.of(cell, name)) for name in all_times if name.startswith("NCCL ")}
    whole = [name for name, count in counts.items() if count == max(counts.values())]
    if not whole:
        return []
    best = min(whole, key=lambda name: all_times[name].median)
    raw = all_times.get(RAW)
    return [
        Row(
            cell,
            name,
            len(turns.of(cell, name)),
            all_times[name],
            all_times[best],
            best,
            all_times,
            None if raw is None else raw.median / all_times[name].median,
        )
        for name in all_times
        if name not in counts and name != RAW
    ]
