"""Changes the size of a module's buckets while it is trained, until the fastest is found. Owned by its engine; runs on
the training thread, in front of forward passes. All ranks change at the same pass: what decides are rank 0's times,
which the others are told after each repetition.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING

import torch

from bagua.collectives.failure_report import failures_named
from bagua.collectives.object_collectives import broadcast_object
from bagua.engine.bucket_search import BucketSearch, Setting, settings_for

if TYPE_CHECKING:
    from bagua.engine.data_parallel import BaguaDistributedDataParallel

STEPS_PER_TURN = 2
WARMUP_STEPS = 5  # of training, before the first turn

_logger = logging.getLogger("bagua")


class BucketTuner:
    """
    Args:
        engine: whose buckets are tuned, from its next steps on.
    """

    def __init__(self, engine: BaguaDistributedDataParallel) -> None:
        self._engine = engine
        self._device = engine.bagua_buckets[0].device if engine.bagua_buckets else torch.device("cpu")
        nbytes = sum(bucket.bytes() for bucket in engine.bagua_buckets)
        self._default = Setting(engine.bucket_bytes, engine.first_bucket_bytes)
        self._search = BucketSearch(settings_for(nbytes, self._default))
        self._steps_left = WARMUP_STEPS
        self._turns: list[Setting] = []
        self._current: Setting | None = None
        self._times: list[float] = []
        self._seconds: dict[Setting, float] = {}
        self._last: float | None = None
        self._steps = 0

    @property
    def is_done(self) -> bool:
        return self._search.outcome is not None and self._current is None

    def before_step(self) -> bool:
        """To be called in front of each forward pass in training, on all ranks.

        Returns:
            whether the engine has other sizes now, and has to replan.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        self._steps += 1
        self._steps_left -= 1
        return self._steps_left <= 0 and self._next_turn()

    def _next_turn(self) -> bool:
        if self._current is not None:
            self._seconds[self._current] = statistics.median(self._times)
        if not self._turns:
            if self._seconds:
                self._end_repetition()
            self._turns = [] if self._search.outcome else self._search.next_repetition()
        outcome = self._search.outcome
        setting = self._turns.pop(0) if outcome is None else outcome.setting
        self._current = setting if outcome is None else None
        # The step in which buckets change is not counted.
        self._times, self._last, self._steps_left = [], None, STEPS_PER_TURN + 1
        return self._apply(setting)

    def _end_repetition(self) -> None:
        engine = self._engine
        seconds = list(self._seconds.values())
        with failures_named(engine.process_group, "tuning the size of buckets"):
            told = broadcast_object(seconds, 0, engine.communicator)
        self._search.end_repetition(dict(zip(self._seconds, told, strict=True)))
        self._seconds = {}
        outcome = self._search.outcome
        if outcome is not None and engine.communicator.rank() == 0:
            _logger.info(
                f"{engine.bagua_module_name}: {outcome.setting} chosen from {outcome.tried} settings in {self._steps}"
                f" steps; {outcome.speedup:.2f}x the speed of the default"
            )

    def _apply(self, setting: Setting) -> bool:
        engine = self._engine
        before = engine.bucket_bytes, engine.first_bucket_bytes
        engine.bucket_bytes, engine.first_bucket_bytes = setting.bucket_bytes, setting.first_bucket_bytes
        return before != (setting.bucket_bytes, setting.first_bucket_bytes)
