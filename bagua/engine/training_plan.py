"""What is communicated while the same parameters are trained in the same phase of an algorithm: a plan.

Made and owned by a PlanMaker. Plans change between two steps, on all ranks alike. Those that hold gradients alone are
kept: a module whose halves are frozen in turn goes to and fro between two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagua.engine.bucket import Bucket
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.setup import Setup
from bagua.replicas.replica_check import Replica


def no_hook(*_: Any) -> None:
    """What an algorithm gives that has nothing to do there. It is not called."""


@dataclass(eq=False)
class AlgorithmHooks:
    """An algorithm's functions for one plan; see bagua.torch_api.algorithms.base for their arguments. None: it has
    nothing to do there.

    may_replan: it may ask for another plan, by what it defines of `phase` and `kept_in_plan`.
    """

    may_replan: bool
    need_reset: Callable[[], bool] | None
    settle: Callable[[object], None] | None
    before_forward: Callable[[tuple[Any, ...]], None] | None
    on_gradient: Callable[[str, Tensor], None]
    after_backward: Callable[[], None]
    before_step: Callable[[torch.optim.Optimizer], None] | None
    after_step: Callable[[torch.optim.Optimizer], None] | None

    @classmethod
    def of(cls, algorithm: Any, facade: object) -> AlgorithmHooks:
        """Asks the algorithm, when its buckets are there. `facade` is what it is told of the engine."""
        before_forward = algorithm.init_forward_pre_hook(facade)
        on_gradient = algorithm.init_backward_hook(facade)
        after_backward = algorithm.init_post_backward_hook(facade)
        before_step = algorithm.init_pre_optimizer_step_hook(facade)
        after_step = algorithm.init_post_optimizer_step_hook(facade)
        return cls(
            algorithm.defines("phase", "kept_in_plan"),
            algorithm.need_reset if algorithm.defines("need_reset") else None,
            algorithm.settle if algorithm.defines("settle") else None,
            None if before_forward is no_hook else before_forward,
            on_gradient,
            after_backward,
            None if before_step is no_hook else before_step,
            None if after_step is no_hook else after_step,
        )


@dataclass(eq=False)
class TrainingPlan:
    """
    setup: that it was made by.
    algorithm: what the recipe of the setup has become for the module.
    key: what the plan of a module depends on: equal keys make equal plans.
    phase: of the algorithm.
    replica: what the ranks have compared.
    parameters: (name, parameter) that are synchronized, in the module's order.
    buckets: in launch order.
    scheduler: what launches them.
    """

    setup: Setup
    algorithm: Any
    key: Hashable
    phase: Hashable
    replica: Replica
    parameters: Sequence[tuple[str, nn.Parameter]]
    buckets: Sequence[Bucket]
    scheduler: CommScheduler

    def __post_init__(self) -> None:
        self._layouts = self._current_layouts()

    def _current_layouts(self) -> list[tuple[torch.dtype, torch.device, torch.Size]]:
        return [(parameter.dtype, parameter.device, parameter.shape) for _, parameter in self.parameters]

    @property
    def is_valid(self) -> bool:
        """Whether the parameters have been neither converted nor moved since."""
        return self._layouts == self._current_layouts()

    @property
    def holds_gradients(self) -> bool:
        """Alone: nothing whose values go on changing while it is not in use."""
        return all(bucket.holds_gradients for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Of its buckets."""
        return sum(bucket.flattened_tensor().nbytes for bucket in self.buckets)

    def resume(self) -> None:
        """Communicate again, after `suspend`."""
        for bucket in self.buckets:
            bucket.attach()
        self.scheduler.reset()
        self.scheduler.register()

    def suspend(self) -> None:
        """Give the tensors memory of their own, and keep everything else."""
        self.scheduler.unregister()
        for bucket in self.buckets:
            bucket.release()


class KeptPlans:
    """Plans that are not in use, the least recently used first. Together they have no more memory than the parameters
    of the module: parts of it that are trained in turn fit; what does not is made again when it is needed."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, TrainingPlan] = OrderedDict()

    def take(self, key: Hashable) -> TrainingPlan | None:
        """The plan of this key, if it is still valid. It is not kept any more."""
        plan = self._plans.pop(key, None)
        if plan is not None and not plan.is_valid:
            plan.scheduler.close()
            return None
        return plan

    def keep(self, plan: TrainingPlan, limit_bytes: int) -> None:
        """Keep a suspended plan."""
        self._plans[plan.key] = plan
        while sum(one.nbytes for one in self._plans.values()) > limit_bytes:
            self._plans.popitem(last=False)[1].scheduler.close()

    def clear(self) -> None:
        """Keep none."""
        for plan in self._plans.values():
            plan.scheduler.close()
        self._plans.clear()
