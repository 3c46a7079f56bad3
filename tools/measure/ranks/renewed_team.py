"""The ranks of a run: started on first use, and restarted after a failure, because the remaining ones may be stuck in a
collective. For use by one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

from bagua.net.bench.api import BenchError, Event, Turns


class Team(Protocol):
    """See measure.ranks.team.RankTeam."""

    @property
    def facts(self) -> Mapping[str, Any]: ...
    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]: ...
    def close(self, *, failed: bool) -> None: ...


class RanksLostError(Exception):
    """Ranks cannot be started, so no further measurement is possible."""


class RenewedTeam:
    """A context manager, which closes the ranks.

    Args:
        start: Starts the ranks. Raises BenchError if they cannot be started.

    Attributes:
        starts: How often ranks were started. Each start repeats the initialization of the processes.
        facts: What the last started ranks reported about themselves.
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
        """The running ranks. Raises RanksLostError if they cannot be started."""
        if self._team is None:
            try:
                self._team = self._start()
            except BenchError as error:
                raise RanksLostError(str(error)) from error
            self.starts += 1
            self.facts = self._team.facts
        return self._team

    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]:
        """Returns one answer of each rank. If a rank fails, raises BenchError and closes all ranks."""
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
    """Closes the ranks at the end. If they cannot be started, raises BenchError, or adds an error to `turns` if these
    already have samples."""
    try:
        with ranks:
            yield
    except RanksLostError as error:
        if not any(turns.samples.values()):
            raise BenchError(str(error)) from error
        turns.errors.append(f"the ranks could not be started anew: {error}")
