"""The ranks of a run: started when they are first needed, and anew after a failure, because those that are left may be
stuck in a collective. One thread uses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress


class Team(Protocol):
    """See rank_team.team.RankTeam."""

    @property
    def facts(self) -> Mapping[str, Any]: ...
    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]: ...
    def close(self, *, failed: bool) -> None: ...


class RenewedTeam:
    """
    Args:
        start: raises BenchError when the ranks cannot be started.
        started: told the facts of each team.
        errors: failures are added here, and shown by `progress`.

    Attributes:
        failed: what was being tried, as its caller names it, when a team failed.
    """

    def __init__(
        self,
        start: Callable[[], Team],
        started: Callable[[Mapping[str, Any]], None],
        errors: list[str],
        progress: Progress,
    ) -> None:
        self._start = start
        self._started = started
        self._errors = errors
        self._progress = progress
        self._team: Team | None = None
        self.failed: set[tuple[str, str]] = set()

    def drive(self, work: Callable[[], None], results: Collection[object]) -> None:
        """Runs `work`, which asks, and closes the ranks. Raises BenchError when they could not be started and there are
        no results; if there are some, it is one of the errors."""
        try:
            work()
        except BenchError as error:
            if not results:
                raise
            self._errors.append(f"the ranks could not be started anew: {error}")
        except BaseException:
            self._close(failed=True)
            raise
        self._close(failed=False)

    def ready(self) -> Team:
        if self._team is None:
            self._team = self._start()
            self._started(self._team.facts)
        return self._team

    def ask(
        self, tried: tuple[str, str], label: str, operation: str, timeout_s: float, **fields: object
    ) -> list[Event] | None:
        """One answer of each rank. None when it failed, which is then reported."""
        team = self.ready()
        try:
            return team.ask(operation, timeout_s, **fields)
        except BenchError as error:
            self._errors.append(f"{label}: {error}")
            self._progress.message(f"FAILED: {label}: {error}")
            self.failed.add(tried)
            self._close(failed=True)
            return None

    def _close(self, *, failed: bool) -> None:
        if self._team is not None:
            self._team.close(failed=failed)
            self._team = None
