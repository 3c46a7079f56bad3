"""Asynchronous model averaging: every rank trains by itself, and a thread beside it keeps the replicas together.

x = x - lr * g(x)                     at each step, on this rank alone
c = x                                 now and then: a copy, which goes to the other ranks
x = x + (1/n * sum over ranks of c) - c    when their sum is there, some steps later

The steps between the copy and the addition are the *staleness*. The first `warmup_steps` steps are those of gradient
all-reduce. What the thread does, and why nothing is lost and nothing hangs: bagua.comm_ops.averaging_loop.

[Note: states of a rank]
warm-up   gradients are all-reduced (bagua.torch_api.algorithms.warm_up).
new       the loop's thread is there on all ranks. It begins to average when all have made a forward pass in training.
running   this rank has. Others may still be in `new`; beyond that all ranks are in the same state.
stopped   `abort` was called, and there is no thread; `resume` starts another loop.
failed    a rank is gone.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.averaging_group import AveragingGroup
from bagua.comm_ops.background_average import Addition, BackgroundAverage
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, communicated
from bagua.torch_api.algorithms.rounds import MissingForwardCheck, steppers
from bagua.torch_api.algorithms.warm_up import WarmUp, check_warm_up

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl", "Staleness"]

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


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """See AsyncModelAverageAlgorithm.

    Attributes:
        staleness: of the additions so far.
        exchange_s: what the average that was added last took, in seconds.
    """

    keeps_replicas_equal = False

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
        self._warm_up = WarmUp(process_group, warmup_steps)
        self._average = BackgroundAverage(process_group)
        self._has_begun = self._is_stopped = False
        self._is_switching = self._is_finished = False
        self._averaged: list[str] = []  # names of what is averaged

    @property
    def ranks_in_step(self) -> bool:
        """During warm-up."""
        return not self._warm_up.is_over

    @property
    def status(self) -> str:
        """ "warm-up", "new", "running", "stopped" or "failed"; see the head of this file."""
        if self._average.failure is not None:
            return "failed"
        if self.ranks_in_step:
            return "warm-up"
        if self._is_stopped:
            return "stopped"
        return "running" if self._has_begun else "new"

    @property
    def kept_in_plan(self) -> Collection[str] | None:
        """All that is averaged: ranks are at different steps, and none knows which average is the last that a frozen
        parameter needs. They meet in `resume`, after an average."""
        return None if self.ranks_in_step else self._averaged

    # --- tensors and buckets: gradients during warm-up, then parameters ----------------------------------------------

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        self._missing_forward = MissingForwardCheck(bagua_ddp.bagua_module_name, self.process_group.size)
        self._average.prepare(bagua_ddp.synchronized_parameters[0][1].device)
        if self.ranks_in_step:
            return self._warm_up.algorithm.init_tensors(bagua_ddp)
        self._averaged = [name for name, _ in bagua_ddp.synchronized_parameters]
        self._average.update_groups.set_owners(steppers(bagua_ddp), len(bagua_ddp.bagua_optimizers))
        tensors = communicated(bagua_ddp)[::-1]
        tensors.sort(key=self._average.update_groups.owner_of)
        return tensors

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> Sequence[BaguaBucket]:
        self._is_finished = False
        if self.ranks_in_step:
            return self._warm_up.algorithm.tensors_to_buckets(tensors, do_flatten)
        # Parameters keep their memory: the bucket's is that of the copy.
        owner_of = self._average.update_groups.owner_of
        of_one_owner = [list(part) for group in tensors for _, part in itertools.groupby(group, owner_of)]
        return [BaguaBucket(group, str(number), flatten=False) for number, group in enumerate(of_one_owner)]

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if self.ranks_in_step:
            self._warm_up.algorithm.init_operations(bagua_ddp, bucket)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def init_forward_pre_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[Any], None]:
        return lambda _: self._before_forward(bagua_ddp)

    def _before_forward(self, bagua_ddp: AlgorithmFacade) -> None:
        if self.ranks_in_step:
            return
        self._raise_failure()
        if not self._has_begun and not self._is_stopped:
            self._begin(bagua_ddp)
        self._note(self._average.pass_safe_point_of_rest())

    def init_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[str, Tensor], None]:
        def mark(name: str, parameter: Tensor) -> None:
            if self._has_begun:
                return
            if self.ranks_in_step:
                bagua_ddp.mark_ready(name, parameter)
            else:
                self._missing_forward.note_gradients()

        return mark

    def init_post_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[], None]:
        def end_warmup_step() -> None:
            if self.ranks_in_step:
                self._warm_up.end_pass(bagua_ddp)
                if self._warm_up.is_over:
                    self._switch_to_parameters(bagua_ddp)

        return end_warmup_step

    def init_post_optimizer_step_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[torch.optim.Optimizer], None]:
        # Buckets are ready now, on all ranks.
        if not self.ranks_in_step and not self._is_stopped:
            self._start(bagua_ddp)
        position = {id(optimizer): index for index, optimizer in enumerate(bagua_ddp.bagua_optimizers)}

        def after_step(optimizer: torch.optim.Optimizer) -> None:
            self._raise_failure()
            self._note(self._average.finish_group_update(position[id(optimizer)]))
            if self.status == "new":
                self._missing_forward.note_step(optimizer)

        return after_step

    def _note(self, addition: Addition | None) -> None:
        if addition is None:
            return
        self.staleness.note(addition.steps)
        self.exchange_s = addition.exchange_s
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug(
                f"average {addition.exchange}: added {addition.steps} steps after the copy;"
                f" the exchange took {1e3 * addition.exchange_s:.1f} ms"
            )

    # --- beginnings and ends -----------------------------------------------------------------------------------------

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
        if not self._meet("abort", self._check(model)) or self.ranks_in_step or self._is_stopped:
            return
        for addition in self._average.end():
            self._note(addition)
        self._has_begun, self._is_stopped = False, True

    def resume(self, model: Any) -> None:
        """Average again after `abort`. Every rank calls it; it returns when all have. Arguments and errors as `abort`.
        During warm-up, and while it is running, it does nothing but wait for the others."""
        engine = self._check(model)
        self._meet("resume", engine)
        if self.ranks_in_step or self._has_begun:
            return
        trained = [name for name, parameter in engine.synchronized_parameters if parameter.requires_grad]
        if 0 < len(trained) < len(self._averaged):
            engine.communicate(trained)
        self._is_stopped = False
        self._begin(engine)

    def _meet(self, what: str, engine: AlgorithmFacade) -> bool:
        """All ranks. Whether any of them has begun."""
        self._raise_failure()
        everybody = AveragingGroup(self.process_group, communicator=engine.communicator)
        (nobody_has_begun,) = everybody.agree([not self._has_begun], f"{what} of the averaging of parameters")
        return not nobody_has_begun

    def _raise_failure(self) -> None:
        failure = self._average.failure
        if failure is not None:
            raise failure

    def _check(self, model: Any) -> AlgorithmFacade:
        for one in (model, getattr(model, "inner", None), getattr(model, "bagua_ddp", None)):
            if isinstance(one, AlgorithmFacade) and one.bagua_algorithm is self:
                return one
        raise ValueError(
            f"this {type(model).__name__} is not trained by this algorithm; call model.bagua_algorithm.abort(model), or"
            " resume, with the module that with_bagua returned"
        )

    def _switch_to_parameters(self, bagua_ddp: AlgorithmFacade) -> None:
        """The warm-up is over. On this rank alone: nothing is sent."""
        self._is_switching = True
        try:
            bagua_ddp.rebuild_buckets()
        finally:
            self._is_switching = False

    def _start(self, bagua_ddp: AlgorithmFacade) -> None:
        self._average.start(bagua_ddp.bagua_buckets, max(0.0, self.sync_interval_ms / 1000))

    def _begin(self, bagua_ddp: AlgorithmFacade) -> None:
        self._missing_forward.note_forward()
        self._has_begun = True
        if not self._average.has_loop:
            self._start(bagua_ddp)
        self._average.begin()

    def finish(self, bagua_ddp: AlgorithmFacade) -> None:
        """The module is wrapped again, by this algorithm or another, or its parameters have changed."""
        if self._is_switching:
            super().finish(bagua_ddp)
            return
        if self._is_finished:
            return
        self._is_finished = True
        if self.ranks_in_step:
            super().finish(bagua_ddp)
        for addition in self._average.finish():
            self._note(addition)
        self._has_begun = False

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How far the warm-up is. What comes after it is not repeatable bit for bit: it depends on when messages
        arrive."""
        return {"warmup_steps_done": self._warm_up.done}

    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        """
        Raises:
            RuntimeError: the warm-up is over here, and not in `state`.
        """
        was_in_step = self.ranks_in_step
        done = int(state["warmup_steps_done"])
        self._warm_up.load(done, was_over=done >= self.warmup_steps)
        if was_in_step and not self.ranks_in_step:
            self._switch_to_parameters(bagua_ddp)


class AsyncModelAverageAlgorithm(Algorithm):
    """
    Args:
        peer_selection_mode: "all": the mean is that of all ranks.
        sync_interval_ms: the pause between two averages; 0 or less: none.
        warmup_steps: the first steps, which are those of gradient all-reduce.

    Raises:
        ValueError: another mode, a warm-up that is negative or not whole, or an interval that is no number.
    """

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: float = 500, warmup_steps: int = 0) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: only 'all' is known here")
        if not math.isfinite(sync_interval_ms):
            raise ValueError(f"sync_interval_ms={sync_interval_ms}: must be a number of ms, 0 for no pause")
        check_warm_up(warmup_steps)
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps

    def reify(self, process_group: BaguaProcessGroup) -> AsyncModelAverageAlgorithmImpl:
        return AsyncModelAverageAlgorithmImpl(
            process_group, self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps
        )
