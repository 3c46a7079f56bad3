"""When ranks are proven to be deadlocked, and when they may only be late."""

from __future__ import annotations

import pytest

from bagua.job.deadlock import LOG_LENGTH, OperationOrder, Post, deadlocked

COMMON = ("sum", "sum", "sum")


def waits(*began: str, since: float = 1.0, done: int = len(COMMON), in_operation: int | None = None) -> Post:
    """Of a rank that began these after `COMMON`, and waits for the last; or for the one at `in_operation` of them."""
    order = OperationOrder()
    positions = [order.begin(what) for what in (*COMMON, *began)]
    order.end(done)
    position = positions[-1] if in_operation is None else positions[len(COMMON) + in_operation]
    what = (*COMMON, *began)[position - 1]
    return order.post(since, what, what == "ask", position)


@pytest.mark.parametrize(
    ("posts", "found"),
    [
        pytest.param([waits("ask"), waits("sum"), waits("sum")], {0}, id="one asks"),
        pytest.param([waits("ask"), waits("ask"), waits("sum")], {0, 1}, id="two ask"),
        pytest.param([waits("ask"), waits("sum")], {0}, id="one has come to no operation"),
        pytest.param([waits("ask", "sum", in_operation=0), waits("sum")], {0}, id="asked for in the background"),
        pytest.param([waits("ask"), waits("broadcast", "sum")], {0}, id="the other waits for its second"),
        # Nothing is wrong, however long it takes.
        pytest.param([waits("ask"), waits("ask"), waits("ask")], set(), id="all ask"),
        pytest.param([waits("ask"), waits(done=2)], set(), id="one is behind: its transfer is slow"),
        pytest.param([waits("ask"), waits("ask", "sum", done=4)], set(), id="one is ahead: it has its answers"),
        pytest.param([waits("ask")], set(), id="the others are in no operation, or in messages"),
        pytest.param([waits("sum"), waits("broadcast")], set(), id="transfers are never given up"),
        pytest.param(
            [waits("ask", "sum", "ask", done=5), waits("sum", "ask", "sum", done=5)], set(), id="both got on since"
        ),
        pytest.param(
            [waits(*["sum"] * LOG_LENGTH, "ask"), waits()], set(), id="what they began together is not known any more"
        ),
    ],
)
def test_who_has_to_give_up(posts: list[Post], found: set[int]) -> None:
    assert set(deadlocked(dict(enumerate(posts)))) == found
