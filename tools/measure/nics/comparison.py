"""What the samples of one network say: times of each setup, and joined NICs against the best NIC alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.api import (
    MIN_REPETITIONS,
    Figure,
    Label,
    PairedRatio,
    Turns,
    Verdict,
    figures,
    format_size,
    paired_ratio,
    speedup,
)
from measure.networks.comparison import Sample
from measure.nics.setups import ALL, BEST, JOINED, OWN_ALL, OWN_BEST

# A turn's sample is then the time of a gigabyte in each direction.
RAW_CASE = "raw TCP, 1 GB"
RAW_BEST, RAW_ALL = "best NIC", "all NICs"
# Of two NICs that differ by less, either may be the better one in a round.
_FLOOR = 0.02


@dataclass(frozen=True)
class Row:
    """One size in one network. A ratio is the other's time over that of joined NICs: above 1 joined is faster."""

    network: str
    size_bytes: int
    seconds: Mapping[str, float]  # medians, by setup
    over: Mapping[str, PairedRatio]  # by the other setup
    raw_bytes_per_second: float | None  # of all NICs, each direction

    @property
    def bytes_per_second(self) -> float | None:
        """Of the joined device in each direction: two ranks each send as many bytes as they reduce."""
        joined = self.seconds.get(JOINED.name)
        return None if joined is None else self.size_bytes / joined

    @property
    def of_raw(self) -> float | None:
        rate = self.bytes_per_second
        return None if rate is None or self.raw_bytes_per_second is None else rate / self.raw_bytes_per_second


def size_case(size_bytes: int) -> str:
    return f"all-reduce {format_size(size_bytes)}"


def median(turns: Turns[Sample], case: str, variant: str) -> float | None:
    found = [one.seconds for one in turns.of(case, variant)]
    return statistics.median(found) if found else None


def row_of(turns: Turns[Sample], network: str, size_bytes: int) -> Row | None:
    """None: nothing was measured."""
    case = size_case(size_bytes)
    names = [setup.name for setup in (OWN_BEST, OWN_ALL, BEST, ALL, JOINED)]
    seconds = {name: value for name in names if (value := median(turns, case, name)) is not None}
    over = {}
    for name in names[:-1]:
        if pairs := turns.pairs(case, name, JOINED.name):
            over[name] = paired_ratio([one.seconds for one, _ in pairs], [other.seconds for _, other in pairs])
    raw = median(turns, RAW_CASE, RAW_ALL)
    return Row(network, size_bytes, seconds, over, None if raw is None else 1e9 / raw) if seconds else None


def slower_lines(rows: Sequence[Row]) -> list[str]:
    """Where joined NICs are slower than the plugin with the best one alone."""
    lines = []
    for row in rows:
        ratio = row.over.get(BEST.name)
        if ratio is None or ratio.median >= 1 - _FLOOR:
            continue
        is_sure = ratio.verdict(floor=_FLOOR) is Verdict.LESS
        rounds = "" if ratio.repetitions >= MIN_REPETITIONS else f", {ratio.repetitions} rounds"
        lines.append(
            f"{row.network}, {size_case(row.size_bytes)}: joined NICs have {ratio.median:.2f}x the speed of the best"
            f" NIC alone ({ratio.low:.2f}..{ratio.high:.2f}{rounds})" + ("" if is_sure else ", which may be noise")
        )
    return lines


def figures_of(row: Row, turns: Turns[Sample], where: Mapping[str, Label]) -> list[Figure]:
    """`where`: ranks and GPUs."""
    labels = {"collective": "all_reduce", "size_bytes": row.size_bytes, "nics": row.network, **where}
    found = []
    for name in row.seconds:
        values = [one.seconds * 1e6 for one in turns.of(size_case(row.size_bytes), name)]
        found += figures({"backend": name, **labels}, {("time", "us"): values})
    found += [speedup(labels, JOINED.name, name, ratio) for name, ratio in row.over.items()]
    return found


def raw_figures(network: str, turns: Turns[Sample]) -> list[Figure]:
    found = []
    for name in (RAW_BEST, RAW_ALL):
        rates = [1 / one.seconds for one in turns.of(RAW_CASE, name)]
        found += figures({"backend": f"raw, {name}", "nics": network}, {("busbw", "GB/s"): rates})
    return found
