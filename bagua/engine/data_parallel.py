"""The engine of one module: it keeps the replicas alike at the start, and runs an algorithm's communication after that.

What happens in each step: bagua.engine.training_steps. The engine never names an algorithm: it knows the extension
points that bagua.torch_api.algorithms.base documents.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bagua.collectives.failure_report import failures_named
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES, plan_buckets
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.incomplete_step import failed_reinitialization
from bagua.engine.module_hooks import ModuleHooks
from bagua.engine.parameters import TrainableWatch, ignored_names, left_out_parameters, trainable_parameters
from bagua.engine.replica_check import Replica
from bagua.engine.state_broadcast import broadcast_optimizer_state, broadcast_parameters, refuse_lbfgs
from bagua.engine.tensor import drop_record, record_of, set_ready
from bagua.engine.training_plan import AlgorithmHooks, KeptPlans, TrainingPlan
from bagua.engine.training_steps import TrainingSteps

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.bucket import Bucket

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
        bucket_bytes: the size at which a bucket is closed; None: the default of its device.
        first_bucket_bytes: likewise, of the first, which is launched earliest; None: as the others.
        once_compared: called when the ranks have compared models, optimizers and settings, before anything is changed.

    Raises:
        ValueError: nothing to train, not a member of the group, or an optimizer whose state cannot be synchronized.
        RuntimeError: the ranks' modules or optimizers differ; names the first difference.
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
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = FIRST_BUCKET_BYTES,
        once_compared: Callable[[], None] | None = None,
    ) -> None:
        if not process_group.is_member:
            raise ValueError(
                f"This rank is not a member of the process group (ranks {process_group.ranks}).\n"
                "Call with_bagua() on the members only."
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
        self._shared_settings = dict(getattr(algorithm, "shared_settings", dict)())
        self.bagua_buckets: list[Bucket] = []
        self.parameters_to_ignore = ignored_names(module)
        self._plan: TrainingPlan | None = None
        self._kept_plans = KeptPlans()
        self._scheduler: CommScheduler | None = None
        self._hooks = ModuleHooks()
        self._trainable: TrainableWatch
        self._parameters: list[tuple[str, nn.Parameter]] = []
        # Ids of parameters that all ranks had the same values of, from a broadcast on.
        self._broadcast: set[int] = set()
        # Of the comparison of plans, which goes on while a forward pass runs.
        self._finish_check: Callable[[], None] | None = None
        self._steps = TrainingSteps(self)
        # Why there was no re-initialization.
        self._failure: str | None = None
        # What algorithms seed from parameters is the same on all ranks: they were broadcast just now. Not so in a mere
        # `replan`.
        self.replicas_are_equal = False
        try:
            self._initialize(once_compared)
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
            RuntimeError: the engine is detached because it could not be initialized again.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return self._scheduler is not None

    @property
    def scheduler(self) -> CommScheduler:
        """What launches the buckets. Another one after each initialization."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _bagua_backend(self) -> CommScheduler:
        """The scheduler, by the name that algorithms written for the old core use."""
        return self.scheduler

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronized, in the module's order. With `find_unused_parameters`, of
        those that any rank used in the last backward pass."""
        parameters = trainable_parameters(self.module, self.parameters_to_ignore)
        used = self._steps.used_anywhere
        if self.find_unused_parameters and used is not None:
            return [(name, parameter) for name, parameter in parameters if name in used]
        return parameters

    @property
    def synchronized_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) in the module's order, used or not: what `init_tensors` communicates."""
        return list(self._parameters)

    def mark_ready(self, name: str, parameter: Tensor) -> None:
        """The usual backward hook: `parameter`'s tensor may be communicated."""
        set_ready(parameter)

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
        self._steps.contribute_zeros()

    @property
    def needs_replan(self) -> bool:
        """Whether the algorithm has come to another phase than the buckets are of."""
        return self._plan is not None and self._plan.phase != self._phase

    def replan(self) -> None:
        """Change what is communicated, between two steps: to the parameters that need a gradient now, the algorithm's
        present phase, and `bucket_bytes` and `first_bucket_bytes`. Every rank calls it. All values stay as they are,
        gradients too; nothing is broadcast, but parameters that were never synchronized before.

        Raises:
            RuntimeError: the ranks do not want the same; on all of them, and nothing is changed.
            ValueError: there is nothing to train.
        """
        self._replan()
        self.confirm_plan()

    def rebuild_buckets(self) -> None:
        """As `replan`, with new buckets in any case. Every rank calls it."""
        self._kept_plans.clear()
        self._replan()

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

    def wait_pending_comm_ops(self) -> None:
        """Wait for what has been launched, so that this thread may use the group."""
        if self._scheduler is not None:
            self._scheduler.wait_pending_comm_ops()

    def detach(self) -> None:
        """Remove every hook and give the tensors memory of their own: the module is ordinary again."""
        self._hooks.remove()
        try:
            self._release_buckets()
        finally:
            self._kept_plans.clear()
            for _, parameter in self._parameters:
                # Where another engine owns it, this one was refused.
                record = record_of(parameter)
                if record is not None and record.module_name in (None, self.bagua_module_name):
                    drop_record(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module has no engine: wrap it again."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_engine, ()

    # --- initialization ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made here is used in later passes
    def _initialize(self, once_compared: Callable[[], None] | None = None) -> None:
        """All ranks start from the same values: in the beginning, and when the algorithm asks for it. What is refused
        leaves the module as it is."""
        self._hooks.remove()
        if self._plan is not None:
            # What an algorithm has under way works on the tensors that are about to be overwritten.
            self.bagua_algorithm.finish(self)
        self._watch_parameters()
        parameters = self._wanted_parameters()
        with failures_named(self.process_group, "broadcasting parameters and optimizer states"):
            replica = self._describe(parameters)
            replica.check(self.communicator)
            for optimizer in self.bagua_optimizers:
                refuse_lbfgs(optimizer)
            if once_compared is not None:
                once_compared()
            self._release_buckets()
            self._replace_parameters(parameters)
            broadcast_parameters(parameters, self.communicator)
            self._broadcast = {id(parameter) for _, parameter in parameters}
            left_out = left_out_parameters(self.module, self.parameters_to_ignore)
            for optimizer in self.bagua_optimizers:
                broadcast_optimizer_state(optimizer, self.communicator, left_out)
        self.replicas_are_equal = True
        try:
            self._use(self._make_plan(replica))
        finally:
            self.replicas_are_equal = False
        self._steps.install(self._hooks, self._trainable)

    @torch.inference_mode(False)
    def _replan(self) -> None:
        """The comparison with the other ranks may still be under way for a plan that was used before: `confirm_plan`
        ends it, before anything is communicated."""
        before = self._plan
        assert before is not None
        self.bagua_algorithm.finish(self)
        plan = self._kept_plans.take(self._plan_key())
        if plan is not None and not plan.is_valid:
            plan.scheduler.close()
            plan = None
        has_others = plan is None and self._trainable.is_outdated()
        if has_others:
            self._watch_parameters()
        parameters = list(plan.parameters) if plan is not None else self._wanted_parameters()
        replica = plan.replica if plan is not None else self._describe(parameters)
        with failures_named(self.process_group, "agreeing on the parameters to communicate"):
            finish_check = replica.start_check(self.communicator)
            if plan is None:
                finish_check()
            else:
                self._finish_check = finish_check
            self._put_away(before)
            self._replace_parameters(parameters)
            new = [one for one in parameters if id(one[1]) not in self._broadcast]
            if new:
                broadcast_parameters(new, self.communicator)
                self._broadcast.update(id(parameter) for _, parameter in new)
        if plan is None:
            plan = self._make_plan(replica)
        else:
            plan.resume()
        if plan.holds_gradients and before.holds_gradients:
            plan.scheduler.inherit(before.scheduler)
        self._use(plan)
        if has_others:
            self._hooks.remove()
            self._steps.install(self._hooks, self._trainable)

    def confirm_plan(self) -> None:
        """Wait for what the other ranks say of the plan.

        Raises:
            RuntimeError: they want another one.
        """
        finish, self._finish_check = self._finish_check, None
        if finish is not None:
            with failures_named(self.process_group, "agreeing on the parameters to communicate"):
                finish()

    def _watch_parameters(self) -> None:
        self._kept_plans.clear()
        # While the former ones live, no other has the id of one of them.
        watch = TrainableWatch(self.module, self.parameters_to_ignore)
        self._broadcast &= {id(parameter) for _, parameter in watch.named}
        self._trainable = watch

    def _wanted_parameters(self) -> list[tuple[str, nn.Parameter]]:
        parameters = trainable_parameters(self.module, self.parameters_to_ignore)
        if not parameters:
            raise ValueError(
                f"{type(self.module).__name__} has no parameters to synchronize: all are frozen or ignored.\n"
                "Unfreeze at least one (requires_grad_()), or train the module without Bagua."
            )
        return parameters

    def _plan_key(self) -> Hashable:
        sizes = (self.bucket_bytes, self.first_bucket_bytes)
        return (self._phase, self._trainable.flags(), sizes)

    @property
    def _phase(self) -> Hashable:
        phase: Hashable = getattr(self.bagua_algorithm, "phase", None)
        return phase

    def _describe(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> Replica:
        return Replica(parameters, optimizers=self.bagua_optimizers, settings=self._settings())

    def _make_plan(self, replica: Replica) -> TrainingPlan:
        """Ask the algorithm for its tensors, buckets and operations."""
        tensors = self.bagua_algorithm.init_tensors(self)
        groups = plan_buckets(tensors, self.bucket_bytes, self.first_bucket_bytes)
        buckets = self.bagua_algorithm.tensors_to_buckets(
            [[tensors[index] for index in group] for group in groups], self.gradient_as_bucket_view
        )
        for bucket in buckets:
            self.bagua_algorithm.init_operations(self, bucket)
        scheduler = CommScheduler(buckets, self.process_group)
        return TrainingPlan(self._plan_key(), self._phase, replica, self._parameters, buckets, scheduler)

    def _use(self, plan: TrainingPlan) -> None:
        self._plan, self._scheduler, self.bagua_buckets = plan, plan.scheduler, list(plan.buckets)
        self._steps.follow(plan.parameters, self._trainable, AlgorithmHooks.of(self), plan.scheduler)

    def _put_away(self, plan: TrainingPlan) -> None:
        plan.suspend()
        if plan.holds_gradients:
            self._kept_plans.keep(plan, limit_bytes=sum(one.nbytes for _, one in self._trainable.named))
        else:
            plan.scheduler.close()

    def _replace_parameters(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        before, self._parameters = self._parameters, parameters
        names = {id(parameter): name for name, parameter in parameters}
        for name, parameter in before:
            # Also those that have another name now, as pruning and parametrizations give it: records keep theirs.
            if names.get(id(parameter)) != name:
                drop_record(parameter)

    def _settings(self) -> list[str]:
        """What decides about the order and the sizes of messages, beside the parameters."""
        sizes = (self.first_bucket_bytes, self.bucket_bytes)
        first, later = ("default" if size is None else f"{size} bytes" for size in sizes)
        return [
            f"the algorithm {type(self.bagua_algorithm).__name__}",
            *(f"{name}={value}" for name, value in sorted(self._shared_settings.items())),
            f"find_unused_parameters={self.find_unused_parameters}",
            f"buckets of {later} (the first: {first})",
        ]

    def initialize_again(self) -> None:
        """In the middle of training. After an error the module is not synchronized any more, so that training it is
        refused."""
        self._or_fail(self._initialize)

    def start_replan(self) -> None:
        """As `replan`, in a forward pass, during which the ranks compare a plan that was used before: `finish_replan`
        comes before anything is communicated. After an error of either the module is not synchronized any more, so
        that training it is refused."""
        self._or_fail(self._replan)

    def finish_replan(self) -> None:
        """See `start_replan`."""
        if self._finish_check is not None:
            self._or_fail(self.confirm_plan)

    def _or_fail(self, change: Callable[[], None]) -> None:
        try:
            change()
        except BaseException as error:
            with contextlib.suppress(Exception):  # of the same cause
                self.detach()
            self._failure = failed_reinitialization(self.bagua_module_name, error)
            self._hooks.before_forward(self.module, self._refuse_after_failure)
            self._hooks.around_step(self.bagua_optimizers, self._refuse_after_failure, _nothing)
            raise

    def _refuse_after_failure(self, _: object) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(self._failure)

    def _release_buckets(self) -> None:
        if self._plan is None:
            return
        try:
            self.bagua_algorithm.finish(self)  # before the memory that it works on is given back
        finally:
            plan, self._plan = self._plan, None
            plan.suspend()
            plan.scheduler.close()
            self.bagua_buckets, self._scheduler = [], None


def _nothing(_: object) -> None:
    return None


def _check_state(owner: str, expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if set(given) != set(expected):
        raise ValueError(
            f"The state has the keys {sorted(given)}; {owner} needs {sorted(expected)}.\n"
            "Load what bagua_ddp.state_dict() returned for a module with the same algorithm."
        )


def _no_engine() -> None:
    return None
