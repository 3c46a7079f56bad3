"""The life of a training step: what the engine does in the forward pass, in the backward pass and around the step of an
optimizer, and what it refuses there because ranks would grow apart. Its states: bagua.engine.step_state.

[Note: a training step]
forward pre-hook    step counter, another plan if the algorithm or the parameters ask for one, the algorithm's own hook
forward hook        a hook on the outputs, so that the start of the backward pass is seen
gradient hooks      one per parameter, on autograd's thread: usually set a ready flag, for which the scheduler launches
                    buckets (bagua.engine.comm_scheduler); otherwise the algorithm's backward hook
end of backward     autograd's callback: the algorithm's post-backward hook, which usually waits for what was launched
optimizer.step      refused while a gradient is missing; around it the algorithm's pre-step and post-step hooks
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node

from bagua.engine.gradient_hooks import EndOfPass, foreign_step_hook, gradient_hook
from bagua.engine.incomplete_step import (
    compiled_autograd,
    incomplete_step,
    unregistered_parameters,
    unsynchronized_gradient,
)
from bagua.engine.module_hooks import ModuleHooks, is_in_backward
from bagua.engine.parameters import TrainableWatch
from bagua.engine.step_state import PASS_TRANSITIONS, PassEvent, PassState, StateMachine
from bagua.engine.tensor import record_of
from bagua.engine.unused_parameters import Presence, accumulates_everywhere, agree_on_presence
from bagua.job.failure_report import failures_named
from bagua.job.torch_internals import hide_from_compiler, is_autograd_compiled

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.comm_scheduler import CommScheduler
    from bagua.engine.training_plan import AlgorithmHooks

# In the first backward pass and then in each one of so many, parameters are looked for that the module did not have
# when it was wrapped. That goes through the module's tree, which takes as long as some ten hooks.
_PASSES_BETWEEN_LOOKS = 100


class StepEngine(Protocol):
    """What the steps ask of their engine."""

    module: nn.Module
    bagua_module_name: str
    bagua_algorithm: Any
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_train_step_counter: int
    process_group: BaguaProcessGroup
    find_unused_parameters: bool
    require_backward_grad_sync: bool
    replans_before_backward: bool
    gradient_scale: float | None

    @property
    def communicator(self) -> BaguaCommunicator: ...
    @property
    def needs_replan(self) -> bool: ...
    def mark_ready(self, name: str, parameter: Tensor) -> None: ...
    def begin_step(self, may_communicate: bool) -> bool: ...
    def end_counted_pass(self) -> bool: ...
    def initialize_again(self) -> None: ...
    def start_replan(self) -> None: ...
    def finish_replan(self) -> None: ...


class TrainingSteps:
    """Of the module of one engine, from `install` on.

    Attributes:
        engine: whose buckets are communicated.
        passes: the state between and in backward passes.
        is_within_forward: calls of the module belong to a forward pass that has begun, and count as none.
        on_gradient: by the parameter's position in the module, what its gradient hook calls; None: it is not
            synchronized, and must not get a gradient.
        used_anywhere: names of parameters that got a gradient in the last backward pass, on any rank; None before the
            first, and without `find_unused_parameters`.
    """

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.passes = StateMachine(PassState.CLOSED, PASS_TRANSITIONS)
        self.is_within_forward = False
        self.on_gradient: list[Callable[[Tensor], None] | None] = []
        self.used_anywhere: set[str] | None = None
        self._parameters: Sequence[tuple[str, nn.Parameter]] = []
        self._parameter_ids: frozenset[int] = frozenset()
        self._trainable: TrainableWatch
        self._hooks: AlgorithmHooks
        self._scheduler: CommScheduler
        # The algorithm asked for it while all parameters were frozen.
        self._reset_is_due = False
        # Parameters whose algorithm's hook ran in the last backward pass.
        self._used: set[int] = set()
        # Of the passes so far, the fewest of those: in one with fewer still, the module may have other parameters.
        self._fewest_used = 0
        self._passes = 0
        # Guards the beginning of a pass: autograd has a thread for each device.
        self._opening = threading.Lock()
        # Autograd will call at the end of the running backward pass, be it one that counts or not. Such calls are
        # numbered.
        self._is_end_queued = False
        self._last_queued = 0
        # Of that pass, while unused parameters are looked for.
        self._first_node: Node | None = None
        # The algorithm communicates what the backward pass makes, as it makes it.
        self._sends_in_pass = False

    # --- plans -------------------------------------------------------------------------------------------------------

    def install(self, hooks: ModuleHooks, trainable: TrainableWatch) -> None:
        """Take part in the steps of the module, by the plan that `follow` was or is given.

        Args:
            hooks: to be removed before the next call.
            trainable: of the module.
        """
        hooks.before_forward(self.engine.module, self._before_forward)
        hooks.after_forward(self.engine.module, self._after_forward)
        for position, (_, parameter) in enumerate(trainable.named):
            hooks.after_gradient(parameter, gradient_hook(self, position))
        hooks.around_step(self.engine.bagua_optimizers, self._before_step, self._after_step)
        hooks.before_steps_of_others(foreign_step_hook(self))

    def follow(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        trainable: TrainableWatch,
        hooks: AlgorithmHooks,
        scheduler: CommScheduler,
    ) -> None:
        """Communicate by this plan from now on.

        Args:
            parameters: (name, parameter) that are synchronized.
            trainable: of the module, as it is now.
            hooks: of the algorithm.
            scheduler: of the plan's buckets.
        """
        self._parameters, self._trainable, self._hooks, self._scheduler = parameters, trainable, hooks, scheduler
        self._parameter_ids = frozenset(id(parameter) for _, parameter in parameters)
        self._trainable.remember()
        self._fewest_used = len(parameters)
        self._sends_in_pass = hooks.on_gradient == self.engine.mark_ready
        sets_flags = self._sends_in_pass and not self.engine.find_unused_parameters
        self.on_gradient = [None] * len(self._trainable.named)
        for position, (name, parameter) in enumerate(self._trainable.named):
            if id(parameter) not in self._parameter_ids:
                continue
            slot = scheduler.slots.get(id(parameter)) if sets_flags else None
            by_algorithm = self._by_algorithm(name, parameter)
            self.on_gradient[position] = by_algorithm if slot is None else scheduler.set_ready[slot]

    def _by_algorithm(self, name: str, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        """The gradient of a parameter is complete: the algorithm's turn. Runs once per parameter and pass."""
        note_use, key, on_gradient = self._used.add, id(parameter), self._hooks.on_gradient

        def on_complete(parameter: Tensor) -> None:
            note_use(key)
            on_gradient(name, parameter)

        return on_complete

    # --- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, arguments: tuple[Any, ...]) -> None:
        if is_in_backward() or self.is_within_forward:
            return
        self.engine.finish_replan()  # of a forward pass that no backward pass followed
        needs_reset = self.engine.bagua_algorithm.need_reset()
        if torch.is_grad_enabled():
            self._refuse_incomplete("before the next forward pass")
        is_changed = self._trainable.has_changed()
        # Buckets and hooks are left as they are: if the same parameters are unfrozen, all goes on as before.
        is_frozen = is_changed and self._trainable.all_frozen()
        self.passes.on(PassEvent.ALL_FROZEN if is_frozen else PassEvent.SOME_TRAINED)
        if not self.engine.module.training:
            return
        self.engine.bagua_train_step_counter += 1
        if is_frozen:
            self._reset_is_due |= needs_reset
            return
        if needs_reset or self._reset_is_due:
            self._reset_is_due = False
            self.engine.initialize_again()
        else:
            # Only then do all ranks make this pass.
            may_communicate = torch.is_grad_enabled() and self.engine.require_backward_grad_sync
            is_due = self.engine.begin_step(may_communicate)
            if is_due or (is_changed and not self.engine.replans_before_backward):
                self.engine.start_replan()
        self._hooks.before_forward(arguments)

    def _after_forward(self, outputs: list[Tensor]) -> None:
        if self.is_within_forward:
            return
        self._expect_backward(outputs)

    def before_backward(self, loss: Tensor) -> None:
        """See BaguaDistributedDataParallel.before_backward."""
        is_changed = self._trainable.has_changed() or self.engine.needs_replan
        if is_changed and self.engine.module.training and not self._trainable.all_frozen():
            self.engine.start_replan()
        self._expect_backward([loss])

    def _expect_backward(self, outputs: list[Tensor]) -> None:
        if self.engine.require_backward_grad_sync and self.passes.state is not PassState.FROZEN:
            for output in outputs:
                # A parameter would collect a hook in every step. What torch.func differentiates is no backward pass.
                if not output.is_leaf and not torch._C._functorch.is_functorch_wrapped_tensor(output):
                    hook = self._on_backward_start if self.engine.module.training else self._on_backward_start_of_eval
                    output.register_hook(hook)  # type: ignore[no-untyped-call]

    # --- backward ----------------------------------------------------------------------------------------------------

    def _on_backward_start(self, _: Tensor) -> None:
        """The outputs come first. The callback belongs to the backward pass that queues it: without this, one that
        checkpointing starts within another would end it too early. Whether this is a pass that counts shows when a
        gradient is accumulated: torch.autograd.grad accumulates none."""
        if self.engine.require_backward_grad_sync and not self._is_end_queued:
            self._queue_end()
            if self.engine.find_unused_parameters:
                self._first_node = torch._C._current_autograd_node()

    def _on_backward_start_of_eval(self, _: Tensor) -> None:
        """One that reaches no parameter may be this rank's own business: the gradients of inputs, for instance. In
        training it counts, for where unused parameters are looked for, the others wait for what this rank says."""
        if self.engine.require_backward_grad_sync and not self._is_end_queued:
            self._queue_end()

    def open_pass(self) -> None:
        """A backward pass has begun that counts; called on autograd's threads.

        Raises:
            RuntimeError: the pass before ended with an exception, when a part of its gradients was communicated; or it
                is none of autograd's own.
        """
        with self._opening:
            if self.passes.state is PassState.OPEN:
                return  # the thread of another device was first
            if self._sends_in_pass and not self.engine.find_unused_parameters:
                # Not before it is needed: the ranks compare the plan meanwhile.
                self._scheduler.before_launch = self.engine.finish_replan
            else:
                self.engine.finish_replan()
            if self.passes.state is PassState.INTERRUPTED:
                self._refuse_incomplete("at the beginning of a backward pass")
            if not self._is_end_queued:
                self._queue_end()
            self._used.clear()
            self._passes += 1
            self.passes.on(PassEvent.BEGINS)

    def _queue_end(self) -> None:
        if is_autograd_compiled():
            raise RuntimeError(compiled_autograd(self.engine.bagua_module_name))
        self._last_queued += 1
        self._is_end_queued = True
        Variable._execution_engine.queue_callback(EndOfPass(self, self._last_queued))

    def end_pass(self, number: int) -> None:
        """The backward pass is over for which this call was queued; called by autograd.

        Raises:
            RuntimeError: the module has got parameters that are not synchronized.
        """
        if number != self._last_queued:
            return
        node, self._first_node = self._first_node, None
        if self.passes.state is not PassState.OPEN:
            if node is None or not accumulates_everywhere(node):
                self._is_end_queued = False
                self._refuse_unregistered()  # whose gradients nobody sees
                return
            self.open_pass()
        self._is_end_queued = False
        self.engine.finish_replan()
        # Asked first, for what follows sets flags as well.
        nothing_came = not self._used and not (self._sends_in_pass and self._scheduler.has_begun)
        has_fewer = len(self._used) < self._fewest_used
        self._fewest_used = min(self._fewest_used, len(self._used))
        self._post_backward()
        if nothing_came or has_fewer or self._passes % _PASSES_BETWEEN_LOOKS == 1:
            self._refuse_unregistered()
        if self.engine.end_counted_pass():
            self.engine.start_replan()

    def note_interruption(self, number: int) -> None:
        """The backward pass of this number has ended with an exception."""
        if number == self._last_queued:
            self._is_end_queued, self._first_node = False, None
            if self.passes.state is PassState.OPEN:
                self.passes.on(PassEvent.RAISES)

    def abandon_interrupted(self) -> None:
        """Before anything else waits for what a pass has launched that ended with an exception: its results are of no
        use."""
        if self.passes.state in (PassState.OPEN, PassState.INTERRUPTED):
            self._scheduler.abandon_pass()

    def refuse_unsynchronized(self, position: int, parameter: Tensor) -> None:
        """A parameter that was frozen when buckets were made has got a gradient: it was unfrozen where nobody looks.
        That would differ by rank.

        Raises:
            RuntimeError: unless another module's engine synchronizes it.
        """
        if record_of(parameter) is None:
            name, _ = self._trainable.named[position]
            raise RuntimeError(unsynchronized_gradient(name, self.engine.bagua_module_name))

    def contribute_zeros(self) -> None:
        """A backward pass of the other ranks, to which this one has nothing to add. Its own gradients are lost."""
        for _, parameter in self._parameters:
            parameter.grad = None
        self._used.clear()
        if not self.engine.find_unused_parameters:  # otherwise the end of the pass finds that none was used
            for name, parameter in self._parameters:
                self._hooks.on_gradient(name, parameter)
        self._post_backward()

    def _post_backward(self) -> None:
        self.passes.on(PassEvent.ENDS)
        presence: list[Presence] = []
        # Asked once: the end of this pass may be what changes it.
        finds_unused = self.engine.find_unused_parameters and self.engine.bagua_algorithm.ranks_in_step
        if finds_unused:
            presence = [self._presence(parameter) for _, parameter in self._parameters]
            for (name, parameter), one in zip(self._parameters, presence, strict=True):
                if one is not Presence.USED:
                    self._hooks.on_gradient(name, parameter)
        self._hooks.after_backward()
        if self.engine.gradient_scale is not None and self.engine.gradient_scale != 1:
            with torch.no_grad():
                for bucket in self._scheduler.sent:
                    bucket.flattened_tensor().mul_(self.engine.gradient_scale)
                    bucket.copy_out()
        if finds_unused:
            self._forget_unused(presence)

    def _presence(self, parameter: nn.Parameter) -> Presence:
        if id(parameter) in self._used:
            return Presence.USED
        return Presence.ABSENT if parameter.grad is None else Presence.KEPT

    def _forget_unused(self, presence: list[Presence]) -> None:
        """A parameter that has a gradient on no rank keeps none, so that optimizers leave it alone."""
        what = "finding the parameters that a backward pass used"
        with failures_named(self.engine.process_group, what, in_order=True):
            anywhere = agree_on_presence(presence, self.engine.communicator, self._parameters[0][1].device)
        self.used_anywhere = set()
        for (name, parameter), one in zip(self._parameters, anywhere, strict=True):
            if one is Presence.USED:
                self.used_anywhere.add(name)
            elif one is Presence.ABSENT:
                parameter.grad = None

    # --- steps -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._refuse_incomplete("before optimizer.step()")
        self._hooks.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooks.after_step(optimizer)

    def on_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process is about to step. One that the engine was not given may step its parameters: as
        with torch's wrapper, which is given none. Without this, a gradient that is missing in the last step would be
        found by the other ranks' deadline alone."""
        if any(one is optimizer for one in self.engine.bagua_optimizers):
            return
        if any(
            id(parameter) in self._parameter_ids for group in optimizer.param_groups for parameter in group["params"]
        ):
            self._refuse_incomplete("before optimizer.step()")

    def _refuse_incomplete(self, when: str) -> None:
        interrupted = self.passes.state in (PassState.OPEN, PassState.INTERRUPTED)
        self.passes.on(PassEvent.TOLD)
        self._is_end_queued, self._first_node = False, None
        # Even if all was sent: nobody has waited for it, and the end of the pass is missing.
        is_unfinished = interrupted and self._sends_in_pass and self._scheduler.has_begun
        if interrupted:
            self._scheduler.abandon_pass()
        names = self._scheduler.end_step()
        if not names and not is_unfinished:
            return
        self._scheduler.reset()
        raise RuntimeError(
            f"{when}: "
            + incomplete_step(
                names,
                [name for name, _ in self._parameters],
                [name for name, parameter in self._parameters if name in names and not parameter.requires_grad],
                ended_with_exception=interrupted,
                has_other_parameters=self._trainable.is_outdated(),
            )
        )

    def _refuse_unregistered(self) -> None:
        names = self._trainable.unregistered() or self._scheduler.names_of_replaced()
        if names:
            raise RuntimeError(unregistered_parameters(names))


hide_from_compiler(TrainingSteps._on_backward_start)
hide_from_compiler(TrainingSteps._on_backward_start_of_eval)
