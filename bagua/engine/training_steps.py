"""The life of a training step: what the engine does in the forward pass, in the backward pass and around the step of an
optimizer, and what it refuses there because ranks would grow apart.

[Note: a training step]
forward pre-hook    step counter, the algorithm's re-initialization if it asks for one, the algorithm's own hook
forward hook        a hook on the outputs, so that the start of the backward pass is seen
gradient hooks      one per parameter, on autograd's thread: the algorithm's backward hook, which usually marks the
                    gradient as ready; the scheduler launches buckets (bagua.engine.comm_scheduler)
end of backward     autograd's callback: the algorithm's post-backward hook, which usually waits for what was launched
optimizer.step      refused while a gradient is missing; around it the algorithm's pre-step and post-step hooks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from bagua.collectives.failure_report import failures_named
from bagua.engine.gradient_hooks import (
    EndOfPass,
    algorithm_hook,
    foreign_step_hook,
    marking_hook,
    refusing_hook,
)
from bagua.engine.incomplete_step import incomplete_step, unregistered_parameters
from bagua.engine.module_hooks import ModuleHooks, is_in_backward
from bagua.engine.parameters import TrainableWatch
from bagua.engine.tensor import record_of
from bagua.engine.unused_parameters import Presence, agree_on_presence, will_reach_any

if TYPE_CHECKING:
    from bagua.engine.data_parallel import BaguaDistributedDataParallel

# In the first backward pass and then in each one of so many, parameters are looked for that the module did not have
# when it was wrapped. That goes through the module's tree, which takes as long as some ten hooks.
_PASSES_BETWEEN_LOOKS = 100


class TrainingSteps:
    """Of the module of one engine, from `install` on.

    Attributes:
        engine: whose buckets are communicated.
        pass_is_open: a backward pass has begun, and its end is not handled yet.
        ready_flags: what the gradient hooks of parameters call that only need to be marked, by the hook's slot.
        used_anywhere: names of parameters that got a gradient in the last backward pass, on any rank; None before the
            first, and without `find_unused_parameters`.
    """

    def __init__(self, engine: BaguaDistributedDataParallel) -> None:
        self.engine = engine
        self.pass_is_open = False
        self.ready_flags: list[Callable[[], None]] = []
        self.used_anywhere: set[str] | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._parameter_ids: frozenset[int] = frozenset()
        self._trainable: TrainableWatch
        self._backward_hook: Callable[[str, Tensor], None]
        # All parameters are frozen at the moment, as a discriminator's are in the generator's step.
        self._is_idle = False
        # The algorithm asked for a re-initialization meanwhile.
        self._owes_reset = False
        # Parameters that got a gradient in the last backward pass.
        self._used: set[int] = set()
        # The last pass ended with an exception, and nobody was told yet that its communication is incomplete.
        self._was_interrupted = False
        self._passes = 0
        # The algorithm communicates what the backward pass makes, as it makes it.
        self._sends_in_pass = False

    def install(
        self, hooks: ModuleHooks, parameters: Sequence[tuple[str, nn.Parameter]], trainable: TrainableWatch
    ) -> None:
        """Take part in the steps from now on, with the buckets that there are.

        Args:
            hooks: to be removed before the next call.
            parameters: that are synchronized.
            trainable: of the module, as it is now.
        """
        self._parameters, self._trainable = list(parameters), trainable
        self._parameter_ids = frozenset(id(parameter) for _, parameter in parameters)
        hook = self.engine.bagua_algorithm.init_backward_hook(self.engine)
        before_step = self.engine.bagua_algorithm.init_pre_optimizer_step_hook(self.engine)
        after_step = self.engine.bagua_algorithm.init_post_optimizer_step_hook(self.engine)
        hooks.before_forward(self.engine.module, self._before_forward)
        hooks.after_forward(self.engine.module, self._after_forward)
        self._sends_in_pass = hook == self.engine.mark_ready
        plain = self._sends_in_pass and not self.engine.find_unused_parameters
        self._backward_hook = hook
        self.ready_flags = []
        for name, parameter in self._parameters:
            record = record_of(parameter)
            if plain and record is not None and record.mark_ready is not None:
                hooks.after_gradient(parameter, marking_hook(self, len(self.ready_flags)))
                self.ready_flags.append(record.mark_ready)
            else:
                hooks.after_gradient(parameter, algorithm_hook(self, name))
        for name, parameter in trainable.frozen():
            hooks.after_late_gradient(parameter, refusing_hook(self, name))

        def before(optimizer: torch.optim.Optimizer) -> None:
            self._refuse_incomplete("before optimizer.step()")
            before_step(optimizer)

        hooks.around_step(self.engine.bagua_optimizers, before, after_step)
        hooks.before_steps_of_others(foreign_step_hook(self))

    # --- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, arguments: tuple[Any, ...]) -> None:
        if is_in_backward():
            return
        needs_reset = self.engine.bagua_algorithm.need_reset()
        if torch.is_grad_enabled():
            self._refuse_incomplete("before the next forward pass")
        is_changed = self._trainable.has_changed()
        # Buckets and hooks are left as they are: if the same parameters are unfrozen, all goes on as before.
        self._is_idle = is_changed and self._trainable.all_frozen()
        if not self.engine.module.training:
            return
        self.engine.bagua_train_step_counter += 1
        if self._is_idle:
            self._owes_reset |= needs_reset
            return
        if is_changed or needs_reset or self._owes_reset:
            self._owes_reset = False
            self.engine.initialize_again()
        self.engine.bagua_algorithm.init_forward_pre_hook(self.engine)(arguments)

    def _after_forward(self, outputs: list[Tensor]) -> None:
        if self.engine.require_backward_grad_sync and not self._is_idle:
            for output in outputs:
                # A parameter would collect a hook in every step. What torch.func differentiates is no backward pass.
                if not output.is_leaf and not torch._C._functorch.is_functorch_wrapped_tensor(output):
                    hook = self._on_backward_start if self.engine.module.training else self._on_backward_start_of_eval
                    output.register_hook(hook)  # type: ignore[no-untyped-call]

    # --- backward ----------------------------------------------------------------------------------------------------

    def _on_backward_start(self, _: Tensor) -> None:
        """The outputs come first. The callback belongs to the backward pass that queues it: without this, one that
        checkpointing starts within another would end it too early."""
        if self.engine.require_backward_grad_sync and not self.pass_is_open:
            self.open_pass()

    def _on_backward_start_of_eval(self, gradient: Tensor) -> None:
        """One that reaches no parameter may be this rank's own business: the gradients of inputs, for instance. In
        training it counts, for where unused parameters are looked for, the others wait for what this rank says."""
        if not self.engine.find_unused_parameters or will_reach_any(parameter for _, parameter in self._parameters):
            self._on_backward_start(gradient)

    def open_pass(self) -> None:
        """A backward pass has begun; called on autograd's thread.

        Raises:
            RuntimeError: the pass before ended with an exception, when a part of its gradients was communicated.
        """
        if self._was_interrupted:
            self._refuse_incomplete("at the beginning of a backward pass")
        self.pass_is_open = True
        self._used.clear()
        self._passes += 1
        Variable._execution_engine.queue_callback(EndOfPass(self, self._passes))

    def end_pass(self) -> None:
        """The backward pass is over; called by autograd.

        Raises:
            RuntimeError: the module has got parameters that are not synchronized.
        """
        # Asked first, for what follows marks as well.
        nothing_came = not self._used and not (self.ready_flags and self.engine.scheduler.has_begun)
        self._post_backward()
        if nothing_came or self._passes % _PASSES_BETWEEN_LOOKS == 1:
            self._refuse_unregistered()

    def note_interruption(self, number: int) -> None:
        """The backward pass of this number has ended with an exception."""
        if self.pass_is_open and number == self._passes:
            self.pass_is_open, self._was_interrupted = False, True

    def on_gradient(self, name: str, parameter: Tensor) -> None:
        """The gradient of a parameter is complete: the algorithm's turn."""
        self._used.add(id(parameter))
        self._backward_hook(name, parameter)

    def contribute_zeros(self) -> None:
        """A backward pass of the other ranks, to which this one has nothing to add. Its own gradients are lost."""
        for _, parameter in self._parameters:
            parameter.grad = None
        self._used.clear()
        if not self.engine.find_unused_parameters:  # otherwise the end of the pass finds that none was used
            for name, parameter in self._parameters:
                self._backward_hook(name, parameter)
        self._post_backward()

    def _post_backward(self) -> None:
        self.pass_is_open = False
        presence: list[Presence] = []
        # Asked once: the end of this pass may be what changes it.
        finds_unused = self.engine.find_unused_parameters and self.engine.bagua_algorithm.ranks_in_step
        if finds_unused:
            presence = [self._presence(parameter) for _, parameter in self._parameters]
            for (name, parameter), one in zip(self._parameters, presence, strict=True):
                if one is not Presence.USED:
                    self._backward_hook(name, parameter)
        self.engine.bagua_algorithm.init_post_backward_hook(self.engine)()
        if self.engine.gradient_scale is not None and self.engine.gradient_scale != 1:
            with torch.no_grad():
                for bucket in self.engine.scheduler.sent:
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
        with failures_named(self.engine.process_group, "finding the parameters that a backward pass used"):
            anywhere = agree_on_presence(presence, self.engine.communicator, self._parameters[0][1].device)
        self.used_anywhere = set()
        for (name, parameter), one in zip(self._parameters, anywhere, strict=True):
            if one is Presence.USED:
                self.used_anywhere.add(name)
            elif one is Presence.ABSENT:
                parameter.grad = None

    # --- steps that are refused --------------------------------------------------------------------------------------

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
        interrupted = self.pass_is_open or self._was_interrupted
        self.pass_is_open = self._was_interrupted = False
        # Even if all was sent: nobody has waited for it, and the end of the pass is missing.
        is_unfinished = interrupted and self._sends_in_pass and self.engine.scheduler.has_begun
        if interrupted:
            self.engine.scheduler.wait_pending_comm_ops()
        names = self.engine.scheduler.end_step()
        if not names and not is_unfinished:
            return
        self.engine.scheduler.reset()
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
        names = self._trainable.unregistered()
        if names:
            raise RuntimeError(unregistered_parameters(names))
