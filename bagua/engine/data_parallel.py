"""The engine of one module: it keeps the replicas alike at the start, and runs an algorithm's communication after that.

[Note: a training step]
forward pre-hook    step counter, the algorithm's re-initialisation if it asks for one, the algorithm's own hook
forward hook        a hook on the outputs, so that the start of the backward pass is seen
gradient hooks      one per parameter, on autograd's thread: the algorithm's backward hook, which usually marks the
                    gradient as ready; the scheduler launches buckets (bagua.engine.comm_scheduler)
end of backward     autograd's callback: the algorithm's post-backward hook, which usually waits for what was launched
optimizer.step      refused while a gradient is missing; around it the algorithm's pre-step and post-step hooks

The engine never names an algorithm: it knows the extension points that bagua.torch_api.algorithms.base documents.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from bagua.engine.bucket_plan import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.failure_report import failures_named
from bagua.engine.gradient_hooks import EndOfPass, algorithm_hook, marking_hook, refusing_hook
from bagua.engine.incomplete_step import failed_beginning, incomplete_step, strange_parameters
from bagua.engine.module_hooks import ModuleHooks, is_in_backward
from bagua.engine.parameters import TrainableWatch, ignored_names, trainable_parameters
from bagua.engine.replica_check import check_replicas
from bagua.engine.state_broadcast import broadcast_optimizer_state, broadcast_parameters
from bagua.engine.tensor import drop_record, record_of
from bagua.engine.unused_parameters import Presence, agree_on_presence

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.bucket import Bucket

# In the first backward pass and then in each one of so many, parameters are looked for that the module did not have
# when it was wrapped. That goes through the module's tree, which takes as long as some ten hooks.
_PASSES_BETWEEN_LOOKS = 100

_module_counts: dict[str, Iterator[int]] = defaultdict(itertools.count)

# Every engine at work, by the name of its module.
engines_by_name: weakref.WeakValueDictionary[str, BaguaDistributedDataParallel] = weakref.WeakValueDictionary()


class BaguaDistributedDataParallel:
    """Data parallelism of `module` by `algorithm`. `module.with_bagua` makes one.

    Args:
        module: every rank's replica.
        optimizers: whose state follows group rank 0, and after whose steps the algorithm may communicate.
        algorithm: a bagua.torch_api.algorithms.Algorithm.
        process_group: the ranks that train together; this process is one of them.
        bagua_module_name: alike on all ranks. None: the class's name and a count.
        gradient_as_bucket_view: what is communicated lies in the memory of its bucket.
        find_unused_parameters: parameters that a backward pass does not reach contribute zeros.
        bucket_bytes: the size at which a bucket is closed.
        first_bucket_bytes: likewise, of the first, which is launched earliest; None: as the others.

    Raises:
        ValueError: nothing to train, not a member of the group, or an optimizer whose state cannot be synchronised.
        RuntimeError: the ranks' modules differ; names the first difference.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Any,
        process_group: BaguaProcessGroup,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bucket_bytes: int | None = FIRST_BUCKET_BYTES,
    ) -> None:
        if not process_group.is_member:
            raise ValueError(
                f"this rank is no member of the process group (ranks {process_group.ranks}); call with_bagua on the"
                " members only"
            )
        kind = type(module).__name__
        self.module = module
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group
        self.bagua_module_name = bagua_module_name or f"{kind}_{next(_module_counts[kind])}"
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.bucket_bytes = bucket_bytes
        self.first_bucket_bytes = first_bucket_bytes
        self.require_backward_grad_sync = True
        # Gradients are multiplied by this after communication, where some ranks contribute nothing.
        self.gradient_scale: float | None = None
        self.bagua_train_step_counter = 0
        self.bagua_algorithm = algorithm.reify(process_group)
        self.bagua_buckets: list[Bucket] = []
        self.parameters_to_ignore = ignored_names(module)
        self._scheduler: CommScheduler | None = None
        self._hooks = ModuleHooks()
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._trainable = TrainableWatch(module, self.parameters_to_ignore)
        # All parameters are frozen at the moment, as a discriminator's are in the generator's step.
        self._is_idle = False
        # The algorithm asked for a new beginning meanwhile.
        self._owes_reset = False
        # Why there was no new beginning.
        self._failure: str | None = None
        # What algorithms seed from parameters is alike on all ranks: they were broadcast just now. Not so in a mere
        # `rebuild_buckets`.
        self.replicas_are_equal = False
        # Of the last backward pass: parameters that got a gradient; None before the first.
        self._used: set[int] = set()
        self._used_anywhere: set[str] | None = None
        # A backward pass has begun, and its end is not handled yet.
        self.pass_is_open = False
        # The last one ended with an exception, and nobody was told yet that its communication is incomplete.
        self._was_interrupted = False
        self._passes = 0
        # The algorithm communicates what the backward pass makes, as it makes it.
        self._sends_in_pass = False
        # What the gradient hooks of parameters call that only need to be marked, by the hook's slot.
        self.marks: list[Callable[[], None]] = []
        try:
            self._initialize()
        except BaseException:
            self.detach()  # so that the module can be wrapped by something that works
            raise
        engines_by_name[self.bagua_module_name] = self

    # --- what algorithms and users see -------------------------------------------------------------------------------

    @property
    def communicator(self) -> BaguaCommunicator:
        """Of all ranks that train together."""
        communicator: BaguaCommunicator = self.process_group.get_global_communicator()
        return communicator

    @property
    def is_attached(self) -> bool:
        """False after `detach`.

        Raises:
            RuntimeError: the engine is detached because it could not be initialised again.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return self._scheduler is not None

    @property
    def scheduler(self) -> CommScheduler:
        """What launches the buckets. Another one after each initialisation."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _bagua_backend(self) -> CommScheduler:
        """The scheduler, by the name that algorithms written for the old core use."""
        return self.scheduler

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronised, in the module's order. With `find_unused_parameters`, of
        those that any rank used in the last backward pass."""
        parameters = trainable_parameters(self.module, self.parameters_to_ignore)
        if self.find_unused_parameters and self._used_anywhere is not None:
            return [(name, parameter) for name, parameter in parameters if name in self._used_anywhere]
        return parameters

    @property
    def synchronized_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) in the module's order, used or not: what `init_tensors` communicates."""
        return list(self._parameters)

    def mark_ready(self, name: str, parameter: Tensor) -> None:
        """The usual backward hook: `parameter`'s tensor may be communicated."""
        record = record_of(parameter)
        if record is not None and record.mark_ready is not None:
            record.mark_ready()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate gradients without communication; the next one outside sends their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def contribute_zeros(self) -> None:
        """Take part in the communication of a backward pass that the other ranks run, with zeros. This rank's gradients
        are those of all then, and its own are lost."""
        for _, parameter in self._parameters:
            parameter.grad = None
        self._used.clear()
        if not self.find_unused_parameters:  # otherwise the end of the pass finds that none was used
            for name, parameter in self._parameters:
                self._backward_hook(name, parameter)
        self._post_backward()

    def rebuild_buckets(self) -> None:
        """Ask the algorithm for its tensors, buckets and operations again. Collective only in that all ranks do it."""
        self._release_buckets()
        tensors = self.bagua_algorithm.init_tensors(self)
        plan = plan_buckets(tensors, self.bucket_bytes, self.first_bucket_bytes)
        groups = [[tensors[index] for index in group] for group in plan]
        self.bagua_buckets = self.bagua_algorithm.tensors_to_buckets(groups, self.gradient_as_bucket_view)
        for bucket in self.bagua_buckets:
            self.bagua_algorithm.init_operations(self, bucket)
        self._scheduler = CommScheduler(self.bagua_buckets, self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's next steps depend on beside the states of module and optimizers: the step counter and the
        algorithm's own state. Save it with theirs; algorithms that let replicas differ need all three of every rank."""
        return {"train_step_counter": self.bagua_train_step_counter, "algorithm": self.bagua_algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the engine that gave `state` was. Load it last, after wrapping and after the states of module and
        optimizers, which wrapping overwrites with those of rank 0.

        Raises:
            ValueError: the state is of another algorithm, or of something else than an engine.
        """
        mine = self.state_dict()
        _check_state("an engine", mine, state)
        _check_state(type(self.bagua_algorithm).__name__, mine["algorithm"], state["algorithm"])
        self.bagua_algorithm.load_state_dict(self, state["algorithm"])
        self.bagua_train_step_counter = int(state["train_step_counter"])

    def detach(self) -> None:
        """Remove every hook and give the tensors memory of their own: the module is ordinary again."""
        self._hooks.remove()
        self._release_buckets()
        for _, parameter in self._parameters:
            # Where another engine owns it, this one was refused.
            record = record_of(parameter)
            if record is not None and record.module_name in (None, self.bagua_module_name):
                drop_record(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module has no engine: wrap it again."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_engine, ()

    # --- initialisation ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made here is used in later passes
    def _initialize(self) -> None:
        """All ranks start alike. At the beginning, when the algorithm asks for it, and when parameters were frozen or
        unfrozen (not all of them: `_is_idle`)."""
        self._hooks.remove()
        if self._scheduler is not None:
            # What an algorithm has under way works on the tensors that are about to be overwritten.
            self.bagua_algorithm.finish(self)
        before = self._parameters
        self._trainable = TrainableWatch(self.module, self.parameters_to_ignore)
        self._parameters = trainable_parameters(self.module, self.parameters_to_ignore)
        listed = {id(parameter) for _, parameter in self._parameters}
        gone = [parameter for _, parameter in before if id(parameter) not in listed]
        if gone:
            self._release_buckets()
            for parameter in gone:
                drop_record(parameter)
        if not self._parameters:
            raise ValueError(f"{type(self.module).__name__} has no parameter to synchronise: all are frozen or ignored")
        with failures_named(self.process_group, "broadcasting parameters and optimizer states"):
            check_replicas(self._parameters, self.communicator)
            broadcast_parameters(self._parameters, self.communicator)
            for optimizer in self.bagua_optimizers:
                broadcast_optimizer_state(optimizer, self.communicator)
        self.replicas_are_equal = True
        try:
            self.rebuild_buckets()
        finally:
            self.replicas_are_equal = False
        self._install_hooks()

    def _initialize_again(self) -> None:
        """After an error the module is not synchronised any more, so that training it is refused."""
        try:
            self._initialize()
        except BaseException as error:
            with contextlib.suppress(Exception):  # of the same cause
                self.detach()
            self._failure = failed_beginning(self.bagua_module_name, error)
            self._hooks.before_forward(self.module, self._refuse_after_failure)
            self._hooks.around_step(self.bagua_optimizers, self._refuse_after_failure, _nothing)
            raise

    def _refuse_after_failure(self, _: object) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(self._failure)

    def _release_buckets(self) -> None:
        if self._scheduler is None:
            return
        try:
            self.bagua_algorithm.finish(self)  # before the memory that it works on is given back
        finally:
            self._scheduler.close()
            for bucket in self.bagua_buckets:
                bucket.release()
            self.bagua_buckets, self._scheduler = [], None

    def _install_hooks(self) -> None:
        hook = self.bagua_algorithm.init_backward_hook(self)
        before_step = self.bagua_algorithm.init_pre_optimizer_step_hook(self)
        after_step = self.bagua_algorithm.init_post_optimizer_step_hook(self)
        self._hooks.before_forward(self.module, self._before_forward)
        self._hooks.after_forward(self.module, self._after_forward)
        self._sends_in_pass = hook == self.mark_ready
        plain = self._sends_in_pass and not self.find_unused_parameters
        self._backward_hook = hook
        self.marks = []
        for name, parameter in self._parameters:
            record = record_of(parameter)
            if plain and record is not None and record.mark_ready is not None:
                self._hooks.after_gradient(parameter, marking_hook(self, len(self.marks)))
                self.marks.append(record.mark_ready)
            else:
                self._hooks.after_gradient(parameter, algorithm_hook(self, name))
        for name, parameter in self._trainable.frozen():
            self._hooks.after_late_gradient(parameter, refusing_hook(self, name))

        def before(optimizer: torch.optim.Optimizer) -> None:
            self._refuse_incomplete("before optimizer.step()")
            before_step(optimizer)

        self._hooks.around_step(self.bagua_optimizers, before, after_step)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _before_forward(self, arguments: tuple[Any, ...]) -> None:
        if is_in_backward():
            return
        needs_reset = self.bagua_algorithm.need_reset()
        if torch.is_grad_enabled():
            self._refuse_incomplete("before the next forward pass")
        is_changed = self._trainable.has_changed()
        # Buckets and hooks are left as they are: if the same parameters are unfrozen, all goes on as before.
        self._is_idle = is_changed and self._trainable.all_frozen()
        if not self.module.training:
            return
        self.bagua_train_step_counter += 1
        if self._is_idle:
            self._owes_reset |= needs_reset
            return
        if is_changed or needs_reset or self._owes_reset:
            self._owes_reset = False
            self._initialize_again()
        self.bagua_algorithm.init_forward_pre_hook(self)(arguments)

    def _after_forward(self, outputs: list[Tensor]) -> None:
        if self.require_backward_grad_sync and not self._is_idle:
            for output in outputs:
                if not output.is_leaf:  # a parameter would collect a hook in every step
                    output.register_hook(self._on_backward_start)  # type: ignore[no-untyped-call]

    def _on_backward_start(self, gradient: Tensor) -> None:
        """The outputs come first. The callback belongs to the backward pass that queues it: without this, one that
        checkpointing starts within another would end it too early."""
        if self.require_backward_grad_sync and not self.pass_is_open:
            self.open_pass()

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
            RuntimeError: the module has got parameters that are not synchronised.
        """
        # Asked first, for what follows marks as well.
        nothing_came = not self._used and not (self.marks and self.scheduler.has_begun)
        self._post_backward()
        if nothing_came or self._passes % _PASSES_BETWEEN_LOOKS == 1:
            self._refuse_strangers()

    def note_interruption(self, number: int) -> None:
        """The backward pass of this number has ended with an exception."""
        if self.pass_is_open and number == self._passes:
            self.pass_is_open, self._was_interrupted = False, True

    def on_gradient(self, name: str, parameter: Tensor) -> None:
        """The gradient of a parameter is complete: the algorithm's turn."""
        self._used.add(id(parameter))
        self._backward_hook(name, parameter)

    def _post_backward(self) -> None:
        self.pass_is_open = False
        presence: list[Presence] = []
        # Asked once: the end of this pass may be what changes it.
        finds_unused = self.find_unused_parameters and self.bagua_algorithm.ranks_in_step
        if finds_unused:
            presence = [self._presence(parameter) for _, parameter in self._parameters]
            for (name, parameter), one in zip(self._parameters, presence, strict=True):
                if one is not Presence.USED:
                    self._backward_hook(name, parameter)
        self.bagua_algorithm.init_post_backward_hook(self)()
        if self.gradient_scale is not None and self.gradient_scale != 1:
            with torch.no_grad():
                for bucket in self.scheduler.sent:
                    bucket.flattened_tensor().mul_(self.gradient_scale)
                    bucket.scatter()
        if finds_unused:
            self._forget_unused(presence)

    def _presence(self, parameter: nn.Parameter) -> Presence:
        if id(parameter) in self._used:
            return Presence.USED
        return Presence.ABSENT if parameter.grad is None else Presence.KEPT

    def _forget_unused(self, presence: list[Presence]) -> None:
        """A parameter that has a gradient on no rank keeps none, so that optimizers leave it alone."""
        anywhere = agree_on_presence(presence, self.communicator, self._parameters[0][1].device)
        self._used_anywhere = set()
        for (name, parameter), one in zip(self._parameters, anywhere, strict=True):
            if one is Presence.USED:
                self._used_anywhere.add(name)
            elif one is Presence.ABSENT:
                parameter.grad = None

    def _refuse_incomplete(self, when: str) -> None:
        interrupted = self.pass_is_open or self._was_interrupted
        self.pass_is_open = self._was_interrupted = False
        # Even if all was sent: nobody has waited for it, and the end of the pass is missing.
        is_unfinished = interrupted and self._sends_in_pass and self.scheduler.has_begun
        if interrupted:
            self.scheduler.wait_pending_comm_ops()
        names = self.scheduler.end_step()
        if not names and not is_unfinished:
            return
        self.scheduler.reset()
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

    def _refuse_strangers(self) -> None:
        names = self._trainable.strangers()
        if names:
            raise RuntimeError(strange_parameters(names))


def _nothing(_: object) -> None:
    return None


def _check_state(owner: str, expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if set(given) != set(expected):
        raise ValueError(
            f"a state of {owner} has {sorted(expected)}, this has {sorted(given)}: give what"
            " bagua_ddp.state_dict() returned for a module with the same algorithm"
        )


def _no_engine() -> None:
    return None
