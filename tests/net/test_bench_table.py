"""The table by its structure: columns line up, optional ones come and go, wrong data is loud."""

from __future__ import annotations

import io

import pytest

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.table import (
    COLUMNS,
    LOUD,
    RESET,
    format_bandwidth,
    format_cpu,
    format_time_us,
    render_table,
    shows_colour,
)
from bagua.net.bench.table_width import fitting


def row(backend: str, size: int, **changes: object) -> Measurement:
    arguments: dict[str, object] = {
        "backend": backend,
        "collective": "all_reduce",
        "size_bytes": size,
        "ranks": 2,
        "iterations": 3,
        "repetition_seconds": [20e-6, 30e-6],
    }
    return Measurement.from_samples(**(arguments | changes))  # type: ignore[arg-type]


def test_golden_table() -> None:
    rows = [
        row("plugin", 8, iteration_seconds=[19e-6, 31e-6], cpu_s_per_gb=0.2041, share_of_raw=0.9876, verified=True),
        row("bare", 8, cpu_s_per_gb=3141.6, verified=True),
        row("plugin", 1 << 20, repetition_seconds=[0.25], verified=False, note="WRONG DATA"),
    ]
    assert render_table(rows).splitlines() == [
        " size  backend    time        min..max    algbw    busbw   p50   p99    CPU  of raw  verified  note",
        "                    us              us     GB/s     GB/s    us    us   s/GB       %",
        "  8 B  plugin     25.0      20.0..30.0  0.00032  0.00032  19.0  31.0  0.204      99       yes",
        "  8 B  bare       25.0      20.0..30.0  0.00032  0.00032     -     -   3142       -       yes",
        "",
        "1 MiB  plugin   250000  250000..250000   0.0042   0.0042     -     -      -       -        NO  WRONG DATA",
    ]


def test_optional_columns_appear_with_their_first_value() -> None:
    plain = render_table([row("bare", 8)]).splitlines()[0]
    assert plain.split() == ["size", "backend", "time", "min..max", "algbw", "busbw", "verified"]
    assert "of raw" in render_table([row("bare", 8, share_of_raw=0.5)])


def test_every_line_has_its_columns_at_the_same_place() -> None:
    rows = [row(name, size, verified=True) for size in (8, 1 << 20, 256 << 20) for name in ("a", "a-long-name")]
    lines = [line for line in render_table(rows).splitlines()[2:] if line]
    assert len(lines) == 6
    assert {line.index("a") for line in lines} == {lines[0].index("a")}
    assert len({len(line) for line in lines}) == 1


def test_a_blank_line_separates_sizes_and_collectives() -> None:
    raw = row("raw x2", 8, collective="one_way")
    rows = [row("a", 8), row("b", 8), raw, row("a", 16), row("a", 16, collective="all_gather")]
    body = render_table(rows).splitlines()[2:]
    assert [bool(line) for line in body] == [True, True, True, False, True, False, True]


def test_wrong_data_is_loud_only_where_colour_is_shown() -> None:
    rows = [row("a", 8, verified=False), row("b", 8, verified=True)]
    coloured = render_table(rows, colour=True).splitlines()
    assert coloured[2].startswith(LOUD)
    assert coloured[2].endswith(RESET)
    assert LOUD not in coloured[3]
    assert "\x1b" not in render_table(rows)
    assert "NO" in render_table(rows).splitlines()[2]


@pytest.mark.parametrize("width", [40, 60, 80, 200, None])
def test_a_narrow_terminal_keeps_what_says_most(width: int | None) -> None:
    rows = [
        row("plugin-1", 256 << 20, cpu_s_per_gb=0.2, share_of_raw=0.99, verified=True, note="one way"),
        row("plugin-1", 8, iteration_seconds=[19e-6, 31e-6], verified=False),
    ]

    def rendered(left_out: set[str]) -> str:
        return render_table(rows, columns=[column for column in COLUMNS if column.title not in left_out])

    text = rendered(fitting(rendered, width))
    assert width is None or max(map(len, text.splitlines())) <= width
    for title in ("size", "backend", "busbw", "verified"):
        assert title in text.splitlines()[0]
    assert ("min..max" in text) == (width in (200, None))


def test_no_rows_are_only_a_head() -> None:
    assert len(render_table([]).splitlines()) == 2


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.50"), (9.376, "9.38"), (93.76, "93.8"), (937.6, "938"), (12345.6, "12346")]
)
def test_times(value: float, text: str) -> None:
    assert format_time_us(value) == text


def test_bandwidth_and_cpu_keep_their_meaning_at_both_ends() -> None:
    assert [format_bandwidth(v) for v in (0.00041, 0.1171, 4.567, 45.67)] == ["0.00041", "0.117", "4.57", "45.7"]
    assert [format_cpu(v) for v in (0.2041, 20.41, 20410.0)] == ["0.204", "20.4", "20410"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_needs_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shows_colour(_Terminal())
    assert not shows_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_colour(_Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_colour(_Terminal())
