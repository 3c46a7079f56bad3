"""When ranks are taken for deadlocked, and when they may only be late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bagua.collectives import deadlock
from bagua.collectives.deadlock import DeadlockDetector
from bagua.collectives.torch_internals import HashStore


@dataclass(frozen=True)
class Wait:
    what: str
    since: float = 0.0
    can_give_up: bool = False
    group: str = "world"
    ranks: tuple[int, ...] = (0, 1, 2)


ASKS = Wait("asking", can_give_up=True)
ASKS_TOO = Wait("asking")
SUMS = Wait("summing")


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """What ranks 0, 1, ... find in turn, each with its waits."""
    for name in ("POST_S", "REPEAT_S", "STUCK_S"):
        monkeypatch.setattr(deadlock, name, 0.0)
    store: Any = HashStore()
    detectors = [DeadlockDetector(rank) for rank in range(3)]

    def look(*waits: list[Wait]) -> list[Any]:
        found = [detector.find(store, own) for detector, own in zip(detectors, waits, strict=True)]
        assert found[1:] == [[], []], "only those who can give up have to"
        return found[0]

    return look


def test_ranks_that_wait_for_something_else(look: Callable[..., list[Any]]) -> None:
    for _ in range(2):
        assert look([ASKS], [SUMS], [SUMS]) == [], "as long as it was not seen twice"
    assert look([ASKS], [SUMS], [SUMS]) == [ASKS]


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(lambda _: ([ASKS], [ASKS_TOO], [ASKS_TOO]), id="same"),
        pytest.param(lambda count: ([ASKS], [SUMS], [replace(SUMS, since=float(count))]), id="one gets on"),
        pytest.param(lambda count: ([replace(ASKS, since=float(count))], [SUMS], [SUMS]), id="this rank gets on"),
        pytest.param(lambda _: ([ASKS], [SUMS], []), id="one does not wait"),
        pytest.param(lambda _: ([ASKS], [SUMS], [replace(SUMS, group="other")]), id="another group"),
    ],
)
def test_ranks_that_may_be_late(look: Callable[..., list[Any]], later: Callable[[int], Any]) -> None:
    for count in range(4):
        assert look(*later(count)) == []


def test_a_rank_whose_threads_stand_still(look: Callable[..., list[Any]]) -> None:
    """It may have left its wait, and could not say so."""
    look([ASKS], [SUMS], [SUMS])
    for _ in range(3):
        assert look([ASKS], [SUMS], []) == []
