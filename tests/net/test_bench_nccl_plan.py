"""Sizes and buffers of the GPU comparison."""

from __future__ import annotations

import pytest

from bagua.net.bench.measurement import Case
from bagua.net.bench.nccl_ab.session import effective_bytes, make_cases


@pytest.mark.parametrize(
    ("collective", "size", "element", "ranks", "expected"),
    [
        ("all_reduce", 8, 2, 4, 8),
        ("all_reduce", 9, 2, 4, 10),
        ("all_gather", 8, 4, 4, 16),
        ("reduce_scatter", 17, 4, 4, 32),
        ("all_to_all", 8, 2, 3, 12),
        ("send_recv", 1, 4, 2, 4),
        ("broadcast", 256 << 20, 2, 3, 256 << 20),
    ],
)
def test_sizes_hold_whole_elements_for_every_rank(
    collective: str, size: int, element: int, ranks: int, expected: int
) -> None:
    assert effective_bytes(collective, size, element, ranks) == expected


def test_sizes_that_meet_after_rounding_are_measured_once() -> None:
    assert make_cases(["all_gather"], [8, 16, 32], 4, 4) == [Case("all_gather", 16), Case("all_gather", 32)]
