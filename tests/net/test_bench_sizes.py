"""Sizes as nccl-tests spells them."""

from __future__ import annotations

import pytest

from bagua.net.bench.sizes import MAX_SIZE_BYTES, format_size, parse_size, size_series


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("8", 8),
        ("8B", 8),
        ("1K", 1024),
        ("1k", 1024),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        ("256M", 256 << 20),
        ("256MiB", 256 << 20),
        ("1.5M", 3 << 19),
        ("0.5K", 512),
        (" 2G ", 2 << 30),
        ("1024G", MAX_SIZE_BYTES),
    ],
)
def test_parse_size(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "write for example") for text in ("", "M", "-1", "1e6", "1T", "1KB2", "1 2", "1,5M")),
        ("0.3K", "whole number of bytes"),
        ("1025G", f"limit is {MAX_SIZE_BYTES} bytes"),
    ],
)
def test_a_wrong_size_names_the_text_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(8, "8 B"), (1536, "1.5 KiB"), (256 << 20, "256 MiB"), (1 << 40, "1024 GiB")],
)
def test_a_formatted_size_parses_back(size: int, expected: str) -> None:
    assert format_size(size) == expected
    assert parse_size(expected) == size


def test_series_includes_the_end_when_it_is_reached() -> None:
    assert size_series(8, 64, 2) == [8, 16, 32, 64]
    assert size_series(8, 63, 2) == [8, 16, 32]
    assert size_series(5, 5, 4) == [5]


@pytest.mark.parametrize(
    ("begin", "end", "factor", "message"),
    [
        (0, 8, 2, "below the limit of 1 B; raise -b"),
        (1024, 8, 2, "1 KiB is above the largest size 8 B; lower -b"),
        (8, 1024, 1, r"factor 1 is outside 2\.\.1024"),
    ],
)
def test_a_wrong_series_names_value_and_option(begin: int, end: int, factor: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_series(begin, end, factor)
