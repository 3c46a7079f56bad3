"""What the autotune service knows of one model, and the search for its bucket size. Called by one thread at a time."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from bagua.legacy.autotune_messages import BaguaHyperparameter, TensorDeclaration
from bagua.tuning.search import Search
from bagua.tuning.setting import Setting, Turn, settings_for

_logger = logging.getLogger("bagua")
_ALGORITHM = "the client's"


class AutotuneTaskManager:
    """
    Args:
        task_name: the model.
        tensors: in the order in which they become ready.
        world_size: ranks that ask.
        default_bucket_size: in bytes.
        is_tuned: whether the bucket size is searched for.
        max_samples: bucket sizes that are measured, those measured again with them.
        sampling_confidence_time_s: how long each is measured.
        warmup_time_s: before the first.
        is_output_autotune_log: log each sample.
        clock: in seconds.
    """

    def __init__(
        self,
        task_name: str,
        tensors: Sequence[TensorDeclaration],
        world_size: int,
        default_bucket_size: int,
        is_tuned: bool,
        max_samples: int = 60,
        sampling_confidence_time_s: float = 5.0,
        warmup_time_s: float = 30.0,
        is_output_autotune_log: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._clock = task_name, clock
        self.tensors = list(tensors)
        self._world_size, self._max_samples = world_size, max_samples
        self._confidence_s, self._warmup_s = sampling_confidence_time_s, warmup_time_s
        self._logs = is_output_autotune_log
        default = Setting(_ALGORITHM, default_bucket_size, None)
        nbytes = sum(tensor.bytes() for tensor in self.tensors)
        settings = [one for one in settings_for(nbytes, default) if one.first_bucket_bytes is None]
        self._search = Search(settings if is_tuned else [default])
        self._turns = list(self._search.turns)
        self._setting = self._turns.pop(0) if self._turns else default
        self._shown: dict[Setting, Turn] = {}
        self._speeds: dict[int, float] = {}  # by iteration, of the present setting
        self._asked_at = dict.fromkeys(range(world_size), -1)
        self._samples = 0
        self._began = self._sample_began = clock()
        self._is_over = self._search.outcome is not None

    @property
    def is_autotune_completed(self) -> bool:
        return self._is_over

    def recommended_hyperparameters(self) -> BaguaHyperparameter:
        """What the client should use now."""
        size = self._setting.bucket_bytes or 0
        return BaguaHyperparameter(split_by_bucket_size(self.tensors, size), size, is_hierarchical_reduce=False)

    def report_metrics(self, train_iter: int, speed: float, hyperparameters: Mapping[str, object]) -> None:
        """The first of an iteration counts, and none of another bucket size than the present one."""
        if hyperparameters.get("bucket_size") == self._setting.bucket_bytes and speed > 0:
            self._speeds.setdefault(train_iter, speed)

    def ask_hyperparameters(self, rank: int, train_iter: int) -> BaguaHyperparameter:
        """Of one rank. A sample ends with the first question of an iteration, if all ranks last asked in the same one:
        so all get the same answer in an iteration."""
        all_asked = len(set(self._asked_at.values())) == 1
        is_first = train_iter > self._asked_at[rank]
        self._asked_at[rank] = train_iter
        now = self._clock()
        is_warm = now - self._began >= self._warmup_s
        is_measured = bool(self._speeds) and now - self._sample_began >= self._confidence_s
        if all_asked and is_first and is_warm and is_measured and not self._is_over:
            self._end_sample()
        return self.recommended_hyperparameters()

    def reorder(self, names: Sequence[str]) -> None:
        """Tensors become ready in this order; those that are not named come last, as they were."""
        place = {name: number for number, name in enumerate(names)}
        self.tensors.sort(key=lambda tensor: place.get(tensor.name, len(place)))

    def _end_sample(self) -> None:
        speed = statistics.median(self._speeds.values())
        self._samples += 1
        if self._logs:
            _logger.info(f"autotune of {self._name}, sample {self._samples}: {self._setting}: speed {speed:g}")
        self._shown[self._setting] = Turn(1 / speed)
        if not self._turns:
            self._search.end_repetition(self._shown)
            self._shown, self._turns = {}, list(self._search.turns)
        if self._search.outcome is not None:
            self._setting, self._is_over = self._search.outcome.setting, True
        elif self._samples >= self._max_samples:
            self._setting, self._is_over = self._search.best_so_far(), True
        else:
            self._setting = self._turns.pop(0)
        self._speeds.clear()
        self._sample_began = self._clock()


def split_by_bucket_size(tensors: Sequence[TensorDeclaration], bucket_size: int) -> list[list[TensorDeclaration]]:
    """Buckets of one dtype each, in the order of their last tensors; one ends with the tensor that makes it reach
    `bucket_size` bytes."""
    place = {id(tensor): number for number, tensor in enumerate(tensors)}
    open_buckets: dict[str, list[TensorDeclaration]] = {}
    done: list[list[TensorDeclaration]] = []
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(one.bytes() for one in bucket) >= bucket_size:
            done.append(open_buckets.pop(tensor.dtype))
    done.extend(open_buckets.values())
    return sorted(done, key=lambda bucket: place[id(bucket[-1])])
