"""Shares of the steps of a round: how many each rank makes, and what they count for in the mean.

Steps are agreed on at an exchange, for the round that follows: all ranks know the same times, and come to the same
numbers. They change where that makes a round faster by enough (bagua.engine.speed_shares). The fastest rank makes as
many as there are in a round of equal ranks, and no rank makes fewer than one.

A replica counts by the steps that it was trained for since the last exchange. What all ranks know already needs no
exchange: so batches of equal size are assumed here, and batch weights, which count samples, take precedence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.engine.speed_shares import LEAST_STEPS, are_known, is_worth, shares_of, steps_of
from bagua.engine.step_statistics import PassRecorder

# That a speed is of. A process with half a core runs at full speed until the scheduler's period ends: over too few
# steps it seems to be fast.
_MEASURED_ROUNDS = 8


class StepShares:
    """
    Args:
        given: "auto": by speed; or a positive number for each rank; None: all ranks make as many steps.
        ranks: that exchange.
        rank: this one.
        most: steps of the fastest rank in a round.
        delay: of these, after the exchange has begun.

    Attributes:
        steps: of this round, by rank.
        is_automatic: they follow the speeds.

    Raises:
        ValueError: `given` are not as many positive numbers as there are ranks.
    """

    def __init__(self, given: str | Sequence[float] | None, ranks: int, rank: int, most: int, delay: int) -> None:
        self._rank, self._most, self._delay = rank, most, delay
        self._given = None if given is None else shares_of(given, ranks)
        self.is_automatic = given == "auto"
        self.restart()

    def restart(self) -> None:
        """No round has begun."""
        self.steps = steps_of(self._most, self._given or [1.0])
        # By rank: in all rounds that are over, and by fragment, until its last exchange began.
        self._made = [0] * len(self.steps)
        self._made_then: dict[int, list[int]] = {}
        self._seconds = math.nan  # of a step of this rank, when the exchange began
        self._told: list[float] | None = None  # of all ranks, in the exchange of this round

    @property
    def own(self) -> int:
        """Steps of this rank in this round."""
        return self._most if self._given is None else self.steps[self._rank]

    @property
    def own_delay(self) -> int:
        """Of these, after the exchange has begun."""
        return self._delay_of(self.own)

    def _delay_of(self, steps: int) -> int:
        """As long as the fastest rank's."""
        return min(round(self._delay * steps / self._most), steps - 1)

    @property
    def told_steps(self) -> list[int]:
        """Of which all ranks must know the same."""
        return [] if self._given is None else self.steps

    def seconds(self) -> float:
        """Of a step of this rank, as it was when the exchange began."""
        return self._seconds

    def begin_exchange(self, fragment: int, recorder: PassRecorder) -> float | None:
        """
        Args:
            fragment: that is exchanged in this round.
            recorder: has the times of the steps.

        Returns:
            by what this rank multiplies its part of the mean; None: nothing.
        """
        if self._given is None:
            return None
        if self.is_automatic:
            known, seconds, _ = recorder.latest(_MEASURED_ROUNDS * self.own)
            self._seconds = seconds if known >= LEAST_STEPS else math.nan
        now = [made + steps - self._delay_of(steps) for made, steps in zip(self._made, self.steps, strict=True)]
        then = self._made_then.get(fragment, [0] * len(now))
        since = [one - other for one, other in zip(now, then, strict=True)]
        self._made_then[fragment] = now
        return since[self._rank] * len(since) / sum(since)

    def take(self, told: Sequence[float] | None) -> None:
        """The exchange is over.

        Args:
            told: seconds of a step, by rank; None: they were taken before, or are in the state that was loaded.
        """
        if self.is_automatic and told is not None:
            self._told = list(told)

    def end_round(self) -> None:
        """Steps are those of the next one."""
        if self._given is None:
            return
        self._made = [made + steps for made, steps in zip(self._made, self.steps, strict=True)]
        told, self._told = self._told, None
        if told is None or not are_known(told):
            return
        if is_worth(self.steps, [steps * one for steps, one in zip(self.steps, told, strict=True)]):
            self.steps = steps_of(self._most, [1 / one for one in told])

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._given is None:
            return {}
        return {"steps": self.steps, "made": self._made, "made_then": dict(self._made_then), "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of shares that were given, the state says nothing: they may be others now."""
        self.restart()
        if self._given is None or not state:
            return
        self._made, self._made_then = list(state["made"]), dict(state["made_then"])
        if self.is_automatic:
            self.steps = steps_of(self._most, state["steps"])
            self._told = state["told"]
