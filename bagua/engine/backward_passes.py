"""The backward passes of one module: what is called for each gradient, which gradients came, and what happens at the
end of a pass.

Owned by the module's TrainingSteps, which say when a pass begins and ends. Gradients come on autograd's threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bagua.collectives.tensor import mark_ready, record_of
from bagua.engine.batch_weights import BatchWeights
from bagua.engine.incomplete_step import (
    incomplete_step,
    left_out_gradient,
    partly_weighted,
    unregistered_parameters,
    unsynchronized_gradient,
)
from bagua.engine.local_gradients import LocalGradients
from bagua.engine.parameters import TrainableWatch
from bagua.engine.setup import ActiveRanks
from bagua.engine.step_state import PassEvent, PassState
from bagua.engine.training_plan import AlgorithmHooks, TrainingPlan
from bagua.engine.unused_parameters import Presence, StaticGraph, agree_on_unused, forget_unused
from bagua.job.torch_internals import hide_from_compiler

# In the first backward pass and then in each one of so many, parameters are looked for that the module did not have
# when it was wrapped. That goes through the module's tree, which takes as long as some ten hooks.
_PASSES_BETWEEN_LOOKS = 100


class BackwardPasses:
    """
    Args:
        weights: what batches count for; None: all ranks alike.
        open_pass: called with the first gradient of a pass; returns whether the pass counts. With each one, if not.

    Attributes:
        state: between and in backward passes.
        local: where gradients are kept before they are communicated; None: nowhere.
        communicates: backward passes do; otherwise they only accumulate gradients.
        on_gradient: by the parameter's position in the module, what its gradient hook calls; None: it is not
            synchronized, and must not get a gradient.
        used_anywhere: names of parameters that got a gradient in the last backward pass, on any rank; None before the
            first, and without `find_unused_parameters`.
    """

    def __init__(self, active_ranks: ActiveRanks, weights: BatchWeights | None, open_pass: Callable[[], bool]) -> None:
        self.state = PassState.CLOSED
        self.open_pass = open_pass
        self.communicates = True
        self.on_gradient: list[Callable[[Tensor], None] | None] = []
        self.used_anywhere: set[str] | None = None
        self.weights = weights
        self.local: LocalGradients | None = None
        self._active_ranks = active_ranks
        self._plan: TrainingPlan
        self._hooks: AlgorithmHooks
        self._trainable: TrainableWatch
        self._ids: frozenset[int] = frozenset()
        # That the plan does not have: they were frozen when it was made, or are not trained since their last exchange.
        self._unplanned: list[nn.Parameter] = []
        # Parameters whose algorithm's hook ran in the last backward pass.
        self._used: set[int] = set()
        # Of the passes so far, the fewest of those: in one with fewer still, the module may have other parameters.
        self._fewest_used = 0
        self._passes = 0
        # The algorithm communicates what the backward pass makes, as it makes it.
        self._sends_in_pass = False
        # With `static_graph`, of the plan.
        self._static: StaticGraph | None = None

    def use_plan(self, plan: TrainingPlan, hooks: AlgorithmHooks, trainable: TrainableWatch) -> None:
        """Communicate by this plan from now on."""
        self._plan, self._hooks, self._trainable = plan, hooks, trainable
        self._ids = frozenset(id(parameter) for _, parameter in plan.parameters)
        self._fewest_used = len(plan.parameters)
        self._sends_in_pass = hooks.on_gradient is mark_ready
        self._static = StaticGraph() if plan.setup.static_graph else None
        self.on_gradient = [
            self._setter_of(name, parameter) if id(parameter) in self._ids else None
            for name, parameter in trainable.named
        ]

        self._unplanned = [
            parameter
            for (name, parameter), on_gradient in zip(trainable.named, self.on_gradient, strict=True)
            if on_gradient is None and name not in plan.setup.left_out
        ]

    def misses_trained(self, is_changed: bool) -> bool:
        """Whether the plan does not fit what is trained now. Asked before every forward pass.

        Args:
            is_changed: parameters were frozen or unfrozen since it was made.
        """
        if self._plan.algorithm.kept_in_plan is None:
            return is_changed
        return any(parameter.requires_grad for parameter in self._unplanned)

    def _setter_of(self, name: str, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        record = record_of(parameter)
        if self._sends_in_pass and not self._plan.setup.find_unused_parameters and record and record.set_ready:
            return record.set_ready
        note_use, key, on_gradient = self._used.add, id(parameter), self._hooks.on_gradient
        static, finds_unused = self._static, self._plan.setup.find_unused_parameters

        def on_complete(parameter: Tensor) -> None:
            """The algorithm's turn. Runs once per parameter and pass."""
            if finds_unused and parameter.grad is None:
                return  # reached, with an undefined gradient: not used
            note_use(key)
            if static is None or static.count(key, name):
                on_gradient(name, parameter)

        return on_complete

    # --- a pass ------------------------------------------------------------------------------------------------------

    def begin(self, sends_at_end: bool = False) -> None:
        """A pass begins that counts.

        Args:
            sends_at_end: nothing is communicated before its end.
        """
        if sends_at_end:
            self._plan.scheduler.hold()
        if self.weights is not None:
            self.weights.begin_pass(self._plan.buckets)
        self._used.clear()
        if self.local is not None:
            self.local.begin_pass()
        if self._static is not None:
            self._static.begin_pass()
        self._passes += 1
        self.state = PassEvent.BEGINS[self.state]

    def end(self) -> bool:
        """The pass is over: the algorithm waits for its results.

        Returns:
            whether parameters should be looked for that the module did not have before.
        """
        # Asked first, for what follows sets flags as well.
        used = len(self._used)
        nothing_came = not used and not (self._sends_in_pass and self._plan.scheduler.has_begun)
        has_fewer = used < self._fewest_used
        if has_fewer:
            self._fewest_used = used
        if self._static is not None:
            self._complete_static(self._static)
        self.state = PassEvent.ENDS[self.state]
        self._end()
        return nothing_came or has_fewer or self._passes % _PASSES_BETWEEN_LOOKS == 1

    def _complete_static(self, static: StaticGraph) -> None:
        """Raises RuntimeError: the pass differs from the first one; what it has launched is abandoned."""
        plan, was_counting = self._plan, static.is_counting
        try:
            static.end_pass({id(parameter): name for name, parameter in plan.parameters})
        except RuntimeError:
            self.state = PassEvent.ENDS[self.state]
            plan.scheduler.abandon_pass()
            plan.scheduler.reset()
            raise
        if was_counting:
            for name, parameter in plan.parameters:
                if id(parameter) in self._used:
                    self._hooks.on_gradient(name, parameter)

    def keep_unsent(self) -> None:
        """Of a pass that is open: this rank's gradients in buckets that were not launched."""
        if self.state is PassState.OPEN:
            self._plan.scheduler.keep_unsent(self._plan.setup.find_unused_parameters)

    def begin_again(self) -> None:
        """The last pass, with this rank's gradients of it, among the ranks that are there now."""
        assert self.local is not None
        if self.weights is not None:
            self.weights.weigh_again(self._plan.buckets)
        self.state = PassEvent.BEGINS[self.state]
        finds_unused = self._plan.setup.find_unused_parameters  # then the end of the pass looks for the others
        for name, parameter in self._plan.parameters:
            has_one = self.local.put_back(parameter)
            if id(parameter) in self._used if finds_unused else has_one:
                self._hooks.on_gradient(name, parameter)

    def contribute_zeros(self) -> None:
        """A backward pass of the other ranks, to which this one has nothing to add. Its own gradients are lost."""
        for _, parameter in self._plan.parameters:
            parameter.grad = None
        if self.weights is not None:
            self.weights.take_part_without_batch(self._plan.buckets)
        self._used.clear()
        if not self._plan.setup.find_unused_parameters:  # otherwise the end of the pass finds that none was used
            for name, parameter in self._plan.parameters:
                self._hooks.on_gradient(name, parameter)
        self._end()

    def _end(self) -> None:
        presence: list[Presence] = []
        plan = self._plan
        # Asked once: the end of this pass may be what changes it.
        finds_unused = plan.setup.find_unused_parameters and plan.algorithm.ranks_in_step
        if finds_unused:
            presence = [self._presence(parameter) for _, parameter in plan.parameters]
            for (name, parameter), one in zip(plan.parameters, presence, strict=True):
                if one is not Presence.USED:
                    self._hooks.on_gradient(name, parameter)
        self._hooks.after_backward()
        if self.weights is not None and self.weights.lost is not None:
            raise self.weights.lost
        scale = self._active_ranks.gradient_scale
        if scale != 1:
            with torch.no_grad():
                for bucket in self._plan.scheduler.sent:
                    bucket.flattened_tensor().mul_(scale)
                    bucket.copy_out()
        if finds_unused:
            anywhere = self._static.anywhere if self._static is not None else None
            if anywhere is None:
                anywhere = agree_on_unused(plan.parameters, presence, plan.setup.group)
            if self._static is not None:
                self._static.anywhere = anywhere
            self.used_anywhere = forget_unused(plan.parameters, anywhere)
        if self.weights is not None:
            if plan.scheduler.holds_back:
                raise NotImplementedError(partly_weighted(plan.setup.name))
            self.weights.end_pass()

    def note_frozen(self, all_frozen: bool) -> None:
        """What a forward pass has found: whether all parameters are frozen."""
        if self.state is (PassState.CLOSED if all_frozen else PassState.FROZEN):
            self.state = (PassEvent.ALL_FROZEN if all_frozen else PassEvent.SOME_TRAINED)[self.state]

    def _presence(self, parameter: nn.Parameter) -> Presence:
        if id(parameter) in self._used:
            return Presence.USED
        return Presence.ABSENT if parameter.grad is None else Presence.KEPT

    def abandon_interrupted(self) -> None:
        """Before anything else waits for what a pass has launched that ended with an exception: its results are of no
        use."""
        if self.state in (PassState.OPEN, PassState.INTERRUPTED):
            self._plan.scheduler.abandon_pass()

    def drop(self) -> None:
        """The pass that is open, if there is one, and what was launched in this step are forgotten."""
        if self.state in (PassState.OPEN, PassState.INTERRUPTED):
            self.state = PassEvent.TOLD[self.state]
        self._plan.scheduler.drop_pass()

    # --- what is refused ---------------------------------------------------------------------------------------------

    def synchronizes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer steps a parameter that is synchronized."""
        return any(not self._ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)

    def refuse_unsynchronized(self, position: int, parameter: Tensor) -> None:
        """A parameter that was frozen when buckets were made has got a gradient: it was unfrozen where nobody looks.
        That would differ by rank.

        Raises:
            RuntimeError: unless another module's engine synchronizes it.
        """
        if record_of(parameter) is None:
            name, _ = self._trainable.named[position]
            if name in self._plan.setup.left_out:
                raise RuntimeError(left_out_gradient(name))
            raise RuntimeError(unsynchronized_gradient(name, self._plan.setup.name))

    def refuse_unregistered(self) -> None:
        """
        Raises:
            RuntimeError: the module has got parameters that are not synchronized.
        """
        names = self._trainable.unregistered() or self._plan.scheduler.names_of_replaced()
        if names:
            raise RuntimeError(unregistered_parameters(names))

    def refuse_incomplete(self, when: str) -> None:
        """The step ends.

        Raises:
            RuntimeError: only some of its gradients were communicated.
        """
        scheduler, parameters = self._plan.scheduler, self._plan.parameters
        interrupted = self.state is PassState.OPEN or self.state is PassState.INTERRUPTED
        if not interrupted and not scheduler.has_begun and scheduler.is_whole:
            return  # nothing has happened since the last call
        is_unfinished = False
        if interrupted:
            self.state = PassEvent.TOLD[self.state]
            # Even if all was sent: nobody has waited for it, and the end of the pass is missing.
            is_unfinished = self._sends_in_pass and scheduler.has_begun
            scheduler.abandon_pass()
        names = scheduler.end_step()
        if not names and not is_unfinished:
            return
        scheduler.reset()
        raise RuntimeError(
            f"{when}: "
            + incomplete_step(
                names,
                [name for name, _ in parameters],
                [name for name, parameter in parameters if name in names and not parameter.requires_grad],
                ended_with_exception=interrupted,
                has_other_parameters=self._trainable.is_outdated(),
            )
        )


def gradient_hook(passes: BackwardPasses, position: int) -> Callable[[Tensor], None]:
    """Calls what the passes have for the parameter at this position of the module: it stays when buckets change. The
    usual one sets a ready flag, so that this is the shortest way from a gradient to its communication. On autograd's
    thread.

    The hooks refer to the passes weakly. A tensor's hooks are held by C++ where Python's collector does not look:
    through a strong reference they, and with them the engine and the module that it trains, would never be freed."""
    reference = weakref.ref(passes)
    is_open = PassState.OPEN

    def hook(parameter: Tensor) -> None:
        passes = reference()
        if passes is None:
            return
        if not passes.communicates:
            if passes.weights is not None:
                passes.weights.note_gradient()
            return
        on_gradient = passes.on_gradient[position]
        if on_gradient is None:
            passes.refuse_unsynchronized(position, parameter)
            return
        if passes.state is is_open or passes.open_pass():
            on_gradient(parameter)

    # Compiled code may run backward passes, in which hooks are called by Python as any other function.
    hide_from_compiler(hook)
    return hook
