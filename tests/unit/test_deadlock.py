"""When ranks are proven to run different code, and when they may only be late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bagua.job.deadlock import (
    EVERYWHERE,
    LOG_LENGTH,
    MAIN_THREAD,
    SHORT_LOG,
    Answer,
    OperationOrder,
    Wait,
    circles,
    have_to_give_up,
    is_in,
    ranges_of,
)

COMMON = ("E sum", "E sum", "E sum")
ALL = ((0, 9),)
OF_NO_WAIT = Answer([], {}, True)


def says(
    *began: str,
    waits: bool = True,
    done: int | None = None,
    at: int = -1,
    thread: int = MAIN_THREAD,
    since: float = 1.0,
    ranks: Sequence[tuple[int, int]] = ALL,
) -> Answer:
    """Of a rank that began these operations, "order name", after `COMMON`, and waits for the last; or for the one `at`
    this place. It was through with the others, or with the first `done` of its order."""
    orders: dict[str, OperationOrder] = {}
    waited: list[tuple[OperationOrder, int, str]] = []
    for operation in (*COMMON, *began):
        name, _, what = operation.partition(" ")
        order = orders.setdefault(name, OperationOrder(name))
        order.done = order.begun
        waited.append((order, order.begin(what), what))
    order, position, what = waited[at if at < 0 else len(COMMON) + at]
    order.done = position - 1 if done is None else done
    wait = Wait(thread, since, what, order.name, position, what == "ask", tuple(ranks))
    logs = {name: one.log(thread, LOG_LENGTH if waits and one is order else SHORT_LOG) for name, one in orders.items()}
    return Answer([wait] if waits else [], logs, waits)


def together(*answers: Answer) -> Answer:
    """Of a rank with several threads."""
    return Answer(
        [wait for answer in answers for wait in answer.waits],
        {name: log for answer in answers for name, log in answer.logs.items()},
        any(answer.is_waiting for answer in answers),
    )


def found(*answers: Answer) -> list[list[int]]:
    return sorted(sorted(thread.rank for thread in circle) for circle in circles(dict(enumerate(answers))))


@pytest.mark.parametrize(
    ("answers", "gives_up"),
    [
        pytest.param([says("E ask"), says("E sum"), says("E sum")], {0}, id="one asks"),
        pytest.param([says("E ask"), says("E ask"), says("E sum")], {0, 1}, id="two ask"),
        pytest.param([says("E ask", "E sum", at=0, done=3), says("E sum")], {0}, id="asked for in the background"),
        pytest.param([says("E ask"), says("E broadcast", "E sum", done=3)], {0}, id="the other waits for its second"),
        # Nothing is wrong, however long it takes.
        pytest.param([says("E ask"), says("E ask"), says("E ask")], set(), id="all ask"),
        pytest.param([says("E ask"), says(done=2)], set(), id="one is behind: its transfer is slow"),
        pytest.param([says("E ask"), says("E ask", "E sum")], set(), id="one is ahead: it has its answers"),
        pytest.param([says("E ask")], set(), id="the others are in no operation, or in messages"),
        pytest.param([says("E sum"), says("E broadcast")], set(), id="transfers are never given up"),
        pytest.param([says("E ask", "E sum", "E ask"), says("E sum", "E ask", "E sum")], set(), id="both got on since"),
        pytest.param(
            [says(*["E sum"] * LOG_LENGTH, "E ask"), says()], set(), id="what they began together is not known any more"
        ),
        pytest.param([says("E ask"), says("E sum", "F save")], set(), id="the other waits in another group"),
    ],
)
def test_who_has_to_give_up(answers: list[Answer], gives_up: set[int]) -> None:
    assert {rank for rank, _ in have_to_give_up(dict(enumerate(answers)))} == gives_up


GRADIENTS, SAVE, BARRIER = "E sum", f"{EVERYWHERE}2 making", "C barrier"
STEP = ("E sum", "C barrier", "E sum")


@pytest.mark.parametrize(
    ("answers", "in_circles"),
    [
        pytest.param([says(*STEP, SAVE), says(*STEP, GRADIENTS)], [[0, 1]], id="a checkpoint on one rank"),
        pytest.param([says(*STEP, BARRIER), says(*STEP, GRADIENTS)], [[0, 1]], id="a barrier on one rank"),
        pytest.param([says(*STEP, "C barrier"), says(*STEP, "C reduce")], [[0, 1]], id="two collectives of a group"),
        pytest.param([says("C barrier", "E ask"), says("C barrier", "E sum")], [[0, 1]], id="two operations"),
        pytest.param([says(*STEP, SAVE), *[says(*STEP, GRADIENTS)] * 3], [[0, 1, 2, 3]], id="one and three others"),
        pytest.param(
            [says("F a", "G b", "F a"), says("G b", "H c", "G b"), says("H c", "F a", "H c")],
            [[0, 1, 2]],
            id="each waits for the next one",
        ),
        pytest.param(
            [
                *(says("A x", "B y", "A x", ranks=((0, 1),)), says("A x", "B y", "B y", ranks=((0, 1),))),
                *(says("A x", "B y", "A x", ranks=((2, 3),)), says("A x", "B y", "B y", ranks=((2, 3),))),
            ],
            [[0, 1], [2, 3]],
            id="two pairs",
        ),
        pytest.param(
            [says("C/global of 5", "C/global barrier"), says("C/global of 10"), says("C/global of 10")],
            [[0, 1, 2]],
            id="another size: one got enough bytes, and is through with it",
        ),
        # Nothing is known to be wrong.
        pytest.param([says(*STEP), says(*STEP)], [], id="the same"),
        pytest.param([says(*STEP, SAVE), OF_NO_WAIT], [], id="one says nothing"),
        pytest.param([says(*STEP, SAVE), says(*STEP, waits=False)], [], id="one is in no wait: it compiles"),
        pytest.param([says(*STEP, SAVE), says(*STEP, SAVE, GRADIENTS)], [], id="one is ahead: the end is slow"),
        pytest.param(
            [says("A x", ranks=((0, 0), (2, 2))), says("B y", ranks=((1, 2),))],
            [],
            id="two wait in different groups for a third one",
        ),
        pytest.param(
            [
                says("A x", "A x", ranks=((0, 0), (2, 2))),
                says("B y", "B y", ranks=((1, 2),)),
                says("A x", "B y", "E sum", "E sum", ranks=((2, 3),)),
            ],
            [],
            id="the third one waits for a fourth one",
        ),
        pytest.param(
            [says("X a", "X b"), together(says("X a", thread=1, waits=False), says(GRADIENTS))],
            [],
            id="another thread is to begin it, and does not wait",
        ),
        pytest.param(
            [says("E/engine buffers", "E/engine sum"), says("E/engine sum")],
            [],
            id="of what the engine does, something was done alone",
        ),
        pytest.param(
            [says("C/global of 5", waits=False), says("C/global of 10")],
            [],
            id="another size: one is through with it, and computes",
        ),
        pytest.param([says("C barrier"), says("F y")], [], id="a group that the other may have had"),
        pytest.param(
            [says(*["C a"] * LOG_LENGTH, "C b"), says("C b", GRADIENTS)],
            [],
            id="numbers differ, by what is not known any more",
        ),
        pytest.param(
            [says(*["C a"] * LOG_LENGTH, "C b", done=0), says(*["C c"] * LOG_LENGTH, "C d", done=0)],
            [],
            id="where they began to differ is not known any more",
        ),
    ],
)
def test_who_waits_in_a_circle(answers: list[Answer], in_circles: list[list[int]]) -> None:
    assert found(*answers) == in_circles


def test_ranks_as_ranges() -> None:
    assert ranges_of([3, 0, 1, 5, 2]) == ((0, 3), (5, 5))
    assert [rank for rank in range(8) if is_in(rank, ((0, 3), (5, 5)))] == [0, 1, 2, 3, 5]
