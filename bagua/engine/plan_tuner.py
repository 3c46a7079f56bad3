"""Says how a module should communicate while it is trained, until the fastest setting is found. Owned by the module's
TrainingSteps; runs at the end of backward passes or, where a replan has to wait for the optimizer, in front of forward
passes.

Rank 0 searches, from its own times, and tells the others after each repetition what has turns next. All ranks change at
the same pass, each time by a replan that they agree on.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec, get_codec
from bagua.collectives.object_collectives import broadcast_object
from bagua.engine.bucket import Bucket
from bagua.engine.bucket_plan import DEFAULT_BUCKET_BYTES, DEFAULT_BUCKET_BYTES_ON_CPU, plan_buckets
from bagua.engine.setup import Setup
from bagua.engine.step_statistics import PassRecorder
from bagua.engine.training_plan import TrainingPlan
from bagua.env import read_text
from bagua.job.failure_report import CollectiveError, failures_named
from bagua.tuning import memory
from bagua.tuning.advice import PROPOSALS, advice
from bagua.tuning.memory import Fingerprint
from bagua.tuning.search import ModelLayout, Search
from bagua.tuning.setting import Bucket as TimedBucket
from bagua.tuning.setting import Outcome, Setting, Turn, settings_for

# On a GPU, with fewer elements launches would take the time.
_ELEMENTS = 1 << 20
# On CPUs, chunks whose operations torch runs on one thread, as those of less than 32768 elements: where the cores are
# busy, several threads wait for each other a hundred times as long as they work, in each of some hundred operations. A
# few chunks cost as much for each byte as many.
_CHUNK_ON_CPU = 1 << 14
_MOST_CHUNKS_ON_CPU = 4
_REPETITIONS = 3


def compressed_share(codec: str) -> float:
    """Of the bytes of float32 gradients that the codec sends."""
    return get_codec(codec).compressed_bytes(_ELEMENTS) / (4 * _ELEMENTS)


def compression_s_per_byte(
    codec: str | Codec, device: torch.device, ranks: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds per byte of float32 gradients, of one exchange among so many ranks: all is compressed, what comes for
    this rank's part is summed and compressed again, and all is decompressed. The fastest of a few repetitions. On CPUs
    this is of one thread, and the work does not grow with the ranks.

    Args:
        ranks: their number; one counts as two.
    """
    if device.type == "cpu":
        count, chunk = max(2, min(ranks, _MOST_CHUNKS_ON_CPU)), _CHUNK_ON_CPU
    else:
        count = max(2, ranks)
        chunk = max(1, _ELEMENTS // count)
    values = torch.ones(chunk * count, dtype=torch.float32, device=device)
    result = torch.empty_like(values)
    made = get_codec(codec)

    def exchange() -> None:
        sent = made.compress(values, count)
        made.decompress_reduce_compress(sent, chunk, average=True)
        made.decompress(sent, result)

    def seconds() -> float:
        begin = clock()
        exchange()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - begin

    seconds()  # allocations, and kernels that are compiled
    return min(seconds() for _ in range(_REPETITIONS)) / values.nbytes


def fingerprint_of(
    setup: Setup,
    parameters: Sequence[tuple[str, Tensor]],
    algorithms: Sequence[str],
    default: Setting,
    device: torch.device,
) -> Fingerprint:
    """
    Args:
        parameters: (name, parameter) that are synchronized.
        algorithms: labels of those that may be used.
    """
    group = setup.group
    try:
        nodes = len(group.topology.nodes)
    except (RuntimeError, ValueError):  # the launcher's variables contradict each other
        nodes = 0
    tensors = [(name, tuple(one.shape), str(one.dtype)) for name, one in parameters]
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()[:12]
    backend = "none" if group.torch_group is None else str(dist.get_backend(group.torch_group))
    return Fingerprint(
        model=f"{type(setup.module).__name__} {digest}",
        world=f"{group.size} ranks on {nodes} node{'s' * (nodes != 1)}",
        hardware=_hardware(device),
        network=f"{backend}, {'one node' if nodes == 1 else _network()}",
        space=f"{', '.join(sorted(algorithms))}; default: {default}",
    )


def _hardware(device: torch.device) -> str:
    cpus = f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}"
    return f"{torch.cuda.get_device_name(device)}, {cpus}" if device.type == "cuda" else f"cpu, {cpus}"


def _network() -> str:
    """The interface that gloo or NCCL is told to use, or else that of the default route, and its speed."""
    named = read_text(os.environ, "GLOO_SOCKET_IFNAME") or read_text(os.environ, "NCCL_SOCKET_IFNAME")
    interface = named.split(",")[0].lstrip("=^") if named else _default_interface()
    try:
        speed = Path("/sys/class/net", interface, "speed").read_text().strip()
    except (OSError, ValueError):
        speed = "unknown"
    return f"{interface[:32]} at {speed} Mb/s"


def _default_interface() -> str:
    try:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return "unknown"
    fields = [line.split() for line in lines]
    return next((one[0] for one in fields if len(one) > 1 and one[1] == "00000000"), "unknown")


STEPS_PER_TURN = 2
WARMUP_STEPS = 5  # of training, before the first turn

_logger = logging.getLogger("bagua")

# What rank 0 tells the others: turns, or else the choice and what is kept in memory.
_Orders = tuple[list[Setting], Setting | None, memory.Answer | None]


def distinct_settings(buckets: Sequence[Bucket], default: Setting, algorithms: Sequence[str]) -> list[Setting]:
    """Those of `settings_for` that lead to different buckets, the default first.

    Args:
        buckets: whose tensors are communicated.
        default: the setting that the others are compared with.
        algorithms: labels of those that may be used.
    """
    tensors = [tensor for bucket in buckets for tensor in bucket.tensors]
    by_plan: dict[Hashable, Setting] = {}
    for one in settings_for(sum(bucket.bytes() for bucket in buckets), default, algorithms):
        groups = plan_buckets(tensors, one.bucket_bytes, one.first_bucket_bytes)
        by_plan.setdefault((one.algorithm, tuple(map(tuple, groups))), one)
    return list(by_plan.values())


class PlanTuner:
    """
    Args:
        setup: the default, which other settings are compared with.
        plan: of the setup; in use.
        algorithms: that may be used, by label: the present one first.
        allows_others: some of them have other results.
    """

    def __init__(
        self,
        setup: Setup,
        plan: TrainingPlan,
        recorder: PassRecorder,
        algorithms: Mapping[str, Any],
        allows_others: bool = False,
    ) -> None:
        self._setup = setup
        self._recorder = recorder
        self._allows_others = allows_others
        self._algorithms = algorithms
        self._device = plan.buckets[0].device if plan.buckets else torch.device("cpu")
        self._dtypes = {bucket.dtype for bucket in plan.buckets}
        self._default = Setting(next(iter(algorithms)), setup.bucket_bytes, setup.first_bucket_bytes)
        self._remembered: memory.Answer | None = None
        self._search = self._start_search(plan) if setup.communicator.rank() == 0 else None
        self._steps_left = WARMUP_STEPS
        self._turns: list[Setting] = []
        self._current: Setting | None = None
        self._seconds: list[float] = []
        self._shown: dict[Setting, Turn] = {}
        self._last: float | None = None
        self._steps = 0
        self.is_done = False
        recorder.samples_all = True

    def _start_search(self, plan: TrainingPlan) -> Search:
        # In launch order, whatever the buckets of now are.
        sizes = [view.nbytes for bucket in plan.buckets for view in bucket.views]
        settings = distinct_settings(plan.buckets, self._default, list(self._algorithms))
        on_cpu = self._device.type == "cpu"
        layout = ModelLayout(sizes, DEFAULT_BUCKET_BYTES_ON_CPU if on_cpu else DEFAULT_BUCKET_BYTES, not on_cpu)
        self._fingerprint = fingerprint_of(
            self._setup, plan.parameters, list(self._algorithms), self._default, self._device
        )
        found = memory.look_up(self._fingerprint)
        if found is not None and found.setting.algorithm in self._algorithms:
            self._remembered = found
            _logger.info(f"{self._setup.name}: checking what an earlier run found: {found}")
        return Search(settings, layout, None if self._remembered is None else self._remembered.to_check())

    # --- steps -------------------------------------------------------------------------------------------------------

    def count_pass(self) -> None:
        """To be called at the end of each backward pass that communicates: all ranks make as many of them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        self._steps += 1
        self._steps_left -= 1

    @property
    def is_due(self) -> bool:
        """`next_setup` is to be called, on all ranks."""
        return self._steps_left <= 0

    def next_setup(self, present: Setup) -> Setup:
        """By which the next steps are made: maybe the present one. When it `is_done`, that is the choice."""
        if self._current is not None:
            self._shown[self._current] = self._turn()
        choice = None
        if not self._turns:
            self._turns, choice, answer = self._orders()
            if choice is not None:
                self._finish(choice, answer)
        setting = self._turns.pop(0) if choice is None else choice
        self._current = setting
        # The step in which the plan changes is not counted.
        self._seconds, self._last, self._steps_left = [], None, STEPS_PER_TURN + 1
        self._recorder.begin_anew()
        return replace(
            present,
            algorithm=self._algorithms[setting.algorithm],
            bucket_bytes=setting.bucket_bytes,
            first_bucket_bytes=setting.first_bucket_bytes,
        )

    def _turn(self) -> Turn:
        """Of steps that cost different amounts, or that an evaluation came between, the shortest says the most."""
        stats = self._recorder.statistics()
        buckets = tuple(TimedBucket(one.nbytes, one.communication_s, one.launched_s) for one in stats.buckets)
        known = not any(math.isnan(one.communication_s) or math.isnan(one.launched_s) for one in buckets)
        return Turn(min(self._seconds), stats.exposed_s, buckets if known else ())

    # --- what rank 0 says --------------------------------------------------------------------------------------------

    def _orders(self) -> _Orders:
        mine = self._decide() if self._search is not None else None
        self._shown = {}
        communicator = self._setup.communicator
        try:
            with failures_named(self._setup.group, "tuning the communication", can_give_up=True, in_order=True):
                orders: _Orders = broadcast_object(mine, 0, communicator)
        except CollectiveError:
            # Those that wait for this rank alone learn of it, also if this process lives on.
            communicator.abort()
            raise
        return orders

    def _decide(self) -> _Orders:
        search = self._search
        assert search is not None
        if self._shown:
            search.end_repetition(self._shown)
        if search.outcome is None:
            return list(search.turns), None, None
        outcome, before = search.outcome, self._remembered
        is_confirmed = before is not None and outcome.is_check
        self._log(outcome, is_confirmed)
        # What was confirmed keeps the table of the search that found it.
        if not outcome.tried or (is_confirmed and before is not None and before.fingerprint == self._fingerprint):
            return [], outcome.setting, None
        answer = memory.Answer.of(outcome, self._fingerprint, self._steps, self._compressed_speedups(search))
        for line in advice(answer):
            _logger.info(f"{self._setup.name}: {line}")
        return [], outcome.setting, answer

    def _compressed_speedups(self, search: Search) -> dict[str, float]:
        """By codec: estimated where the user has allowed no other algorithm; none elsewhere."""
        if self._allows_others or self._dtypes != {torch.float32}:
            return {}
        ranks = self._setup.communicator.nranks()
        try:
            costs = {codec: compression_s_per_byte(codec, self._device, ranks) for codec in PROPOSALS}
        except RuntimeError:  # no memory for it; the other ranks wait for what this one says
            return {}
        estimates = {codec: search.compressed_speedup(compressed_share(codec), cost) for codec, cost in costs.items()}
        return {codec: estimate for codec, estimate in estimates.items() if not math.isnan(estimate)}

    def _log(self, outcome: Outcome, is_confirmed: bool) -> None:
        _logger.info(
            f"{self._setup.name}: {'confirmed: ' if is_confirmed else ''}{outcome.setting};"
            f" {outcome.speedup:.2f}x the speed of the default; {outcome.reason} ({len(outcome.tried)} settings tried"
            f" in {self._steps} steps)"
        )

    def _finish(self, choice: Setting, answer: memory.Answer | None) -> None:
        self.is_done = True
        self._recorder.samples_all = False
        # One process of each node: after a restart rank 0 may be on another one.
        if answer is not None and self._is_first_of_node():
            memory.store(answer)

    def _is_first_of_node(self) -> bool:
        rank = dist.get_rank()
        try:
            return self._setup.group.topology.node_of(rank)[0] == rank
        except (RuntimeError, ValueError):  # the launcher's variables contradict each other
            return self._setup.communicator.rank() == 0
