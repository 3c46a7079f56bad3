"""How often each gradient is accumulated in a backward pass, where that is always the same (`static_graph=True`).

Without it, a gradient is complete when it is accumulated for the first time, and one that comes again is refused. A
reentrant checkpoint, and a module that is used in several of them, accumulate several times in a pass. So the first
pass counts, and sends everything at its end. In later passes a gradient is complete when it has come as often as then.

Owned by the steps of one engine; called on autograd's threads, for each parameter on the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from bagua.engine.unused_parameters import Presence


class StaticGraph:
    """Of one plan.

    Attributes:
        anywhere: what the ranks have agreed on in the first pass: for each parameter, the most that any rank has.
    """

    def __init__(self) -> None:
        self.anywhere: list[Presence] | None = None
        self._expected: Counter[int] | None = None
        self._counted: Counter[int] = Counter()

    def begin_pass(self) -> None:
        self._counted = Counter()

    @property
    def is_counting(self) -> bool:
        """Whether this is the first pass, in which nothing is known to be complete before its end."""
        return self._expected is None

    def count(self, key: int, name: str) -> bool:
        """A gradient was accumulated.

        Returns:
            whether it is complete now.

        Raises:
            RuntimeError: it has come more often than in the first pass.
        """
        self._counted[key] += 1
        if self._expected is None:
            return False
        if self._counted[key] > self._expected[key]:
            raise RuntimeError(_changed({name: (self._counted[key], self._expected[key])}))
        return self._counted[key] == self._expected[key]

    def end_pass(self, names: Mapping[int, str]) -> None:
        """All gradients have been accumulated.

        Raises:
            RuntimeError: some have come less often than in the first pass.
        """
        if self._expected is None:
            self._expected = self._counted
            return
        fewer = {
            name: (self._counted[key], self._expected[key])
            for key, name in names.items()
            if self._counted[key] < self._expected[key]
        }
        if fewer:
            raise RuntimeError(_changed(fewer))


def _changed(counts: Mapping[str, tuple[int, int]]) -> str:
    name, (now, before) = next(iter(counts.items()))
    others = f", and {len(counts) - 1} other parameters also changed" if counts.keys() - {name} else ""
    return (
        "Your training graph has changed in this iteration, although static_graph is True: the gradient of"
        f" {name!r} was accumulated {now} times in this backward pass and {before} times in the first{others}.\n"
        "Use static_graph=False, with find_unused_parameters=True if the loss does not depend on all parameters."
    )
