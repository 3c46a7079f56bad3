"""What several files of this folder need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.rank_pool import RankPool
from support.sweeps import rest_is_deep

if TYPE_CHECKING:
    from support.drawn_calls import Group


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Of as many ranks as support.sweeps.pool_of says."""
    with RankPool(request.param) as ranks:
        yield ranks


GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {"2 ranks": (2, ()), "3 ranks": (3, ()), "1 to 3 of 4": (4, (1, 2, 3))}


# Groups of "1 to 3 of 4" are of two ranks, too.
@pytest.fixture(scope="module", params=rest_is_deep([*GROUPS], 1, 2), ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """For drawn collectives: of all ranks or of some."""
    from support.drawn_calls import Group

    size, members = GROUPS[request.param]
    with RankPool(size) as ranks:
        yield Group(ranks, members)
