"""Optimizers that step on a few flat tensors instead of one tensor per parameter.

The optimizer's own step function runs, so every elementwise optimizer can be fused. For the time of the step, its
groups and states are replaced by those of a plan (bagua.contrib.fuse.plan).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch

from bagua.contrib.fuse.block import Block
from bagua.contrib.fuse.elementwise import check_elementwise, plain_step, steps_many_at_a_time
from bagua.contrib.fuse.layout import (
    BreakEven,
    FoundLayout,
    OwnLayout,
    break_even,
    calculate_mutual_groups,
    can_be_flat,
)
from bagua.contrib.fuse.plan import Plan
from bagua.contrib.fuse.run import StaleError
from bagua.job.sharded_parameters import refuse_sharded
from bagua.misuse import explains_calls, shown

__all__ = ["calculate_mutual_groups", "fuse_optimizer", "fuse_step", "fused_parameters", "is_fused_optimizer"]

_logger = logging.getLogger("bagua")

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_ATTRIBUTE = "_bagua_fusion"

# Fewer steps do not make up for the time that a plan takes. After so many plans in a row that were not worth it, there
# is a pause, which then doubles.
_WORTH_STEPS = 16
_FREE_PLANS = 8


@explains_calls("Call fuse_optimizer(optimizer), with other arguments by their names.")
def fuse_optimizer(
    optimizer: OptimizerT, do_flatten: bool = True, check_flatten: bool = True, *, elementwise: bool = False
) -> OptimizerT:
    """Give `optimizer` a method `fuse_step(closure=None, *, scaler=None)`, which does what `step` does on a few flat
    tensors: see `fuse_step`. Both may be called in turns.

    Args:
        optimizer: elementwise: each element of a parameter is updated from its own gradient and states alone. All of
            torch.optim are, except LBFGS, Muon, Adafactor and SparseAdam. One that is not of torch.optim is tried out
            on two small tensors. `fuse_step` of a `QAdamOptimizer`, whose step takes many at a time, is its `step`.
        do_flatten: move the weights of each group that are to be fused into one piece of memory per dtype and device,
            now, in the order of the group. What a bucket of `with_bagua` takes over afterwards is stepped unfused: wrap
            the model with `do_flatten=False`, or pass False here. False: use weights or gradients that lie one after
            another already, such as those in buckets; the weights of gradients in a bucket are moved into the order of
            the bucket.
        check_flatten: before each `fuse_step`, look at the memory of every parameter and state. False: only at the
            first and last one of each flat tensor, which is faster. Then do not assign to `parameter.data` or to
            single entries of `optimizer.state`.
        elementwise: you know that the optimizer is. It is not refused by its name, and not tried out.

    Returns:
        `optimizer`, the same object. Copies by `copy.deepcopy` are fused as well; pickles are not.

    Raises:
        RuntimeError: it is fused already.
        TypeError: it is not a torch.optim.Optimizer.
        ValueError: it is not elementwise, has `differentiable=True`, or steps parameters that FSDP or tensor
            parallelism distributes.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {shown(optimizer)}. Pass a torch.optim.Optimizer, one at a time.")
    name = type(optimizer).__name__
    if is_fused_optimizer(optimizer):
        raise RuntimeError(
            f"This {name} is fused already.\n"
            "fuse_optimizer() was called a second time with the same optimizer.\n"
            "Call it once, before the first fuse_step()."
        )
    if optimizer.defaults.get("differentiable") or any(one.get("differentiable") for one in optimizer.param_groups):
        raise ValueError(
            f"This {name} has differentiable=True.\n"
            "fuse_step() works in the memory of the parameters, which autograd does not follow.\n"
            "Create the optimizer without it, or use optimizer.step()."
        )
    named = (
        (f"param_groups[{index}]['params'][{position}]", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    )
    refuse_sharded(named, f"fusing {name}", "Use optimizer.step(), or fused=True of torch's optimizer")
    if not elementwise and not steps_many_at_a_time(optimizer):
        check_elementwise(optimizer)
    fusion = Fusion(do_flatten, check_flatten)
    if do_flatten and not steps_many_at_a_time(optimizer):
        fusion.settle(optimizer, lambda parameter: parameter.requires_grad)
    attributes = vars(optimizer)
    attributes[_ATTRIBUTE] = fusion
    attributes["_bagua_fused_count"] = 0
    attributes["fuse_step"] = MethodType(fuse_step, optimizer)
    attributes["__deepcopy__"] = MethodType(_deepcopy, optimizer)
    return optimizer


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse_optimizer` was called with it."""
    return _ATTRIBUTE in vars(optimizer)


def fused_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those that the last `fuse_step` has stepped as parts of flat tensors."""
    fusion = vars(optimizer).get(_ATTRIBUTE)
    return [] if fusion is None else fusion.fused_parameters()


def fuse_step(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """What `optimizer.step(closure)` does, on flat tensors. Hooks of the step run once, with `optimizer`.

    In each group, small parameters that lie one after another in memory and have had the same steps are stepped as
    one, if they are enough for that to take less time. Others are stepped by themselves: large ones, those without
    neighbours, without dimensions, with sparse gradients, and of classes other than torch's. Where no parameters can be
    stepped as one, this is `optimizer.step`. `optimizer.state` has the states of the parameters, before and after.

    Args:
        optimizer: that `fuse_optimizer` returned.
        closure: computes the gradients. It is called once.
        scaler: call `scaler.step(optimizer)`, which steps unless gradients are not finite.

    Returns:
        the result of the closure, or None; with `scaler`, what `scaler.step` returns.

    Raises:
        AssertionError: the optimizer is not fused.
        RuntimeError: the optimizer keeps states that are neither one element nor one for each weight.
    """
    fusion: Fusion | None = optimizer.__dict__.get(_ATTRIBUTE)
    if fusion is None:
        raise AssertionError(
            f"This {type(optimizer).__name__} is not fused.\n"
            "fuse_step() was called with an optimizer that fuse_optimizer() has not prepared.\n"
            "Call fuse_optimizer(optimizer) first. A pickle of a fused optimizer is not fused."
        )
    if fusion.pause and fusion.number_of_groups == len(optimizer.param_groups):
        fusion.pause -= 1
        if scaler is None:
            return optimizer.step() if closure is None else optimizer.step(closure)
        return scaler.step(optimizer) if closure is None else scaler.step(optimizer, closure)
    if scaler is None:
        return _hooked_step(optimizer, closure)
    arguments = () if closure is None else (closure,)
    attributes = vars(optimizer)
    before = attributes.get("step")
    attributes["step"] = MethodType(_hooked_step, optimizer)
    try:
        return scaler.step(optimizer, *arguments)
    finally:
        if before is None:
            del attributes["step"]
        else:
            attributes["step"] = before


def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    fusion: Fusion = vars(optimizer)[_ATTRIBUTE]
    vars(optimizer)["_opt_called"] = True  # schedulers of torch ask for it: they know step alone
    result = None
    if closure is not None:
        with torch.enable_grad():
            result = closure()
    fusion.step(optimizer)
    return result


_hooked_step = torch.optim.Optimizer.profile_hook_step(_step)


def _deepcopy(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    twin = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = twin
    state: Any = optimizer.__reduce_ex__(4)[2]
    twin.__setstate__(copy.deepcopy(state, memo))
    fusion: Fusion = vars(optimizer)[_ATTRIBUTE]
    for name in (_ATTRIBUTE, "fuse_step", "__deepcopy__"):
        vars(twin).pop(name, None)
    return fuse_optimizer(twin, fusion.do_flatten, fusion.check_flatten, elementwise=True)


class Fusion:
    """What an optimizer is given by `fuse_optimizer`: its blocks and its plan.

    Attributes:
        pause: for so many steps it is not looked whether there is something to fuse, as there was nothing, or something
            else in each step. Planning takes time for each parameter: seldom enough, it takes none of the steps.
        number_of_groups: of the optimizer, when the pause began.
    """

    def __init__(self, do_flatten: bool, check_flatten: bool) -> None:
        self.do_flatten = do_flatten
        self.check_flatten = check_flatten
        self.pause = 0
        self.number_of_groups = 0
        self._steps_of_plan = 0
        self._wasted_plans = 0
        self._is_told = False
        self._layout = OwnLayout() if do_flatten else FoundLayout()
        self._blocks: list[list[Block]] = []
        self._limits: list[BreakEven] = []
        self._plan: Plan | None = None

    @torch.no_grad()
    def settle(self, optimizer: torch.optim.Optimizer, takes_part: Callable[[torch.Tensor], bool]) -> None:
        """Give the parameters for which `takes_part` their places in blocks, where that pays."""
        groups = optimizer.param_groups
        before = self._blocks + [[] for _ in groups[len(self._blocks) :]]
        self._blocks, self._limits = [], []
        for blocks, group in zip(before, groups, strict=False):
            limits = break_even(optimizer, group)
            small = [one for one in group["params"] if limits.is_small(one) and takes_part(one) and can_be_flat(one)]
            self._blocks.append(self._layout.settle(blocks, small, limits))
            self._limits.append(limits)

    def fused_parameters(self) -> list[torch.Tensor]:
        return [] if self._plan is None else self._plan.fused_parameters()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.pause = 0
        step = plain_step(optimizer)
        if steps_many_at_a_time(optimizer):
            counts = [sum(one.grad is not None for one in group["params"]) for group in optimizer.param_groups]
            step(optimizer)
            vars(optimizer)["_bagua_fused_count"] += sum(count > 1 for count in counts)
            return
        plan = self._prepared(optimizer)
        if plan is None:
            self.number_of_groups = len(optimizer.param_groups)
            step(optimizer)
            return
        self._steps_of_plan += 1
        groups, states = optimizer.param_groups, optimizer.state
        shown = plan.shown_groups(groups)
        optimizer.param_groups, optimizer.state = shown, plan.shown_states()
        try:
            step(optimizer)
        except BaseException:
            self._plan = None
            raise
        finally:
            optimizer.param_groups, optimizer.state = groups, states
        try:
            plan.write_back(groups, shown)
        except StaleError:
            self._drop_plan()
        except BaseException:
            self._plan = None
            raise
        vars(optimizer)["_bagua_fused_count"] += plan.fused_groups

    def _prepared(self, optimizer: torch.optim.Optimizer) -> Plan | None:
        """The plan, with all that the step reads. None: nothing is fused with these gradients."""
        if self._plan is not None:
            try:
                self._plan.prepare(optimizer)
                return self._plan
            except StaleError:
                self._drop_plan()
                if self.pause:
                    return None
        self.settle(optimizer, lambda parameter: parameter.grad is not None)
        with torch.no_grad():
            plan = Plan(optimizer, self._blocks, self._limits, self.check_flatten)
        self._tell(optimizer, plan)
        if plan.fused_groups:
            plan.note_versions()
            with contextlib.suppress(StaleError):
                plan.prepare(optimizer)
                self._plan = plan
                return plan
        self._wasted_plans = max(self._wasted_plans, _FREE_PLANS - 1)
        self._drop_plan()
        return None

    def _drop_plan(self) -> None:
        self._wasted_plans = self._wasted_plans + 1 if self._steps_of_plan < _WORTH_STEPS else 0
        self._plan, self._steps_of_plan = None, 0
        self.pause = int(2.0 ** (self._wasted_plans - _FREE_PLANS))

    def _tell(self, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        if not self._is_told:
            self._is_told = True
            _logger.info(
                "fuse_step() of %s steps %d of %d parameters as parts of %d flat tensors.",
                type(optimizer).__name__,
                len(plan.fused_parameters()),
                sum(len(group["params"]) for group in optimizer.param_groups),
                sum(len(group.runs) for group in plan.groups),
            )
