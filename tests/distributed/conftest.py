"""What several files of this folder need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rank_pool import RankPool


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as ranks:
        yield ranks
