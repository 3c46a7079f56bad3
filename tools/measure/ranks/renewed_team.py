"""The ranks of a run: started when they are first needed, and anew after a failure, because those that are left may be
stuck in a collective. One thread uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchError
from bagua.net.bench.turns import Turns


class Team(Protocol):
    """See measure.ranks.team.RankTeam."""

    @property
    def facts(self) -> Mapping[str, Any]: ...
    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]: ...
    def close(self, *, failed: bool) -> None: ...


class RanksLostError(Exception):
    """No ranks can be started, so that nothing more can be measured."""


class RenewedTeam:
    """Use it in a `with` statement, which closes the ranks.

    Args:
        start: raises BenchError when the ranks cannot be started.

    Attributes:
        starts: how often ranks were started: what processes do once is done anew by the next ones.
        facts: what the last ones said of themselves.
    """

    def __init__(self, start: Callable[[], Team]) -> None:
        self._start = start
        self._team: Team | None = None
        self.starts = 0
        self.facts: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    def ready(self) -> Team:
        """Raises RanksLostError when they cannot be started."""
        if self._team is None:
            try:
                self._team = self._start()
            except BenchError as error:
                raise RanksLostError(str(error)) from error
            self.starts += 1
            self.facts = self._team.facts
        return self._team

    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]:
        """One answer of each rank. Raises BenchError when one failed, and then has no ranks until it is asked again."""
        team = self.ready()
        try:
            return team.ask(operation, timeout_s, **fields)
        except BenchError:
            self._close(failed=True)
            raise

    def _close(self, *, failed: bool) -> None:
        if self._team is not None:
            team, self._team = self._team, None
            team.close(failed=failed)


@contextmanager
def keeping(turns: Turns[Any], ranks: RenewedTeam) -> Iterator[None]:
    """Closes the ranks at the end. Raises BenchError when they could not be started and nothing was measured; if
    something was, that is one of the errors."""
    try:
        with ranks:
            yield
    except RanksLostError as error:
        if not any(turns.samples.values()):
            raise BenchError(str(error)) from error
        turns.errors.append(f"the ranks could not be started anew: {error}")
