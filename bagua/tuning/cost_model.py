"""How long a step with a setting would take, estimated from turns of a few other settings.

The time of a bucket's operations is latency + bytes / bandwidth, fitted for each algorithm to the buckets that were
measured. Buckets are started in order, each when its gradients are there, which launch times of small buckets show.
What is not over when the backward pass ends is exposed; everything else of a step stays as it was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.tuning.setting import Bucket, Setting, Turn


@dataclass(frozen=True)
class Link:
    """
    Attributes:
        latency_s: of a bucket, whatever its size.
        s_per_byte: of a bucket's tensors, before compression.
    """

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + self.s_per_byte * nbytes


def fit_link(buckets: Sequence[Bucket]) -> Link | None:
    """Least squares of relative errors, neither part below 0; None without buckets."""
    known = [one for one in buckets if one.nbytes > 0 and one.communication_s > 0]
    if not known:
        return None
    # Minimize sum of ((latency + rate * n) / t - 1)^2: with u = 1/t, v = n/t that is linear.
    suu = suv = svv = su = sv = 0.0
    for one in known:
        u, v = 1 / one.communication_s, one.nbytes / one.communication_s
        suu, suv, svv, su, sv = suu + u * u, suv + u * v, svv + v * v, su + u, sv + v
    determinant = suu * svv - suv * suv
    if determinant > 1e-9 * suu * svv:
        latency, rate = (su * svv - sv * suv) / determinant, (sv * suu - su * suv) / determinant
        if latency >= 0 and rate >= 0:
            return Link(latency, rate)
        if latency > 0:
            return Link(su / suu, 0.0)
    return Link(0.0, sv / svv)


def bucket_sizes(tensor_bytes: Sequence[int], limit: int, first: int | None) -> list[int]:
    """Sizes in bytes of the buckets of tensors of one dtype, as bagua.engine.bucket_plan cuts them."""
    sizes: list[int] = []
    now = 0
    for nbytes in tensor_bytes:
        now += nbytes
        if now >= (first if first is not None and not sizes else limit):
            sizes.append(now)
            now = 0
    return [*sizes, now] if now else sizes


class CostModel:
    """
    Args:
        tensor_bytes: sizes of what is communicated, in the order in which it becomes ready.
        default_bytes: what a `bucket_bytes` of None stands for.
        starts_small: whether the first bucket is a small one also where everything fits into one (not on CPUs).
    """

    def __init__(
        self,
        tensor_bytes: Sequence[int],
        default_bytes: int,
        starts_small: bool,
        turns: Mapping[Setting, Sequence[Turn]],
    ) -> None:
        self._tensor_bytes = tensor_bytes
        self._default_bytes = default_bytes
        self._starts_small = starts_small
        self._links: dict[str, Link] = {}
        self._compute_s: dict[str, float] = {}
        self._ready: dict[str, list[tuple[int, float]]] = {}
        for algorithm in {setting.algorithm for setting in turns}:
            mine = [turn for setting, them in turns.items() if setting.algorithm == algorithm for turn in them]
            link = fit_link([bucket for turn in mine for bucket in turn.buckets])
            compute = [turn.step_s - turn.exposed_s for turn in mine if not math.isnan(turn.exposed_s)]
            if link is None or not compute:
                continue
            self._links[algorithm] = link
            self._compute_s[algorithm] = max(0.0, statistics.median(compute))
            self._ready[algorithm] = _ready_times(max(mine, key=lambda turn: len(turn.buckets)).buckets)

    def link(self, algorithm: str) -> Link | None:
        """Of an algorithm that was measured."""
        return self._links.get(algorithm)

    def step_s(self, setting: Setting, link: Link | None = None) -> float:
        """Seconds of a step; NaN where nothing of the algorithm was measured.

        Args:
            link: instead of the one that was measured.
        """
        link = self._links.get(setting.algorithm) and (link or self._links[setting.algorithm])
        if link is None:
            return math.nan
        end, launched = -math.inf, 0
        for nbytes in self._sizes(setting):
            launched += nbytes
            end = max(end, self._ready_s(setting.algorithm, launched)) + link.seconds(nbytes)
        return self._compute_s[setting.algorithm] + max(0.0, end)

    def _sizes(self, setting: Setting) -> list[int]:
        limit = self._default_bytes if setting.bucket_bytes is None else setting.bucket_bytes
        first = setting.first_bucket_bytes
        if not self._starts_small and sum(self._tensor_bytes) <= limit:
            first = None
        return bucket_sizes(self._tensor_bytes, limit, first)

    def _ready_s(self, algorithm: str, nbytes: int) -> float:
        """When so many bytes are ready, as seconds after the end of the backward pass (so below 0)."""
        points = self._ready[algorithm]
        before = (0, points[0][1])
        for point in points:
            if nbytes <= point[0]:
                share = (nbytes - before[0]) / max(1, point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return 0.0


def _ready_times(buckets: Sequence[Bucket]) -> list[tuple[int, float]]:
    points, nbytes = [], 0
    for bucket in buckets:
        nbytes += bucket.nbytes
        points.append((nbytes, min(0.0, -bucket.launched_s)))
    return points
