"""What collectives raise where the job goes on without a rank that it lost (bagua.regroup)."""

from __future__ import annotations


class Regrouped(RuntimeError):  # noqa: N818 - an event that a loop goes on after
    """
    A collective was ended because the job has lost a rank, and goes on with the others: its result is of no use, and
    the next one is between those that are left. Raised by collectives that a program calls itself, on all ranks that
    are left, once they have regrouped; see docs/how-to/train/regroup.md for what a loop does with it.

    Attributes:
        epoch: the number of the new epoch; the first of a job is 0.
        lost_ranks: those that are gone, as they were numbered before.
    """

    def __init__(self, message: str, epoch: int = -1, lost_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.lost_ranks = lost_ranks
