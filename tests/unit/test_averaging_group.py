"""Groups whose owners are gone, until all ranks have lost them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bagua.comm_ops import averaging_group

RANKS = 2


class Abandoned:
    """As AveragingGroup, without connections."""

    def __init__(self, name: str, *, is_registered: bool = True) -> None:
        self.name = name
        self.is_registered = is_registered
        self.group = SimpleNamespace(ranks=RANKS)
        self.is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


class ReadAndAppended(list[Any]):
    """A finalizer appends to it as soon as it has been read to its end."""

    def __init__(self, groups: list[Any], late: Any) -> None:
        super().__init__(groups)
        self._late = [late]

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if self._late:
            self.append(self._late.pop())


def test_a_group_that_is_lost_while_others_are_looked_at_is_destroyed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, early, late = Abandoned("gone", is_registered=False), Abandoned("early"), Abandoned("late")
    abandoned = ReadAndAppended([gone, early], late)
    monkeypatch.setattr(averaging_group, "_abandoned", abandoned)
    monkeypatch.setattr(averaging_group, "all_gather_object", lambda names, _communicator: [names] * RANKS)
    group: Any = SimpleNamespace(ranks=RANKS, get_global_communicator=lambda: None)

    averaging_group._destroy_what_all_abandoned(group)
    assert abandoned == [late]
    assert early.is_destroyed
    assert not gone.is_destroyed
    assert not late.is_destroyed

    averaging_group._destroy_what_all_abandoned(group)
    assert abandoned == []
    assert late.is_destroyed
