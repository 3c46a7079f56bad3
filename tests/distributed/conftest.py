"""What several files of this folder need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.rank_pool import RankPool

if TYPE_CHECKING:
    from support.drawn_calls import Group


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as ranks:
        yield ranks


GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {"2 ranks": (2, ()), "3 ranks": (3, ()), "1 to 3 of 4": (4, (1, 2, 3))}


@pytest.fixture(scope="module", params=GROUPS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """For drawn collectives: of all ranks or of some."""
    from support.drawn_calls import Group

    size, members = GROUPS[request.param]
    with RankPool(size) as ranks:
        yield Group(ranks, members)
