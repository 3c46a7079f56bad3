"""Makes the plans of one engine: what is communicated, from which values, after all ranks have agreed on it.

Owned by the engine, which follows the plans. Runs on the training thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from bagua.engine.bucket_plan import plan_buckets
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.gradient_owners import refuse_second_engine
from bagua.engine.parameters import TrainableWatch, left_out_parameters, trainable_parameters
from bagua.engine.replica_check import Replica
from bagua.engine.state_broadcast import broadcast_optimizer_state, broadcast_parameters, refuse_lbfgs
from bagua.engine.tensor import drop_record
from bagua.engine.training_plan import KeptPlans, TrainingPlan
from bagua.job.failure_report import failures_named

if TYPE_CHECKING:
    from bagua.engine.data_parallel import BaguaDistributedDataParallel

_AGREEING = "agreeing on the parameters to communicate"


class PlanMaker:
    """
    Args:
        engine: whose algorithm and settings decide.

    Attributes:
        parameters: (name, parameter) that are synchronized, in the module's order.
        trainable: of the module, as it was when its parameters were last looked for.
    """

    trainable: TrainableWatch

    def __init__(self, engine: BaguaDistributedDataParallel) -> None:
        self._engine = engine
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._kept = KeptPlans()
        # Ids of parameters that all ranks had the same values of, from a broadcast on.
        self._broadcast: set[int] = set()
        # Of the comparison of a plan, which goes on while a forward pass runs.
        self._finish_check: tuple[failures_named, Callable[[], None]] | None = None

    @property
    def phase(self) -> Hashable:
        """Of the algorithm, now."""
        phase: Hashable = self._engine.bagua_algorithm.phase
        return phase

    # --- plans -------------------------------------------------------------------------------------------------------

    def first(self, once_compared: Callable[[], None]) -> TrainingPlan:
        """A plan of what is trained now, from rank 0's values.

        Args:
            once_compared: called when the ranks have agreed, before anything is changed.

        Raises:
            RuntimeError: the ranks have different models, optimizers or settings.
            ValueError: there is nothing to train, or the state of an optimizer cannot be synchronized.
        """
        self._watch()
        parameters = self._wanted()
        engine, communicator = self._engine, self._engine.communicator
        replica = self._describe(parameters)
        with self._agreement():
            replica.check(communicator)
        for optimizer in engine.bagua_optimizers:
            refuse_lbfgs(optimizer)
        once_compared()
        with failures_named(engine.process_group, "broadcasting parameters and optimizer states", in_order=True):
            self._replace_parameters(parameters)
            broadcast_parameters(parameters, communicator)
            self._broadcast = {id(parameter) for _, parameter in parameters}
            left_out = left_out_parameters(engine.module, engine.parameters_to_ignore)
            for optimizer in engine.bagua_optimizers:
                broadcast_optimizer_state(optimizer, communicator, left_out)
        return self._make(replica)

    def after(self, before: TrainingPlan, in_background: bool) -> TrainingPlan:
        """A plan of what is trained now, with the values that there are, instead of `before`.

        Args:
            in_background: one that was used before may still be compared, until `confirm`.

        Raises:
            RuntimeError: the ranks do not want the same; nothing is changed.
            ValueError: there is nothing to train.
        """
        self.confirm()  # what was begun for `before`
        key = self._key()
        plan = self._kept.take(key)
        if plan is not None and not plan.is_valid:
            plan.scheduler.close()
            plan = None
        if plan is None and self.trainable.is_outdated():
            self._watch()
        parameters = list(plan.parameters) if plan is not None else self._wanted()
        replica = plan.replica if plan is not None else self._describe(parameters)
        communicator = self._engine.communicator
        agreement = self._agreement()
        with failures_named(self._engine.process_group, _AGREEING):
            self._finish_check = agreement, replica.start_check(communicator)
        if plan is None or not in_background:
            self.confirm()
        self._put_away(before, is_replaced=before.key == key)
        self._replace_parameters(parameters)
        new = [one for one in parameters if id(one[1]) not in self._broadcast]
        if new:
            with failures_named(
                self._engine.process_group, "broadcasting parameters that were unfrozen", in_order=True
            ):
                broadcast_parameters(new, communicator)
            self._broadcast.update(id(parameter) for _, parameter in new)
        if plan is None:
            plan = self._make(replica)
        else:
            plan.resume()
        if plan.holds_gradients and before.holds_gradients:
            plan.scheduler.inherit(before.scheduler)
        return plan

    @property
    def is_unconfirmed(self) -> bool:
        """Whether the ranks are still comparing a plan."""
        return self._finish_check is not None

    def confirm(self) -> None:
        """Wait for what the other ranks say of the plan.

        Raises:
            RuntimeError: they want another one.
        """
        begun, self._finish_check = self._finish_check, None
        if begun is not None:
            agreement, finish = begun
            with agreement:
                finish()

    def forget_kept(self) -> None:
        """Make all plans anew."""
        self._kept.clear()

    # --- their parts -------------------------------------------------------------------------------------------------

    def _agreement(self) -> failures_named:
        """Of all ranks, from now on."""
        return failures_named(self._engine.process_group, _AGREEING, can_give_up=True, in_order=True)

    def _watch(self) -> None:
        self._kept.clear()
        # While the former ones live, no other has the id of one of them.
        watch = TrainableWatch(self._engine.module, self._engine.parameters_to_ignore)
        self._broadcast &= {id(parameter) for _, parameter in watch.named}
        self.trainable = watch

    def _wanted(self) -> list[tuple[str, nn.Parameter]]:
        module = self._engine.module
        parameters = trainable_parameters(module, self._engine.parameters_to_ignore)
        if not parameters:
            raise ValueError(
                f"{type(module).__name__} has no parameters to synchronize: all are frozen or ignored.\n"
                "Unfreeze at least one (requires_grad_()), or train the module without Bagua."
            )
        refuse_second_engine(self._engine, parameters)
        return parameters

    def _key(self) -> Hashable:
        engine = self._engine
        flags = self.trainable.flags()
        return (id(engine.bagua_algorithm), self.phase, flags, engine.bucket_bytes, engine.first_bucket_bytes)

    def _describe(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> Replica:
        return Replica(parameters, optimizers=self._engine.bagua_optimizers, settings=self._settings())

    def _settings(self) -> list[str]:
        """What decides about the order and the sizes of messages, in addition to the parameters."""
        engine = self._engine
        sizes = (engine.first_bucket_bytes, engine.bucket_bytes)
        shared: Mapping[str, object] = getattr(engine.algorithm, "shared_settings", dict)()
        first, later = ("default" if size is None else f"{size} bytes" for size in sizes)
        return [
            f"the algorithm {type(engine.bagua_algorithm).__name__}",
            *(f"{name}={value}" for name, value in sorted(shared.items())),
            f"find_unused_parameters={engine.find_unused_parameters}",
            f"buckets of {later} (the first: {first})",
            f"autotune={engine.tuning_space is not None}",
            f"autotune may choose {', '.join(engine.tuning_space or ())}",
        ]

    def _make(self, replica: Replica) -> TrainingPlan:
        """Ask the algorithm for its tensors, buckets and operations."""
        engine = self._engine
        tensors = engine.bagua_algorithm.init_tensors(engine)
        groups = plan_buckets(tensors, engine.bucket_bytes, engine.first_bucket_bytes)
        buckets = engine.bagua_algorithm.tensors_to_buckets(
            [[tensors[index] for index in group] for group in groups], engine.gradient_as_bucket_view
        )
        for bucket in buckets:
            engine.bagua_algorithm.init_operations(engine, bucket)
        scheduler = CommScheduler(buckets, engine.process_group, engine.recorder)
        return TrainingPlan(self._key(), self.phase, replica, self.parameters, buckets, scheduler)

    def _put_away(self, plan: TrainingPlan, is_replaced: bool) -> None:
        """Keep it, unless another one has come to its place for good."""
        plan.suspend()
        if plan.holds_gradients and not is_replaced:
            self._kept.keep(plan, limit_bytes=sum(one.nbytes for _, one in self.trainable.named))
        else:
            plan.scheduler.close()

    def _replace_parameters(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        before, self.parameters = self.parameters, parameters
        names = {id(parameter): name for name, parameter in parameters}
        for name, parameter in before:
            # Also those that have another name now, as pruning and parametrizations give it: records keep theirs.
            if names.get(id(parameter)) != name:
                drop_record(parameter)
