"""Ranks in words."""

from __future__ import annotations

import pytest

from bagua.rank_list import MAX_SHOWN, rank_list


@pytest.mark.parametrize(
    ("ranks", "hosts", "words"),
    [
        ((3,), {}, "rank 3"),
        ((0, 1), {}, "ranks 0 and 1"),
        ((0, 1, 2), {}, "ranks 0 to 2"),
        (range(1000), {}, "ranks 0 to 999"),
        ((0, 1, 2, 5, 7, 8), {}, "ranks 0 to 2, 5, 7 and 8"),
        ((4, 3, 2), {}, "ranks 4, 3 and 2"),  # in the order of the group
        ((1,), {1: "b"}, "rank 1 (host b)"),
        ((0, 1, 2, 3, 4), {1: "b"}, "ranks 0, 1 (host b) and 2 to 4"),
        ((0, 1, 2), {0: "a", 1: "a"}, "ranks 0 (host a), 1 (host a) and 2"),
    ],
)
def test_words(ranks: tuple[int, ...], hosts: dict[int, str], words: str) -> None:
    assert rank_list(ranks, hosts) == words


def test_many_ranges_are_counted() -> None:
    every_other = range(0, 2 * MAX_SHOWN + 10, 2)
    assert rank_list(every_other).endswith(f", {2 * MAX_SHOWN - 2} and 5 more")
