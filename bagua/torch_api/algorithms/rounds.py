"""What algorithms that exchange weights have in common: rounds, and a bucket that is exchanged as a whole.

A round is a forward pass outside of no_sync and the backward pass that follows. Rounds, not steps of the optimizer, are
what is counted, because every rank makes as many of them: a GradScaler may skip a step on one rank and not on another.
"""

from __future__ import annotations


def check_interval(communication_interval: int) -> None:
    """
    Raises:
        ValueError: below 1, or no whole number.
    """
    if communication_interval < 1 or communication_interval % 1 != 0:
        raise ValueError(
            f"communication_interval={communication_interval}: must be at least 1, and whole; 1 is every round"
        )


class Interval:
    """Which rounds exchange: the first, and every `interval`-th after it.

    Args:
        interval: at least 1.

    Attributes:
        rounds: counted so far.
    """

    def __init__(self, interval: int) -> None:
        check_interval(interval)
        self.interval = interval
        self.rounds = 0

    def count(self) -> bool:
        """Count a round. Whether it exchanges."""
        self.rounds += 1
        return (self.rounds - 1) % self.interval == 0
