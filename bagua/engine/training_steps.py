"""The life of a training step: what happens in the forward pass, in the backward pass and around the step of an
optimizer, when the plan changes, and what is refused because ranks would grow apart. States: bagua.engine.step_state.

[Note: a training step]
forward pre-hook    step counter, another plan if the algorithm or the parameters ask for one, the algorithm's own hook
forward hook        a hook on the outputs, so that the start of the backward pass is seen
gradient hooks      one per parameter, on autograd's thread: usually set a ready flag, for which the scheduler launches
                    buckets (bagua.engine.comm_scheduler); otherwise the algorithm's backward hook
end of backward     autograd's callback: the algorithm's post-backward hook, which usually waits for what was launched
optimizer.step      refused while a gradient is missing; around it the algorithm's pre-step and post-step hooks

Hooks enter here, and everything that they need is below: the passes, the plans, the tuner.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bagua.collectives.tensor import drop_record, record_of
from bagua.engine.backward_passes import BackwardPasses, gradient_hook
from bagua.engine.batch_weights import BatchWeights
from bagua.engine.incomplete_step import compiled_autograd, failed_reinitialization, step_in_backward
from bagua.engine.module_hooks import ModuleHooks, call_at_end, tensors_with_gradient
from bagua.engine.plan_maker import PlanMaker
from bagua.engine.plan_tuner import PlanTuner
from bagua.engine.regrouping import FollowingModel, refuse_other_parameters, refuse_world, regrouping_of
from bagua.engine.setup import ActiveRanks, Setup
from bagua.engine.step_state import PassEvent, PassState
from bagua.engine.step_statistics import PassRecorder
from bagua.engine.training_plan import AlgorithmHooks
from bagua.engine.unused_parameters import accumulates_everywhere
from bagua.job.regrouped import Regrouped
from bagua.job.torch_internals import (
    call_with_gradient,
    forget_code_without_hooks,
    hide_from_compiler,
    is_autograd_compiled,
    is_in_backward,
)
from bagua.regroup.job_step import Turn, WorldChange

_end_numbers = itertools.count(1)


class TrainingSteps(FollowingModel):
    """Of one module, from `start` to `detach`.

    Attributes:
        plans: the plan in use, and its makers.
        passes: the backward passes.
        weights: what batches count for; None: all ranks alike.
        recorder: of the times.
        tuner: looks for the fastest setup; None: nobody does.
        count: forward passes in training so far.
        is_within_forward: calls of the module belong to a forward pass that has begun, and count as none.
        after_backward: called at the end of each backward pass that communicates, when its results are in place.
        replans_before_backward: parameters are frozen and unfrozen within forward passes: `before_backward` looks for
            that.
        failure: why there was no re-initialization.
        regrouping: takes this process on when a rank is lost; None: it was not asked for.
        end_number: see Participant.
        on_regroup: called when the job goes on without a rank, once the model has followed.
    """

    def __init__(self, setup: Setup, facade: object, active_ranks: ActiveRanks) -> None:
        self.recorder = PassRecorder()
        self.regrouping = regrouping_of(setup)
        self.plans = PlanMaker(setup, facade, self.recorder, self.regrouping is not None and self.regrouping.repeats)
        self.weights = self._batch_weights(setup)
        self.passes = BackwardPasses(active_ranks, self.weights, self._open_pass)
        self.tuner: PlanTuner | None = None
        self.after_backward: list[Callable[[], None]] = []
        self.count = 0
        self.is_within_forward = False
        self.replans_before_backward = False
        self.failure: str | None = None
        self.on_regroup: list[Callable[[WorldChange], object]] = []
        self._module = setup.module
        self._facade = facade
        self._turn: Turn  # of the module, in steps of the job, under regroup
        self._active_ranks = active_ranks
        self._hooks = ModuleHooks()
        self._of_algorithm: AlgorithmHooks
        # The algorithm asked for it while all parameters were frozen.
        self._reset_is_due = False
        # Guards the beginning of a pass: autograd has a thread for each device.
        self._opening = threading.Lock()
        # Autograd will call at the end of the running backward pass, be it one that counts or not. Such calls are
        # numbered: one that is late is of no pass.
        self._end: object | None = None
        self._last_queued = 0
        self.end_number = 0
        # Of that pass, while unused parameters are looked for.
        self._first_node: Node | None = None
        # That have stepped within it: the algorithm is told at its end.
        self._stepped_in_pass: list[torch.optim.Optimizer] = []
        self._is_left_out = False  # it belongs to a step of the job that is dropped

    def _batch_weights(self, setup: Setup) -> BatchWeights | None:
        if setup.loss is None:
            return None

        steps = weakref.ref(self)

        def parameters() -> Sequence[tuple[str, nn.Parameter]]:
            alive = steps()
            return () if alive is None else alive.plans.parameters

        def communicates() -> tuple[bool, bool]:
            alive = steps()
            assert alive is not None  # it asks in a pass of the module
            return alive.passes.communicates, alive.plans.algorithm.ranks_in_step

        return BatchWeights(setup, parameters, communicates, self.regrouping)

    # --- plans -------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made here is used in later passes
    def start(self, once_compared: Callable[[], None] | None = None) -> None:
        """All ranks start from the same values: in the beginning, and when the algorithm asks for it. What is refused
        leaves the module as it is.

        Args:
            once_compared: called when the ranks have agreed, before anything is changed.
        """
        self._hooks.remove()
        is_first = self.plans.current is None
        if not is_first:
            # What an algorithm has under way works on the tensors that are about to be overwritten.
            self._finish()

        def give_up_former() -> None:
            if once_compared is not None:
                once_compared()
            self._release()

        if self.regrouping is None:
            self.plans.start(give_up_former)
        else:
            self.regrouping.repeat(lambda: self.plans.start(give_up_former))
        self._use_plan()
        if is_first:
            forget_code_without_hooks()
        self._install_hooks()
        if self.regrouping is not None:
            self._turn = self.regrouping.add(self)

    def start_again(self) -> None:
        """As `start`, in the middle of training: after an error, training is refused."""
        with self._refusing_after_error():
            self.start()

    @torch.inference_mode(False)
    def replan(
        self, setup: Setup | None = None, in_background: bool = False, names: Collection[str] | None = None
    ) -> None:
        """Communicate by this setup, in the algorithm's present phase, what is trained now.

        Args:
            setup: None: the present one.
            in_background: a plan that was used before may still be compared; nothing is communicated before it was.
            names: of what is communicated instead, as it is.

        Raises:
            RuntimeError: the ranks do not want the same; on all of them, and nothing is changed.
            ValueError: there is nothing to train.
        """
        self._finish()
        watched, before = self.plans.trainable, self.plans.current
        self.plans.replace(setup or self.plans.setup, in_background, names)
        self._use_plan()
        if before is not None and self.plans.current is not None and before.phase != self.plans.current.phase:
            self.recorder.begin_anew()
        if self.plans.trainable is not watched:
            self._hooks.remove()
            self._install_hooks()

    def _finish(self) -> None:
        self.passes.abandon_interrupted()
        self.plans.algorithm.finish(self._facade)

    def _use_plan(self) -> None:
        self.plans.trainable.remember()  # of what is trained now
        self._follow_plan()

    def _follow_plan(self) -> None:
        plan = self.plans.current
        assert plan is not None
        self.recorder.forget()
        self.passes.local = self.plans.local
        self._of_algorithm = AlgorithmHooks.of(plan.algorithm, self._facade)
        self.passes.use_plan(plan, self._of_algorithm, self.plans.trainable)

    def _install_hooks(self) -> None:
        hooks, optimizers = self._hooks, self.plans.setup.optimizers
        if self.plans.setup.counts_batch:
            hooks.before_forward_with_keywords(self._module, self._count_batch)
        hooks.before_forward(self._module, self._before_forward)
        hooks.after_forward(self._module, self._after_forward)
        for position, (_, parameter) in enumerate(self.plans.trainable.named):
            hooks.after_gradient(parameter, gradient_hook(self.passes, position))
        hooks.before_all_steps(self)
        hooks.after_each_step(optimizers, self._after_step)

    def detach(self) -> None:
        """Remove every hook and give the tensors memory of their own: the module is ordinary again."""
        self._hooks.remove()
        if self.regrouping is not None:
            self.regrouping.remove(self)
        try:
            self._release()
        finally:
            self.plans.forget_kept()
            for _, parameter in self.plans.parameters:
                # Where another engine owns it, this one was refused.
                record = record_of(parameter)
                if record is not None and record.module_name in (None, self.plans.setup.name):
                    drop_record(parameter)

    def _release(self) -> None:
        if self.plans.current is None:
            return
        try:
            self._finish()  # before the memory that it works on is given back
        finally:
            self.plans.release()

    @contextlib.contextmanager
    def _refusing_after_error(self) -> Iterator[None]:
        """A change in the middle of training. After an error the module is not synchronized any more, so that training
        it is refused."""
        try:
            yield
        except BaseException as error:
            setup = self.plans.setup
            with contextlib.suppress(Exception):  # of the same cause
                self.detach()
            self.failure = failed_reinitialization(setup.name, error)
            self._hooks.before_forward(self._module, self._refuse_after_failure)
            self._hooks.before_each_step(setup.optimizers, self._refuse_after_failure)
            raise

    def _refuse_after_failure(self, *_: object) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(self.failure)

    def communicate(self, names: Collection[str]) -> None:
        """See AlgorithmFacade.communicate."""
        with self._refusing_after_error():
            self.replan(names=names)

    def _replan_in_training(self, setup: Setup | None = None) -> None:
        with self._refusing_after_error():
            self.replan(setup, in_background=True)

    def _confirm_plan(self) -> None:
        """Before anything is communicated by a plan that was made in the background."""
        with self._refusing_after_error():
            try:
                self.plans.confirm()
            except BaseException:
                # Only gradients are communicated by such plans, and of these none.
                if self.plans.current is not None:
                    self.plans.current.scheduler.reset()
                raise

    # --- tuning ------------------------------------------------------------------------------------------------------

    @property
    def _active_tuner(self) -> PlanTuner | None:
        return None if self._active_ranks.is_uneven else self.tuner

    @property
    def _tunes_after_pass(self) -> bool:
        """Gradients survive a replan. Of what else is in buckets, the optimizer has to have the result first."""
        return self.plans.current is not None and self.plans.current.holds_gradients

    def _tuned_setup(self) -> Setup | None:
        """If it is time for another one."""
        tuner = self._active_tuner
        if tuner is None or not tuner.is_due:
            return None
        setup = tuner.next_setup(self.plans.setup)
        if tuner.is_done:
            self.tuner = None
            self.plans.forget_kept()  # what was tried gives its memory back
        return None if setup.communication == self.plans.setup.communication else setup

    # --- forward -----------------------------------------------------------------------------------------------------

    def _count_batch(self, _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.weights is not None and not is_in_backward() and not self.is_within_forward:
            self.weights.count(arguments, keywords)

    def _before_forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.is_within_forward or is_in_backward():
            return
        has_graph = torch.is_grad_enabled()
        if self.regrouping is not None and module.training and has_graph:
            self.regrouping.begin_forward()
        plans, passes = self.plans, self.passes
        if plans.unconfirmed is not None:
            self._confirm_plan()  # of a forward pass that no backward pass followed
        hooks = self._of_algorithm
        needs_reset = hooks.need_reset is not None and hooks.need_reset()
        if has_graph:
            self._refuse_incomplete("before the next forward pass")
        is_changed = plans.trainable.has_changed()
        # Buckets and hooks are left as they are: if the same parameters are unfrozen, all goes on as before.
        is_frozen = is_changed and plans.trainable.all_frozen()
        if is_frozen or passes.state is PassState.FROZEN:
            passes.note_frozen(is_frozen)
        if not module.training:
            return
        self.count += 1
        if is_frozen:
            self._reset_is_due |= needs_reset
            return
        if needs_reset or self._reset_is_due:
            self._reset_is_due = False
            self.start_again()
        else:
            if self.recorder.log_every:
                self.recorder.log(plans.setup.name, self.count - 1)
            if hooks.settle is not None:
                hooks.settle(self._facade)
            if is_changed or hooks.may_replan or self.tuner is not None:
                setup = self._due_setup(passes.misses_trained(is_changed), has_graph)
                if setup is not None:
                    self._replan_in_training(setup)
        # Of the plan that is in use by now.
        before_forward = self._of_algorithm.before_forward
        if before_forward is not None:
            before_forward(arguments)
        if self.weights is not None and has_graph:
            self.weights.begin_forward()

    def _due_setup(self, is_changed: bool, has_graph: bool) -> Setup | None:
        """The setup by which to replan, if that is due."""
        setup = None
        # Only then do all ranks make this pass.
        if has_graph and self.passes.communicates:
            if self.tuner is not None and not self._tunes_after_pass:
                setup = self._tuned_setup()
            is_changed |= self.plans.is_outdated
        # What is exchanged after it was trained is planned for before the forward pass uses it.
        waits = self.replans_before_backward and self.plans.algorithm.kept_in_plan is None
        if is_changed and self.regrouping is not None:
            refuse_other_parameters()
        return setup or (self.plans.setup if is_changed and not waits else None)

    def _after_forward(self, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        if not self.is_within_forward:
            self._expect_backward(tensors_with_gradient(output) if type(output) is not Tensor else (output,))

    def before_backward(self, loss: Tensor) -> None:
        """See DataParallelEngine.before_backward."""
        trainable, algorithm = self.plans.trainable, self.plans.algorithm
        if self._module.training and not trainable.all_frozen():
            is_changed = trainable.has_changed()
            if is_changed and algorithm.kept_in_plan is not None:
                # Another part's turn: the step of the one before is over.
                algorithm.settle(self._facade)
                trainable.remember()
            if self.passes.misses_trained(is_changed) or self.plans.is_outdated:
                self._replan_in_training()
        self._expect_backward([loss])

    def _expect_backward(self, outputs: Sequence[Tensor]) -> None:
        if self.passes.communicates and self.passes.state is not PassState.FROZEN:
            hook = self._on_backward_start if self._module.training else self._on_backward_start_of_eval
            for output in outputs:
                # A leaf needs no gradient, or is a parameter, which would collect a hook in every step. What torch.func
                # differentiates is no backward pass.
                if not output.is_leaf and not torch._C._functorch.is_functorch_wrapped_tensor(output):
                    call_with_gradient(output, hook)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _on_backward_start(self, _: Tensor) -> None:
        """The outputs come first. The callback belongs to the backward pass that queues it: without this, one that
        checkpointing starts within another would end it too early. Whether this is a pass that counts shows when a
        gradient is accumulated: torch.autograd.grad accumulates none."""
        if self.passes.communicates and self._end is None:
            self._queue_end()
            if self.plans.setup.find_unused_parameters:
                self._first_node = torch._C._current_autograd_node()

    def _on_backward_start_of_eval(self, _: Tensor) -> None:
        """One that reaches no parameter may be this rank's own business: the gradients of inputs, for instance. In
        training it counts, for where unused parameters are looked for, the others wait for what this rank says."""
        if self.passes.communicates and self._end is None:
            self._queue_end()

    def _open_pass(self) -> bool:
        """A backward pass has begun; called on autograd's threads.

        Returns:
            whether it counts. Otherwise it belongs to a step of the job that is dropped (bagua.regroup.job_step).

        Raises:
            RuntimeError: the pass before ended with an exception, when a part of its gradients was communicated; or it
                is none of autograd's own.
        """
        with self._opening:
            if self.passes.state is PassState.OPEN or self._is_left_out:
                return not self._is_left_out  # it is not the first
            if self.plans.unconfirmed is not None:
                self._confirm_plan()
            if self.passes.state is PassState.INTERRUPTED:
                self._refuse_incomplete("at the beginning of a backward pass")
            if self.regrouping is not None:
                self._is_left_out = not self.regrouping.begin_pass(self._turn)
            if self._end is None:
                self._queue_end()
            if self._is_left_out:
                return False
            regrouping = self.regrouping
            self.passes.begin(sends_at_end=regrouping is not None and regrouping.repeats and regrouping.sends_in_order)
            return True

    def _queue_end(self) -> None:
        if is_autograd_compiled():
            raise RuntimeError(compiled_autograd(self.plans.setup.name))
        self._last_queued += 1
        self.end_number = next(_end_numbers)
        self._stepped_in_pass.clear()
        end = self._end_pass if self.regrouping is None else self._end_or_drop_pass
        self._end = call_at_end(end, self._last_queued, self._note_interruption)

    def _end_pass(self, number: int) -> bool:
        """The backward pass is over for which this call was queued; called by autograd.

        Returns:
            whether it was one that counts.

        Raises:
            RuntimeError: the module has got parameters that are not synchronized.
        """
        if number != self._last_queued:
            return False
        node, self._first_node = self._first_node, None
        if self.passes.state is not PassState.OPEN:
            if node is None or not accumulates_everywhere(node):
                self._end = None
                self.passes.refuse_unregistered()  # whose gradients nobody sees
                return False
            self._open_pass()
        self._end = None
        if self.passes.end():
            self.passes.refuse_unregistered()
        if self._stepped_in_pass:
            stepped, self._stepped_in_pass = self._stepped_in_pass, []
            for optimizer in stepped:
                if self._of_algorithm.after_step is not None:
                    self._of_algorithm.after_step(optimizer)
        for function in tuple(self.after_backward):
            function()
        # All ranks make it. Forward passes one may make alone.
        if self.tuner is not None and self._active_tuner is not None:
            self._active_tuner.count_pass()
            setup = self._tuned_setup() if self._tunes_after_pass else None
            if setup is not None:
                self._replan_in_training(setup)
        return True

    def _end_or_drop_pass(self, number: int) -> None:
        """As `_end_pass`, where the job goes on without a rank that is lost meanwhile: then the step is dropped, or
        repeated."""
        regrouping = self.regrouping
        assert regrouping is not None
        if self._is_left_out:
            if number == self._last_queued:
                self.drop_step()
            return
        try:
            with regrouping.ending_pass():
                counts = self._end_pass(number)
        except Regrouped:
            regrouping.settle_pass()
        else:
            if counts and regrouping.repeats:
                regrouping.end_pass()

    def _note_interruption(self, end: object) -> None:
        """The backward pass has ended with an exception at whose end autograd would have called."""
        if end is self._end:
            self._end, self._first_node, self._is_left_out = None, None, False
            if self.passes.state is PassState.OPEN:
                self.passes.state = PassEvent.RAISES[PassState.OPEN]

    # --- regrouping: see bagua.regroup.job_step.Participant ------------------------------------------------------

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last step was, because a rank was lost. Until the next backward pass begins."""
        return self.regrouping is not None and self._turn.is_dropped

    @property
    def name(self) -> str:
        return self.plans.setup.name

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.plans.setup.optimizers

    def synchronizes(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.plans.current is not None and self.passes.synchronizes(optimizer)

    @property
    def weighs_batches(self) -> bool:
        return self.weights is not None

    @property
    def is_in_open_pass(self) -> bool:
        return self.passes.state is PassState.OPEN

    def rewind(self) -> None:
        self._end, self._first_node = None, None
        self._stepped_in_pass.clear()
        if self.plans.current is not None:
            self.passes.keep_unsent()
            self.passes.drop()
            for _, parameter in self.plans.parameters:
                parameter.grad = None
        if self.weights is not None:
            self.weights.rewind()

    def reduce_again(self) -> None:
        self.passes.begin_again()
        self._end_pass(self._last_queued)

    def drop_step(self) -> None:
        self._end, self._first_node, self._is_left_out = None, None, False
        self._stepped_in_pass.clear()
        if self.plans.current is not None:
            self.passes.drop()
        if self.weights is not None:
            self.weights.rewind()
        # Also of those that are not synchronized: the optimizer steps them, too.
        stepped = (one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"])
        for parameter in itertools.chain(self._module.parameters(), stepped):
            parameter.grad = None

    @torch.inference_mode(False)
    def follow_world(self) -> None:
        refuse_world(self.plans.setup)
        self.plans.follow_world()
        self._follow_plan()

    def tell_users(self, change: WorldChange) -> None:
        for callback in tuple(self.on_regroup):
            callback(change)

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def is_in_pass(self) -> bool:
        """Whether this thread is in a backward pass of the module."""
        return (self._end is not None or self.passes.state is PassState.OPEN) and is_in_backward()

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process is about to step. One that the engine was not given may step its parameters: as
        with torch's wrapper, which is given none. Without this, a gradient that is missing in the last step would be
        found by the other ranks' deadline alone. A step within the backward pass, of a hook, does not wait for
        gradients: it is right where the pass communicates nothing."""
        setup = self.plans.setup
        is_listed = False
        for one in setup.optimizers:
            is_listed |= one is optimizer
        if not (is_listed or self.passes.synchronizes(optimizer)):
            return
        if not self.is_in_pass:
            self._refuse_incomplete("before optimizer.step()")
        elif (plan := self.plans.current) is not None and plan.buckets and plan.algorithm.kept_in_plan is None:
            raise RuntimeError(step_in_backward(setup.name))
        if self.weights is not None:
            self.weights.before_step()
        before_step = self._of_algorithm.before_step
        if is_listed and before_step is not None:
            before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        after_step = self._of_algorithm.after_step
        if after_step is None:
            return
        if not self.is_in_pass:
            after_step(optimizer)
        elif all(one is not optimizer for one in self._stepped_in_pass):
            self._stepped_in_pass.append(optimizer)

    def _refuse_incomplete(self, when: str) -> None:
        self._end, self._first_node = None, None
        self.passes.refuse_incomplete(when)


# Compiled code may run backward passes.
hide_from_compiler(TrainingSteps._end_pass)
hide_from_compiler(TrainingSteps._end_or_drop_pass)
hide_from_compiler(TrainingSteps._note_interruption)
hide_from_compiler(TrainingSteps._on_backward_start)
hide_from_compiler(TrainingSteps._on_backward_start_of_eval)
