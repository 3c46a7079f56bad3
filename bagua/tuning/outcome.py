"""What a search has tried and found."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.tuning.setting import Setting


@dataclass(frozen=True)
class Tried:
    """Of one setting.

    Attributes:
        step_s, exposed_s, communication_s: medians over its turns; NaN: not known.
        ratio: of its steps to the default's in the same repetitions, median.
        turns: how many it had.
    """

    setting: Setting
    step_s: float
    exposed_s: float
    communication_s: float
    ratio: float
    turns: int


@dataclass(frozen=True)
class Remembered:
    """What an earlier run has chosen, and what the default's steps were then, in s."""

    setting: Setting
    default_step_s: float
    default_exposed_s: float


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        setting: that was chosen.
        speedup: of its steps, compared with the default's; 1 for the default.
        reason: why, in one line.
        tried: all settings that had turns, the default first.
        is_check: an earlier run's answer was confirmed, without a search.
    """

    setting: Setting
    speedup: float
    reason: str
    tried: tuple[Tried, ...] = ()
    is_check: bool = False
