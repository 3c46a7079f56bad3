"""Asynchronous model averaging: every rank trains by itself, and a thread beside it keeps the replicas together.

x = x - lr * g(x)                     at each step, on this rank alone
c = x                                 now and then: a copy, which goes to the other ranks
x = x + (1/n * sum over ranks of c) - c    when their sum is there, some steps later

The steps between the copy and the addition are the *staleness*. The first `warmup_steps` steps are those of gradient
all-reduce. What the thread does, and why nothing is lost and nothing hangs: bagua.comm_ops.averaging_loop.

[Note: states of a rank]
warm-up   gradients are all-reduced. A step of the warm-up is a backward pass that communicated, so that all ranks count
          alike: forward passes without a backward pass, in `eval()` or in `no_sync` are none.
new       the loop's thread is there on all ranks. It begins to average when all have made a forward pass in training.
running   this rank has. Others may still be in `new`; beyond that all ranks are in the same state.
stopped   `abort` was called, and there is no thread; `resume` starts another loop.
failed    a rank is gone.

[Note: safe points]
Parameters change, and are copied, right after a step of the optimizer that owns them: a graph of autograd that uses
them is of no use any more then. Those that no listed optimizer owns have their safe point at the beginning of a forward
pass, if somebody has changed them since the one before.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bagua.comm_ops.async_average import BucketAverage
from bagua.comm_ops.averaging_group import AveragingGroup, create_averaging_group, destroyed_after
from bagua.comm_ops.averaging_loop import AveragingLoop
from bagua.comm_ops.averaging_memory import Part
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.tensor import ensure_record
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl

if TYPE_CHECKING:
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.bucket import Bucket
    from bagua.engine.data_parallel import BaguaDistributedDataParallel

_logger = logging.getLogger("bagua")


class Staleness:
    """Steps of this rank's optimizer between a copy and the addition of its difference to the mean.

    Attributes:
        count: additions so far. Parameters of several optimizers count for each of them.
        last: of the last one.
        largest: of any.
        total: of all together.
    """

    def __init__(self) -> None:
        self.count = self.last = self.largest = self.total = 0

    def __repr__(self) -> str:
        return f"Staleness(count={self.count}, last={self.last}, largest={self.largest}, mean={self.mean:.2f})"

    @property
    def mean(self) -> float:
        """0 before the first."""
        return self.total / self.count if self.count else 0.0

    def note(self, steps: int) -> None:
        """One more addition."""
        self.count += 1
        self.last = steps
        self.largest = max(self.largest, steps)
        self.total += steps


class _Owner:
    """What has its safe points together: the parameters of one optimizer, or those that none of the listed ones has."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.steps = 0

    @property
    def parameters(self) -> list[list[Tensor]]:
        return [bucket.tensors for bucket in self.buckets]

    def versions(self) -> int:
        """Grows whenever somebody changes a parameter in place."""
        return sum(tensor._version for bucket in self.buckets for tensor in bucket.tensors)


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """See AsyncModelAverageAlgorithm.

    Attributes:
        staleness: of the additions so far.
        exchange_s: what the average that was added last took, in seconds.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        peer_selection_mode: str = "all",
        sync_interval_ms: float = 500,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(process_group)
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps
        self.staleness = Staleness()
        self.exchange_s = 0.0
        self._warmup_steps_done = 0
        self._group: AveragingGroup | None = None
        self._keep_group: Callable[[], object] = lambda: None
        self._loop: AveragingLoop | None = None
        self._has_begun = self._is_stopped = False
        self._is_switching = self._is_finished = False
        # Of parameters, by the position of the optimizer in the engine's list; last those of none.
        self._owners: dict[int, _Owner] = {}
        self._owner_of: Callable[[Tensor], int] = lambda _: 0
        self._versions = 0
        self._keep_loop: Callable[[], Any] | None = None  # it does not end any more when this object is freed

    @property
    def ranks_in_step(self) -> bool:
        """During warm-up."""
        return self._warmup_steps_done < self.warmup_steps

    @property
    def status(self) -> str:
        """ "warm-up", "new", "running", "stopped" or "failed"; see the head of this file."""
        if self._loop is not None and self._loop.failure is not None:
            return "failed"
        if self.ranks_in_step:
            return "warm-up"
        if self._is_stopped:
            return "stopped"
        return "running" if self._has_begun else "new"

    # --- tensors and buckets: gradients during warm-up, then parameters ----------------------------------------------

    def init_tensors(self, bagua_ddp: BaguaDistributedDataParallel) -> list[Tensor]:
        parameters = bagua_ddp.synchronized_parameters
        if self._group is None and self.process_group.size > 1:
            self._group = create_averaging_group(self.process_group, parameters[0][1].device)
            self._keep_group = destroyed_after(self, self._group)
        if self.ranks_in_step:
            return super().init_tensors(bagua_ddp)
        for name, parameter in parameters:
            ensure_record(parameter, name, bagua_ddp.bagua_module_name)
        self._owner_of = _owner_of(bagua_ddp.bagua_optimizers)
        return sorted((parameter for _, parameter in parameters), key=self._owner_of)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> Sequence[BaguaBucket]:
        self._is_finished = False
        if self.ranks_in_step:
            return super().tensors_to_buckets(tensors, do_flatten)
        # Parameters keep their memory: the bucket's is that of the copy.
        of_one_owner = [list(part) for group in tensors for _, part in itertools.groupby(group, self._owner_of)]
        return [BaguaBucket(group, str(number), flatten=False) for number, group in enumerate(of_one_owner)]

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if self.ranks_in_step:
            bucket.append_centralized_synchronous_op(average=True, group=self.process_group)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def init_forward_pre_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[Any], None]:
        return lambda _: self._before_forward(bagua_ddp)

    def _before_forward(self, bagua_ddp: BaguaDistributedDataParallel) -> None:
        if self.ranks_in_step:
            return
        self._raise_failure()
        if not self._has_begun and not self._is_stopped:
            self._begin(bagua_ddp)
        rest = self._owners.get(len(bagua_ddp.bagua_optimizers))
        if rest is not None and rest.versions() != self._versions:
            self._pass_safe_point(len(bagua_ddp.bagua_optimizers))
            self._versions = rest.versions()

    def init_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[str, Tensor], None]:
        def mark(name: str, parameter: Tensor) -> None:
            if self.ranks_in_step:
                bagua_ddp.mark_ready(name, parameter)

        return mark

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], None]:
        def end_warmup_step() -> None:
            if self.ranks_in_step:
                bagua_ddp.scheduler.wait_pending_comm_ops()
                if not bagua_ddp.scheduler.sent:
                    return  # torch.autograd.grad, whose gradients are no step's
                self._warmup_steps_done += 1
                if self._warmup_steps_done >= self.warmup_steps:
                    self._switch_to_parameters(bagua_ddp)

        return end_warmup_step

    def init_post_optimizer_step_hook(
        self, bagua_ddp: BaguaDistributedDataParallel
    ) -> Callable[[torch.optim.Optimizer], None]:
        # Buckets are ready now, on all ranks.
        if not self.ranks_in_step and not self._is_stopped:
            self._start_loop(bagua_ddp)
        position = {id(optimizer): index for index, optimizer in enumerate(bagua_ddp.bagua_optimizers)}

        def after_step(optimizer: torch.optim.Optimizer) -> None:
            self._raise_failure()
            if position[id(optimizer)] in self._owners:
                self._pass_safe_point(position[id(optimizer)])

        return after_step

    def _pass_safe_point(self, key: int) -> None:
        owner = self._owners[key]
        owner.steps += 1
        if self._loop is None:
            return
        steps = self._loop.safe_point(list(self._owners).index(key), owner.parameters, owner.steps)
        if steps is not None:
            self._note_staleness(steps)

    def _note_staleness(self, steps: int) -> None:
        assert self._loop is not None
        self.staleness.note(steps)
        self.exchange_s = self._loop.exchange_s
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug(
                f"average {self._loop.exchanges}: added {steps} steps after the copy;"
                f" the exchange took {1e3 * self.exchange_s:.1f} ms"
            )

    # --- the loop ----------------------------------------------------------------------------------------------------

    def abort(self, model: Any) -> None:
        """Stop averaging: before evaluation, before a checkpoint, and when training is done. Every rank calls it,
        between two steps; it returns when all have. The parameters are the same bits on all ranks then: the mean.
        During warm-up, and where nothing is running, it does nothing but wait for the others.

        Args:
            model: the module, its DistributedDataParallel, or its engine.

        Raises:
            RuntimeError: a rank is gone, or did not call it in time.
            ValueError: `model` is trained by something else.
        """
        self._check(model)
        if not self._meet("abort") or self.ranks_in_step or self._is_stopped:
            return
        self._end_loop()
        self._has_begun, self._is_stopped = False, True

    def resume(self, model: Any) -> None:
        """Average again after `abort`. Every rank calls it; it returns when all have. Arguments and errors as `abort`.
        During warm-up, and while it is running, it does nothing but wait for the others."""
        engine = self._check(model)
        self._meet("resume")
        if self.ranks_in_step or self._has_begun:
            return
        self._is_stopped = False
        self._begin(engine)

    def _meet(self, what: str) -> bool:
        """All ranks. Whether any of them has begun."""
        self._raise_failure()
        everybody = AveragingGroup(self.process_group)
        (nobody_has_begun,) = everybody.agree([not self._has_begun], f"{what} of the averaging of parameters")
        return not nobody_has_begun

    def _raise_failure(self) -> None:
        if self._loop is not None and self._loop.failure is not None:
            raise self._loop.failure

    def _check(self, model: Any) -> BaguaDistributedDataParallel:
        for one in (model, getattr(model, "inner", None), getattr(model, "bagua_ddp", None)):
            if getattr(one, "__dict__", {}).get("bagua_algorithm") is self:
                engine: BaguaDistributedDataParallel = one  # type: ignore[assignment]
                return engine
        raise ValueError(
            f"this {type(model).__name__} is not trained by this algorithm; call model.bagua_algorithm.abort(model), or"
            " resume, with the module that with_bagua returned"
        )

    def _switch_to_parameters(self, bagua_ddp: BaguaDistributedDataParallel) -> None:
        """The warm-up is over. On this rank alone: nothing is sent."""
        self._is_switching = True
        try:
            bagua_ddp.rebuild_buckets()
        finally:
            self._is_switching = False
        self._start_loop(bagua_ddp)

    @torch.inference_mode(False)  # what is made here is used in later passes
    def _start_loop(self, bagua_ddp: BaguaDistributedDataParallel) -> None:
        self._owners = self._owners_of(bagua_ddp.bagua_buckets)
        rest = self._owners.get(len(bagua_ddp.bagua_optimizers))
        self._versions = rest.versions() if rest is not None else 0
        if self._group is None:
            return  # alone: nobody to average with
        parts = [Part([BucketAverage(bucket) for bucket in owner.buckets]) for owner in self._owners.values()]
        self._loop = AveragingLoop(parts, self._group, max(0.0, self.sync_interval_ms / 1000))
        self._loop.start()
        self._keep_group()
        # A module that is dropped ends its loop. The finalizer holds the loop, and with it the copies.
        finalizer = weakref.finalize(self, self._loop.leave, destroy_group=True)
        finalizer.atexit = False
        self._keep_loop = finalizer.detach

    def _begin(self, bagua_ddp: BaguaDistributedDataParallel) -> None:
        self._has_begun = True
        if self._loop is None:
            self._start_loop(bagua_ddp)
        if self._loop is not None:
            self._loop.begin(*self._state_of_owners())

    def _owners_of(self, buckets: Sequence[Bucket]) -> dict[int, _Owner]:
        owners: dict[int, _Owner] = {}
        for bucket in buckets:
            owners.setdefault(self._owner_of(bucket.tensors[0]), _Owner()).buckets.append(bucket)
        for key, owner in owners.items():
            owner.steps = self._owners[key].steps if key in self._owners else 0
        return owners

    def _state_of_owners(self) -> tuple[list[list[list[Tensor]]], list[int]]:
        return [owner.parameters for owner in self._owners.values()], [owner.steps for owner in self._owners.values()]

    def _end_loop(self) -> None:
        """With all other ranks."""
        if self._loop is None:
            return
        for steps in self._loop.end(*self._state_of_owners(), self.process_group.timeout.total_seconds()):
            self._note_staleness(steps)
        self._forget_loop()
        if self._group is not None:
            self._keep_group = destroyed_after(self, self._group)

    def _forget_loop(self) -> None:
        if self._keep_loop is not None:
            self._keep_loop()
        self._loop, self._keep_loop = None, None

    def finish(self, bagua_ddp: BaguaDistributedDataParallel) -> None:
        """The module is wrapped again, by this algorithm or another, or its parameters have changed."""
        if self._is_switching:
            super().finish(bagua_ddp)
            return
        if self._is_finished:
            return
        self._is_finished = True
        if self.ranks_in_step:
            super().finish(bagua_ddp)
        group, self._group = self._group, None
        try:
            if group is not None and group.is_registered:
                self._end_loop()
        except RuntimeError as error:
            # The ranks cannot be brought together any more. Whoever wraps the module next finds that out.
            _logger.warning(f"averaging ended with an error: {error}")
            group = None
        self._forget_loop()
        self._has_begun = False
        self._keep_group()
        if group is not None:
            group.destroy()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How far the warm-up is. What comes after it is not repeatable bit for bit: it depends on when messages
        arrive."""
        return {"warmup_steps_done": self._warmup_steps_done}

    def load_state_dict(self, bagua_ddp: BaguaDistributedDataParallel, state: Mapping[str, Any]) -> None:
        """
        Raises:
            RuntimeError: the warm-up is over here, and not in `state`.
        """
        done = int(state["warmup_steps_done"])
        if done < self.warmup_steps and not self.ranks_in_step:
            raise RuntimeError(
                f"the state has made {done} of {self.warmup_steps} steps of the warm-up, which is over here: wrap the"
                " module again before loading it"
            )
        was_in_step, self._warmup_steps_done = self.ranks_in_step, done
        if was_in_step and not self.ranks_in_step:
            self._switch_to_parameters(bagua_ddp)


def _owner_of(optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[Tensor], int]:
    """The position of the first optimizer that steps a parameter; behind all of them if none does."""
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), index)
    nobody = len(optimizers)
    return lambda parameter: owners.get(id(parameter), nobody)


class AsyncModelAverageAlgorithm(Algorithm):
    """
    Args:
        peer_selection_mode: "all": the mean is that of all ranks.
        sync_interval_ms: the pause between two averages; 0 or less: none.
        warmup_steps: the first steps, which are those of gradient all-reduce.

    Raises:
        ValueError: another mode, a negative warm-up, or an interval that is no number.
    """

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: float = 500, warmup_steps: int = 0) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: only 'all' is known here")
        if not math.isfinite(sync_interval_ms):
            raise ValueError(f"sync_interval_ms={sync_interval_ms}: must be a number of ms, 0 for no pause")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: must be at least 0")
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps

    def reify(self, process_group: BaguaProcessGroup) -> AsyncModelAverageAlgorithmImpl:
        return AsyncModelAverageAlgorithmImpl(
            process_group, self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps
        )
