"""Makes the plans of one module: what is communicated, from which values, after all ranks have agreed on it.

Owned by the module's TrainingSteps. Runs on the training thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bagua.collectives.tensor import drop_record
from bagua.engine.bucket_plan import plan_buckets
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.gradient_owners import refuse_second_engine
from bagua.engine.local_gradients import LocalGradients
from bagua.engine.parameters import TrainableWatch, left_out_parameters, trainable_parameters
from bagua.engine.setup import Setup
from bagua.engine.step_statistics import PassRecorder
from bagua.engine.training_plan import KeptPlans, TrainingPlan
from bagua.job.failure_report import failures_named
from bagua.replicas.replica_check import Replica
from bagua.replicas.state_broadcast import (
    broadcast_optimizer_state,
    broadcast_parameters,
    refuse_divided_steps,
    refuse_lbfgs,
)

_AGREEING = "agreeing on the parameters to communicate"


class PlanMaker:
    """
    Args:
        setup: what the first plan follows from.
        keeps_local: gradients are kept before they are communicated.

    Attributes:
        setup: of the plan in use.
        algorithm: what the recipe of `setup` has become for this module.
        current: the plan in use; None before `start` and after `release`.
        parameters: (name, parameter) that are synchronized, in the module's order.
        trainable: of the module, as it was when its parameters were last looked for.
        unconfirmed: the comparison of a plan, which goes on while a forward pass runs; None: the ranks have agreed.
        local: where they are kept; None: nowhere.
    """

    trainable: TrainableWatch

    def __init__(self, setup: Setup, facade: object, recorder: PassRecorder, keeps_local: bool = False) -> None:
        self.setup = setup
        self.algorithm: Any = setup.algorithm.reify(setup.group)
        self.current: TrainingPlan | None = None
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._facade = facade
        self._recorder = recorder
        # By id of the recipe, with the recipe: the same object each time that tuning comes back to it.
        self._algorithms: dict[int, tuple[Any, Any]] = {id(setup.algorithm): (setup.algorithm, self.algorithm)}
        self._kept = KeptPlans()
        self._keeps_local = keeps_local
        self.local: LocalGradients | None = None
        # Ids of parameters that all ranks had the same values of, from a broadcast on.
        self._broadcast: set[int] = set()
        self.unconfirmed: tuple[failures_named, Callable[[], None]] | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the algorithm has come to another phase than the plan in use is of."""
        return self.current is not None and self.current.phase != self.algorithm.phase

    # --- plans -------------------------------------------------------------------------------------------------------

    def start(self, once_compared: Callable[[], None]) -> None:
        """Make a plan of what is trained now, from rank 0's values.

        Args:
            once_compared: called when the ranks have agreed, before anything is changed.

        Raises:
            RuntimeError: the ranks have different models, optimizers or settings.
            ValueError: there is nothing to train, the state of an optimizer cannot be synchronized, or ranks divide the
                steps of an optimizer among them and do not average gradients.
        """
        self._watch()
        parameters = self._wanted()
        setup, communicator = self.setup, self.setup.communicator
        replica = self._describe(parameters)
        if self._keeps_local:
            self.local = LocalGradients([parameter for _, parameter in parameters])
        self._broadcast = {id(parameter) for _, parameter in parameters}
        if not setup.synchronizes_first:
            once_compared()
            self._replace_parameters(parameters)
            self.current = self._make(replica)
            return
        with self._agreement():
            replica.check(communicator)
        for optimizer in setup.optimizers:
            refuse_lbfgs(optimizer)
            if not self.algorithm.keeps_parameters_equal:
                refuse_divided_steps(optimizer, setup.group.ranks, setup.algorithm_name)
        once_compared()
        with failures_named(setup.group, "broadcasting parameters and optimizer states", in_order=True):
            self._replace_parameters(parameters)
            broadcast_parameters(parameters, communicator)
            left_out = left_out_parameters(setup.module, setup.ignored)
            for optimizer in setup.optimizers:
                broadcast_optimizer_state(optimizer, communicator, left_out)
        self.algorithm.start_from_broadcast()
        self.current = self._make(replica)

    def replace(self, setup: Setup, in_background: bool, names: Collection[str] | None = None) -> None:
        """Make a plan of what is trained now, by this setup, with the values that there are, in place of the current
        one. The algorithm has finished what it had under way.

        Args:
            in_background: a plan that was used before may still be compared, until `confirm`.
            names: of what is communicated instead.

        Raises:
            RuntimeError: the ranks do not want the same; nothing is changed.
            ValueError: there is nothing to train.
        """
        before = self.setup, self.algorithm
        self.confirm()  # what was begun for the current plan
        if id(setup.algorithm) not in self._algorithms:
            self._algorithms[id(setup.algorithm)] = setup.algorithm, setup.algorithm.reify(setup.group)
        self.setup, self.algorithm = setup, self._algorithms[id(setup.algorithm)][1]
        try:
            self.current = self._replacement(in_background, names)
        except BaseException:
            self.setup, self.algorithm = before
            raise

    def _replacement(self, in_background: bool, names: Collection[str] | None) -> TrainingPlan:
        before = self.current
        assert before is not None
        key = self._key()
        plan = self._kept.take(key) if names is None else None
        # Where names are given, an optimizer may be stepping, whose hooks have to stay.
        if plan is None and names is None and self.trainable.is_outdated():
            self._watch()
        parameters = list(plan.parameters) if plan is not None else self._wanted(names)
        # Where names are given, what is frozen by now does not count: a rank that is late is a forward pass further on.
        described = parameters if names is None else [(name, parameter.detach()) for name, parameter in parameters]
        replica = plan.replica if plan is not None else self._describe(described)
        communicator = self.setup.communicator
        agreement = self._agreement()
        agreement.begin()
        with failures_named(self.setup.group, _AGREEING):
            self.unconfirmed = agreement, replica.start_check(communicator)
        if plan is None or not in_background:
            self.confirm()
        self._put_away(before, is_replaced=before.key == key)
        self._replace_parameters(parameters)
        new = [one for one in parameters if id(one[1]) not in self._broadcast]
        if new:
            with failures_named(self.setup.group, "broadcasting parameters that were unfrozen", in_order=True):
                broadcast_parameters(new, communicator)
            self._broadcast.update(id(parameter) for _, parameter in new)
        if plan is None:
            plan = self._make(replica)
        else:
            plan.resume()
        if not plan.holds_gradients:
            self._kept.clear()  # a warm-up is over
        elif before.holds_gradients:
            plan.scheduler.continue_step_of(before.scheduler)
        return plan

    def confirm(self) -> None:
        """Wait for what the other ranks say of the plan. Nothing may be communicated before.

        Raises:
            RuntimeError: they want another one.
        """
        begun, self.unconfirmed = self.unconfirmed, None
        if begun is not None:
            agreement, finish = begun
            with agreement:
                finish()

    @property
    def synchronized(self) -> list[str]:
        """Names of parameters of which the ranks had the same values, from a broadcast on. Others are broadcast when
        they are unfrozen. May be set, when a state is loaded."""
        return [name for name, parameter in self.trainable.named if id(parameter) in self._broadcast]

    @synchronized.setter
    def synchronized(self, names: Collection[str]) -> None:
        self._broadcast = {id(parameter) for name, parameter in self.trainable.named if name in names}

    def release(self) -> None:
        """Give the tensors memory of their own: there is no plan any more. The algorithm has finished."""
        plan, self.current = self.current, None
        if plan is not None:
            plan.suspend()
            plan.scheduler.close()

    def follow_world(self) -> None:
        """The group has other ranks now, all of which had this plan: make its buckets and operations anew. Nothing is
        under way, and nothing is communicated."""
        plan = self.current
        assert plan is not None
        plan.suspend()
        plan.scheduler.close()
        self.current = self._make(plan.replica)

    def forget_kept(self) -> None:
        """Make all plans anew."""
        self._kept.clear()

    # --- their parts -------------------------------------------------------------------------------------------------

    def _agreement(self) -> failures_named:
        """Of all ranks, from now on."""
        return failures_named(self.setup.group, _AGREEING, can_give_up=True, in_order=True)

    def _watch(self) -> None:
        self._kept.clear()
        # While the former ones live, no other has the id of one of them.
        watch = TrainableWatch(self.setup.module, self.setup.ignored)
        self._broadcast &= {id(parameter) for _, parameter in watch.named}
        self.trainable = watch

    def _wanted(self, names: Collection[str] | None = None) -> list[tuple[str, nn.Parameter]]:
        module = self.setup.module
        if names is None:
            trainable = trainable_parameters(module, self.setup.ignored)
            names = {name for name, _ in trainable if name not in self.setup.left_out}
            # Of frozen ones alone there is nothing to train.
            names |= set(self.algorithm.kept_in_plan or ()) if names else set()
        parameters = [one for one in self.trainable.named if one[0] in names]
        if not parameters:
            raise ValueError(
                f"{type(module).__name__} has no parameters to synchronize: all are frozen or ignored.\n"
                "Unfreeze at least one (requires_grad_()), or train the module without Bagua."
            )
        refuse_second_engine(module, self.setup.name, parameters)
        return parameters

    def _key(self) -> Hashable:
        setup = self.setup
        sizes = setup.bucket_bytes, setup.first_bucket_bytes
        unused = setup.find_unused_parameters, setup.static_graph, setup.left_out
        return id(self.algorithm), self.algorithm.phase, self.trainable.flags(), *sizes, *unused

    def _describe(self, parameters: Sequence[tuple[str, Tensor]]) -> Replica:
        return Replica(parameters, optimizers=self.setup.optimizers, settings=self._settings())

    def _settings(self) -> list[str]:
        """What decides about the order and the sizes of messages, in addition to the parameters."""
        setup = self.setup
        sizes = (setup.first_bucket_bytes, setup.bucket_bytes)
        shared: Mapping[str, object] = getattr(setup.algorithm, "shared_settings", dict)()
        first, later = ("default" if size is None else f"{size} bytes" for size in sizes)
        return [
            f"the algorithm {setup.algorithm_name}",
            *(f"{name}={value}" for name, value in sorted(shared.items())),
            f"find_unused_parameters={setup.find_unused_parameters}",
            f"static_graph={setup.static_graph}",
            f"batch weights of losses that are a {setup.loss}" if setup.loss else "no batch weights",
            f"count_batch={setup.counts_batch}",
            f"buckets of {later} (the first: {first})",
            f"autotune={setup.tuning_space is not None}",
            f"autotune may choose {', '.join(setup.tuning_space or ())}",
        ]

    def _make(self, replica: Replica) -> TrainingPlan:
        """Ask the algorithm for its tensors, buckets and operations."""
        setup, algorithm = self.setup, self.algorithm
        tensors = algorithm.init_tensors(self._facade)
        groups = plan_buckets(tensors, setup.bucket_bytes, setup.first_bucket_bytes)
        buckets = algorithm.tensors_to_buckets([[tensors[index] for index in group] for group in groups], setup.flatten)
        for bucket in buckets:
            algorithm.init_operations(self._facade, bucket)
            bucket.local = self.local
        join_helps = not algorithm.may_change and all(bucket.holds_gradients for bucket in buckets)
        scheduler = CommScheduler(buckets, setup.group, self._recorder, join_helps=join_helps)
        return TrainingPlan(
            setup, algorithm, self._key(), algorithm.phase, replica, self.parameters, buckets, scheduler
        )

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
