"""What can be tuned, and what one turn of a setting has shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

MIB = 1 << 20
SIZES = (1, 2, 5, 10, 25, 50, 100, 200)  # MiB


@dataclass(frozen=True)
class Setting:
    """One way to communicate.

    Attributes:
        algorithm: its label, such as "bytegrad" or "gradient_allreduce(hierarchical=True)".
        bucket_bytes: the size in bytes at which a bucket is closed. None: the device's default.
        first_bucket_bytes: of the first bucket. None: as the others.
    """

    algorithm: str
    bucket_bytes: int | None
    first_bucket_bytes: int | None

    def __str__(self) -> str:
        if self.bucket_bytes is None:
            return f"{self.algorithm}, default buckets"
        first = "" if self.first_bucket_bytes is None else f", the first of {self.first_bucket_bytes / MIB:g} MiB"
        return f"{self.algorithm}, buckets of {self.bucket_bytes / MIB:g} MiB{first}"

    def as_tuple(self) -> tuple[str, int | None, int | None]:
        return self.algorithm, self.bucket_bytes, self.first_bucket_bytes

    @classmethod
    def from_json(cls, value: Any) -> Setting:
        """What `as_tuple` gave.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(value, list | tuple) or len(value) != 3 or not isinstance(value[0], str):
            raise ValueError(f"{value!r:.200} is not a setting")
        if not value[0].isprintable():
            raise ValueError(f"{value[0]!r:.200} is not the name of an algorithm")
        for size in value[1:]:
            if size is not None and (type(size) is not int or not 1 <= size < 1 << 63):
                raise ValueError(f"{size!r:.40} is not a size in bytes")
        return cls(value[0], value[1], value[2])


def settings_for(nbytes: int, default: Setting, algorithms: Sequence[str] = ()) -> list[Setting]:
    """The default, and what else may be faster.

    Args:
        nbytes: of all tensors together.
        algorithms: labels of those that may be chosen, in addition to the default's.
    """
    sizes = [size * MIB for size in SIZES if size * MIB < nbytes]
    sizes.append(-(-nbytes // MIB) * MIB)  # one bucket
    found = [default]
    for algorithm in [default.algorithm, *(name for name in algorithms if name != default.algorithm)]:
        found.append(replace(default, algorithm=algorithm))
        for size in sizes:
            found.append(Setting(algorithm, size, None))
            if size > MIB:
                found.append(Setting(algorithm, size, MIB))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Bucket:
    """As measured.

    Attributes:
        nbytes: of its tensors, before compression.
        communication_s: of its operations.
        launched_s: how long before the end of the backward pass they were started.
    """

    nbytes: int
    communication_s: float
    launched_s: float


@dataclass(frozen=True)
class Turn:
    """A few steps with one setting. NaN: not known.

    Attributes:
        step_s: of a step.
        exposed_s: of that, how long it waited for communication after its gradients were done.
        buckets: in launch order.
    """

    step_s: float
    exposed_s: float = math.nan
    buckets: tuple[Bucket, ...] = ()

    @property
    def communication_s(self) -> float:
        return sum(bucket.communication_s for bucket in self.buckets) if self.buckets else math.nan


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
