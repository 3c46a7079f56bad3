"""Whether two networks led to the same training: losses compared step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_comparison.training_run import Training

# Two ranks add two numbers in either order to the same sum; more ranks add in the order of NCCL's rings, which differs
# with the number of channels, and bf16 training carries the last bit's difference on.
EXACT_RANKS = 2
DEFAULT_TOLERANCE = 0.02


def relative_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest over all steps, relative to the first loss: late losses are near zero, and so is their meaning."""
    if len(left) != len(right):
        raise ValueError(f"{len(left)} losses cannot be compared with {len(right)}")
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # A loss that is not a number compares as false with everything, and so would pass any limit.
    if not all(math.isfinite(gap) for gap in gaps):
        return math.inf
    return max(gaps) / max(abs(left[0]), 1e-12)


@dataclass(frozen=True)
class LossVerdict:
    own_spread: float  # between rounds of NCCL's default: what this machine's arithmetic does by itself
    differences: dict[str, float]  # by backend, the largest over its rounds against NCCL's default
    allowed: float

    @property
    def failures(self) -> list[str]:
        return [
            f"losses of {name} differ from NCCL's default by {difference:.3g} (relative to the first loss); allowed"
            f" {self.allowed:.3g}, rounds of NCCL's default differ by {self.own_spread:.3g}"
            for name, difference in self.differences.items()
            if difference > self.allowed
        ]


def judge_losses(trainings: Sequence[Training], baseline: str, tolerance: float) -> LossVerdict:
    reference = [training for training in trainings if training.backend == baseline]
    if not reference:
        raise ValueError(f"no run of {baseline} ended well, so there is nothing to compare losses with")
    own = max((relative_difference(reference[0].losses, other.losses) for other in reference[1:]), default=0.0)
    differences: dict[str, float] = {}
    for training in trainings:
        if training.backend != baseline:
            found = relative_difference(reference[0].losses, training.losses)
            differences[training.backend] = max(found, differences.get(training.backend, 0.0))
    # Where even the default's losses are no numbers nothing can be compared, and nothing may pass.
    return LossVerdict(own, differences, max(tolerance, own) if math.isfinite(own) else tolerance)
