"""From samples to rows and to the closing block: the limit, the shares and the paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.measurement import LATENCY_LIMIT_BYTES, Measurement, busbw_factor
from bagua.net.bench.ring.interleaved_run import RunResults
from bagua.net.bench.ring.sessions import Sample
from bagua.net.bench.settings import RAW
from bagua.net.bench.sizes import format_size
from bagua.net.bench.verdict import LARGE_BYTES, SMALL_BYTES, PairedRatio, paired_ratio

LONG_TRANSFER_BYTES = 64 << 20


@dataclass(frozen=True)
class RawLimit:
    """The best that plain TCP moved over the measured path."""

    gb_s: float
    streams: int
    # Ring connections that share that path: all W on one host; across hosts those that leave rank 0's host.
    links: int

    @property
    def busbw_gb_s(self) -> float:
        """The busbw at which the ring's connections together reach the limit."""
        return self.gb_s / self.links


@dataclass(frozen=True)
class Comparison:
    """`backend` over `baseline`; a None was not measured."""

    backend: str
    baseline: str
    large_bytes: int
    small_bytes: int
    busbw: PairedRatio
    # Of the visits' p50, not means: a mean of 20 us iterations is at the mercy of one preemption of 10 ms.
    time: PairedRatio
    cpu: PairedRatio | None

    def __str__(self) -> str:
        text = (
            f"{self.backend} vs {self.baseline}: busbw at {format_size(self.large_bytes)} {self.busbw},"
            f" p50 time at {format_size(self.small_bytes)} {self.time}"
        )
        return text if self.cpu is None else f"{text}, CPU s/GB {self.cpu}"


def raw_limit(results: RunResults, links: int) -> RawLimit | None:
    """Of the stream counts the one with the best median rate over all visits of all sizes.

    TCP has no messages, so the sizes are repetitions of one experiment; the best single size is merely lucky.
    """
    best: RawLimit | None = None
    for name, by_size in results.samples.items():
        visits = [sample for samples in by_size.values() for sample in samples]
        # A short transfer is start and end; it counts only where there is nothing longer.
        long_visits = [sample for sample in visits if sample.moved_bytes >= LONG_TRANSFER_BYTES]
        if not name.startswith(f"{RAW} x") or not visits:
            continue
        rate = statistics.median(s.moved_bytes / (s.seconds * s.iterations) for s in long_visits or visits) / 1e9
        if best is None or rate > best.gb_s:
            best = RawLimit(rate, int(name.removeprefix(f"{RAW} x")), links)
    return best


def compare(results: RunResults, backend: str, baseline: str) -> Comparison | None:
    """None when the two share no size."""
    mine, theirs = results.samples.get(backend, {}), results.samples.get(baseline, {})
    sizes = sorted(size for size in mine if mine[size] and theirs.get(size))
    if not sizes:
        return None
    large = LARGE_BYTES if LARGE_BYTES in sizes else sizes[-1]
    small = SMALL_BYTES if SMALL_BYTES in sizes else sizes[0]
    cpu_known = all(sample.cpu_seconds > 0 for sample in (*mine[large], *theirs[large]))
    return Comparison(
        backend,
        baseline,
        large,
        small,
        # The same bytes in less time: the ratio of bandwidths is the inverse ratio of times.
        busbw=paired_ratio([s.seconds for s in theirs[large]], [s.seconds for s in mine[large]]),
        time=paired_ratio([s.typical_seconds for s in mine[small]], [s.typical_seconds for s in theirs[small]]),
        cpu=paired_ratio([s.cpu_s_per_gb for s in mine[large]], [s.cpu_s_per_gb for s in theirs[large]])
        if cpu_known
        else None,
    )


def comparisons(results: RunResults, baselines: Sequence[str]) -> list[Comparison]:
    found = [compare(results, "plugin", baseline) for baseline in baselines]
    return [comparison for comparison in found if comparison is not None]


@dataclass(frozen=True)
class PairedSeries:
    """Every repetition's ratio of `backend` over `baseline` at one size: what a verdict over many runs is made of."""

    backend: str
    baseline: str
    bytes: int
    # Of p50 up to LATENCY_LIMIT_BYTES, as in Comparison; of the mean of the visit above.
    time: list[float]
    cpu: list[float] | None  # None: the kernel counted none


def paired_series(results: RunResults, baselines: Sequence[str]) -> list[PairedSeries]:
    found = []
    for baseline in baselines:
        for size, mine in sorted(results.samples.get("plugin", {}).items()):
            theirs = results.samples.get(baseline, {}).get(size, [])
            pairs = list(zip(mine, theirs, strict=True)) if theirs else []
            if not pairs:
                continue
            small = size <= LATENCY_LIMIT_BYTES
            time = [a.typical_seconds / b.typical_seconds if small else a.seconds / b.seconds for a, b in pairs]
            cpu_known = all(sample.cpu_seconds > 0 for pair in pairs for sample in pair)
            cpu = [a.cpu_s_per_gb / b.cpu_s_per_gb for a, b in pairs] if cpu_known else None
            found.append(PairedSeries("plugin", baseline, size, time, cpu))
    return found


def measurements(
    results: RunResults, collectives: Mapping[str, str], ranks: int, limit: RawLimit | None
) -> list[Measurement]:
    """One row a backend and size, by size, in the order of the backends."""
    sizes = sorted({size for by_size in results.samples.values() for size in by_size})
    rows = []
    for size in sizes:
        for name, by_size in results.samples.items():
            if by_size.get(size):
                rows.append(_row(name, collectives[name], size, by_size[size], ranks, limit, results))
    return rows


def _row(
    name: str,
    collective: str,
    size: int,
    samples: Sequence[Sample],
    ranks: int,
    limit: RawLimit | None,
    results: RunResults,
) -> Measurement:
    seconds = [sample.seconds for sample in samples]
    links = 1 if collective == "one_way" else (limit.links if limit else 1)
    busbw = size / statistics.median(seconds) / 1e9 * busbw_factor(collective, ranks)
    verification = results.verifications.get((name, size))
    notes = []
    if name.startswith(f"{RAW} x"):
        notes.append("one way")
    if name == "gloo":
        notes.append("with arithmetic")
    if verification is not None and not verification.correct:
        notes.append("WRONG DATA")
    return Measurement.from_samples(
        backend=name,
        collective=collective,
        size_bytes=size,
        ranks=ranks,
        iterations=samples[0].iterations,
        repetition_seconds=seconds,
        iteration_seconds=[value for sample in samples for value in sample.iteration_seconds],
        cpu_s_per_gb=statistics.median(sample.cpu_s_per_gb for sample in samples),
        share_of_raw=busbw * links / limit.gb_s if limit is not None else None,
        verified=None if verification is None else verification.correct,
        note=", ".join(notes),
    )


def best_raw_only(rows: Sequence[Measurement]) -> list[Measurement]:
    """For people: of raw TCP only the best number of streams of each size. The exports have them all."""
    best: dict[int, Measurement] = {}
    for row in rows:
        if row.collective == "one_way" and (row.bytes not in best or row.busbw_gb_s > best[row.bytes].busbw_gb_s):
            best[row.bytes] = row
    return [row for row in rows if row.collective != "one_way" or best[row.bytes] is row]
