"""Measured memory compared with the documented one: rows and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aligned_table import Column
from aligned_table import render as render_table

from bagua.net.bench.endpoint import Event
from memory_measurement.catalogue import CASES

MIB = 1 << 20
# What Python's objects, threads, groups of an algorithm's own and the allocator's rounding may add.
_NOISE_BYTES = 4 * MIB
# gloo's own buffers are in what is measured on a CPU; gradient_allreduce, without scratch, shows how large they are.
GLOO_BYTES = 6 * MIB
_COPY_BYTES = 4  # of a parameter


@dataclass(frozen=True)
class Row:
    """All in bytes, beyond what plain training with the same optimizer has; the rank with most."""

    case: str
    parameters: int
    largest_bucket: int  # elements
    kept: int
    kept_stated: float
    peak: int
    peak_stated: float
    peak_with_fresh_gradients: int
    transport: int  # what the library that communicates may have in the peak

    @property
    def exceeds(self) -> bool:
        """More than is stated, by more than noise."""
        return self.kept > self.kept_stated + _NOISE_BYTES or self.peak > self.peak_stated + self.allowance

    @property
    def allowance(self) -> int:
        """Bytes that may come on top without being the algorithm's."""
        return self.transport + _NOISE_BYTES

    @property
    def tells(self) -> bool:
        """In a smaller model one more copy of all parameters, the least fault worth finding, would go unseen."""
        return _COPY_BYTES * self.parameters > self.allowance


@dataclass(frozen=True)
class Measured:
    """Of one case, by rank: with gradients that stay where they are, and with ones that are made anew in each step."""

    in_place: Sequence[Event]
    fresh: Sequence[Event]


def row_of(case: str, found: Measured, plain: Measured, ranks: int, device: str, transport: int) -> Row:
    """`plain`: of the same model without Bagua."""
    events = found.in_place
    stated = CASES[case].stated
    parameters, largest = int(events[0]["parameters"]), max(events[0]["buckets"])
    return Row(
        case=case,
        parameters=parameters,
        largest_bucket=largest,
        kept=_most("kept", events, plain.in_place),
        kept_stated=stated.kept_bytes(parameters, largest, ranks, device),
        peak=_most("peak", events, plain.in_place),
        peak_stated=stated.peak_bytes(parameters, largest, ranks, device),
        peak_with_fresh_gradients=_most("peak", found.fresh, plain.fresh),
        transport=transport,
    )


def _most(name: str, events: Sequence[Event], plain: Sequence[Event]) -> int:
    return max(int(event[name]) - int(other[name]) for event, other in zip(events, plain, strict=True))


def _per_parameter(count: float, row: Row) -> str:
    return f"{count / row.parameters:+.2f}"


def verdict(row: Row) -> str:
    if row.exceeds:
        return "MORE"
    return f"as stated, within {row.allowance / MIB:g} MiB" if row.tells else "too small to tell"


COLUMNS: tuple[Column[Row], ...] = (
    Column("algorithm", "", lambda row: row.case, left=True),
    Column("kept", "B/parameter", lambda row: _per_parameter(row.kept, row)),
    Column("stated", "B/parameter", lambda row: _per_parameter(row.kept_stated, row)),
    Column("at the peak", "B/parameter", lambda row: _per_parameter(row.peak, row)),
    Column("stated", "at most", lambda row: _per_parameter(row.peak_stated, row)),
    Column("fresh gradients", "at the peak", lambda row: _per_parameter(row.peak_with_fresh_gradients, row)),
    Column("largest bucket", "MiB", lambda row: f"{row.largest_bucket * 4 / MIB:.1f}"),
    Column("", "", verdict, left=True),
)


def render(rows: Sequence[Row], *, colour: bool = False) -> str:
    return render_table(rows, COLUMNS, block=lambda _: None, is_loud=lambda row: row.exceeds, colour=colour)
