"""The engine of one module: it starts the replicas from the same values, and runs an algorithm's communication.

What happens in each step: bagua.engine.training_steps. What is communicated: bagua.engine.plan_maker. The engine never
names an algorithm: it knows the extension points that bagua.torch_api.algorithms.base documents.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.gradient_owners import engines_by_name
from bagua.engine.incomplete_step import failed_reinitialization
from bagua.engine.module_hooks import ModuleHooks
from bagua.engine.parameters import ignored_names, trainable_parameters
from bagua.engine.plan_maker import PlanMaker
from bagua.engine.plan_tuner import PlanTuner
from bagua.engine.step_statistics import PassRecorder, StepStatistics
from bagua.engine.tensor import drop_record, record_of, set_ready
from bagua.engine.training_plan import AlgorithmHooks, TrainingPlan
from bagua.engine.training_steps import TrainingSteps

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.bucket import Bucket
    from bagua.engine.comm_scheduler import CommScheduler

_logger = logging.getLogger("bagua")

_module_counts: dict[str, Iterator[int]] = defaultdict(itertools.count)


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
        autotune: finds the fastest way to communicate in the first steps, as `autotune`.
        allow: algorithms that tuning may choose, too.
        once_compared: called when the ranks have compared models, optimizers and settings, before anything is changed.

    Raises:
        ValueError: nothing to train, not a member of the group, an optimizer whose state cannot be synchronized, or
            training cannot change to an algorithm of `allow`.
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
        autotune: bool = False,
        allow: Sequence[Any] = (),
        once_compared: Callable[[], None] | None = None,
    ) -> None:
        if not process_group.is_member:
            raise ValueError(
                f"This rank is not a member of the process group (ranks {process_group.ranks}).\n"
                "Wrap the module on the members only."
            )
        _check_interchangeable(algorithm, allow)
        kind = type(module).__name__
        self.module = module
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group
        self.bagua_module_name = bagua_module_name or f"{kind}_{next(_module_counts[kind])}"
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.bucket_bytes = bucket_bytes
        self.first_bucket_bytes = first_bucket_bytes
        # Named in the comparison of the ranks' settings.
        self.tuning_space = _labels([algorithm, *allow]) if autotune else None
        self.pauses_tuning = False
        self.require_backward_grad_sync = True
        # Parameters are frozen and unfrozen within forward passes: `before_backward` looks for that.
        self.replans_before_backward = False
        # Gradients are multiplied by this after communication, where some ranks contribute nothing.
        self.gradient_scale: float | None = None
        self.bagua_train_step_counter = 0
        self._algorithm = algorithm
        self.bagua_algorithm = algorithm.reify(process_group)
        # Of algorithms that tuning has used, by id, with the algorithm.
        self._reified: dict[int, tuple[Any, Any]] = {id(algorithm): (algorithm, self.bagua_algorithm)}
        self.bagua_buckets: list[Bucket] = []
        self.parameters_to_ignore = ignored_names(module)
        self.recorder = PassRecorder()
        self._tuner: PlanTuner | None = None
        self._log_every = 0
        self._plan: TrainingPlan | None = None
        self._plans = PlanMaker(self)
        self._hooks = ModuleHooks()
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
        if autotune:
            self.autotune(allow)

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
        return self._plan is not None

    @property
    def scheduler(self) -> CommScheduler:
        """What launches the buckets. Another one after each initialization."""
        assert self._plan is not None
        return self._plan.scheduler

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
        return list(self._plans.parameters)

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

    @contextlib.contextmanager
    def within_forward(self) -> Iterator[None]:
        """Calls of the module in this block belong to a forward pass that has begun: for frameworks whose step is the
        forward pass of the module, and calls it."""
        before, self._steps.is_within_forward = self._steps.is_within_forward, True
        try:
            yield
        finally:
            self._steps.is_within_forward = before

    def before_backward(self, loss: Tensor) -> None:
        """For frameworks whose step runs several backward passes in a forward pass, each of other parameters: follow
        what is frozen and unfrozen now. Every rank calls it, right before it differentiates `loss`; with
        `replans_before_backward`, nothing else does.

        Raises:
            RuntimeError: the ranks do not train the same parameters; the module is not synchronized any more.
        """
        self._steps.before_backward(loss)

    def contribute_zeros(self) -> None:
        """Take part in the communication of a backward pass that the other ranks run, with zeros. This rank's gradients
        are those of all then, and its own are lost."""
        self._steps.contribute_zeros()

    @property
    def needs_replan(self) -> bool:
        """Whether the algorithm has come to another phase than the buckets are of."""
        return self._plan is not None and self._plan.phase != self._plans.phase

    def replan(self) -> None:
        """Change what is communicated, between two steps: to the parameters that need a gradient now, the algorithm's
        present phase, and `bucket_bytes` and `first_bucket_bytes`. Every rank calls it. All values stay as they are,
        gradients too; nothing is broadcast, but parameters that were never synchronized before.

        Raises:
            RuntimeError: the ranks do not want the same; on all of them, and nothing is changed.
            ValueError: there is nothing to train.
        """
        self._replan()

    def autotune(self, allow: Sequence[Any] = ()) -> None:
        """Find the fastest way to communicate in the next steps, at most 300, and keep it: the sizes of buckets, with
        or without a hierarchy of nodes where the result is the same, and the algorithm, of those that are allowed.
        Results are those of the settings that are tried. Every rank calls it, between two steps.

        Args:
            allow: algorithms (bagua.torch_api.algorithms.Algorithm) that may be used instead of the module's.

        Raises:
            ValueError: training cannot change to one of them, or from the module's to others.
        """
        mine = self._algorithm
        _check_interchangeable(mine, allow)
        choices = [mine, *getattr(mine, "equivalents", _no_others)(self.process_group), *allow]
        by_label: dict[str, Any] = {}
        for one in choices:
            by_label.setdefault(_label(one), one)
        self._tuner = PlanTuner(self, by_label, bool(allow))

    def use(self, algorithm: Any, bucket_bytes: int | None, first_bucket_bytes: int | None) -> bool:
        """Communicate like this from the next replan on.

        Returns:
            whether that is another plan, so that a replan is due.
        """
        before = self._algorithm, self.bucket_bytes, self.first_bucket_bytes
        self._algorithm, self.bucket_bytes, self.first_bucket_bytes = algorithm, bucket_bytes, first_bucket_bytes
        return before != (algorithm, bucket_bytes, first_bucket_bytes)

    @property
    def algorithm(self) -> Any:
        """The Algorithm of the next plan; `bagua_algorithm` is what it has become for this module."""
        return self._algorithm

    def log_stats(self, every_n_steps: int | None = 100) -> None:
        """Log `stats()` on group rank 0 after each so many steps in training; None: no more.

        Raises:
            ValueError: `every_n_steps` is below 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1, or None to stop")
        self._log_every = every_n_steps or 0

    def begin_step(self, may_communicate: bool) -> bool:
        """In front of each forward pass in training.

        Args:
            may_communicate: the backward pass.

        Returns:
            whether a replan is due: another plan was chosen, or the algorithm has come to another phase.
        """
        steps = self.bagua_train_step_counter - 1
        if self._log_every and steps and steps % self._log_every == 0 and self.communicator.rank() == 0:
            _logger.info(f"{self.bagua_module_name}: step {steps}: {self.stats()}")
        if not may_communicate:
            return False
        is_changed = self._is_tuning and not self._tunes_after_pass and self._tune()
        return is_changed or (self.needs_replan and not self.replans_before_backward)

    def end_counted_pass(self) -> bool:
        """At the end of each backward pass that communicates: all ranks make it. Forward passes one may make alone.

        Returns:
            whether another plan was chosen, so that a replan is due.
        """
        if not self._is_tuning:
            return False
        assert self._tuner is not None
        self._tuner.count_pass()
        return self._tunes_after_pass and self._tune()

    @property
    def _is_tuning(self) -> bool:
        return self._tuner is not None and not self.pauses_tuning

    @property
    def _tunes_after_pass(self) -> bool:
        """Gradients survive a replan. Of what else is in buckets, the optimizer has to have the result first."""
        return self._plan is not None and self._plan.holds_gradients

    def _tune(self) -> bool:
        tuner = self._tuner
        assert tuner is not None
        if not tuner.is_due:
            return False
        is_changed = tuner.next_turn()
        if tuner.is_done:
            self._tuner = None
            self._plans.forget_kept()  # what was tried gives its memory back
        return is_changed

    def rebuild_buckets(self) -> None:
        """As `replan`, with new buckets in any case. Every rank calls it."""
        self._plans.forget_kept()
        self._replan()

    def stats(self) -> StepStatistics:
        """How long this rank's steps take, and how much of it is communication that nothing hides. What an algorithm
        communicates on a thread of its own, during the steps, is not in it."""
        return self.recorder.statistics()

    def state_dict(self) -> dict[str, Any]:
        """What this rank's next steps depend on beside the states of module and optimizers: the step counter and the
        algorithm's own state. Save it with theirs; algorithms that let replicas differ need all three of every rank."""
        self.bagua_algorithm.complete_exchange(self)
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {"train_step_counter": self.bagua_train_step_counter, "algorithm": self.bagua_algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the engine that gave `state` was. Load it last, after wrapping and after the states of module and
        optimizers, which wrapping overwrites with those of rank 0.

        Raises:
            ValueError: the state is of another algorithm, or of something else than an engine.
        """
        mine = self._state()
        _check_state("an engine", mine, state)
        _check_state(type(self.bagua_algorithm).__name__, mine["algorithm"], state["algorithm"])
        self.bagua_algorithm.load_state_dict(self, state["algorithm"])
        self.bagua_train_step_counter = int(state["train_step_counter"])

    def wait_pending_comm_ops(self) -> None:
        """Wait for what has been launched, so that this thread may use the group."""
        if self._plan is not None:
            self._steps.abandon_interrupted()
            self._plan.scheduler.wait_pending_comm_ops()

    def detach(self) -> None:
        """Remove every hook and give the tensors memory of their own: the module is ordinary again."""
        self._hooks.remove()
        try:
            self._release_buckets()
        finally:
            self._plans.forget_kept()
            for _, parameter in self._plans.parameters:
                # Where another engine owns it, this one was refused.
                record = record_of(parameter)
                if record is not None and record.module_name in (None, self.bagua_module_name):
                    drop_record(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module has no engine: wrap it again."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_engine, ()

    # --- plans -------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made here is used in later passes
    def _initialize(self, once_compared: Callable[[], None] | None = None) -> None:
        """All ranks start from the same values: in the beginning, and when the algorithm asks for it. What is refused
        leaves the module as it is."""
        self._hooks.remove()
        if self._plan is not None:
            # What an algorithm has under way works on the tensors that are about to be overwritten.
            self._finish()

        def give_up_former() -> None:
            if once_compared is not None:
                once_compared()
            self._release_buckets()

        self.replicas_are_equal = True
        try:
            self._follow(self._plans.first(give_up_former))
        finally:
            self.replicas_are_equal = False
        self._steps.install(self._hooks, self._plans.trainable)

    @torch.inference_mode(False)
    def _replan(self, in_background: bool = False) -> None:
        assert self._plan is not None
        self._finish()
        watched = self._plans.trainable
        before = self.bagua_algorithm
        self.bagua_algorithm = self._reify()
        try:
            plan = self._plans.after(self._plan, in_background)
        except BaseException:
            self.bagua_algorithm = before
            raise
        self._follow(plan)
        if self._plans.trainable is not watched:
            self._hooks.remove()
            self._steps.install(self._hooks, self._plans.trainable)

    def _reify(self) -> Any:
        """The algorithm for this module: the same object each time that tuning comes back to it."""
        key = id(self._algorithm)
        if key not in self._reified:
            self._reified[key] = self._algorithm, self._algorithm.reify(self.process_group)
        return self._reified[key][1]

    def _finish(self) -> None:
        self._steps.abandon_interrupted()
        self.bagua_algorithm.finish(self)

    def _follow(self, plan: TrainingPlan) -> None:
        self._plan, self.bagua_buckets = plan, list(plan.buckets)
        self.recorder.forget()
        self._steps.follow(plan.parameters, self._plans.trainable, AlgorithmHooks.of(self), plan.scheduler)

    def initialize_again(self) -> None:
        """In the middle of training. After an error the module is not synchronized any more, so that training it is
        refused."""
        self._or_fail(self._initialize)

    def start_replan(self) -> None:
        """As `replan`, in a forward pass, during which the ranks compare a plan that was used before: `finish_replan`
        comes before anything is communicated. After an error of either the module is not synchronized any more, so
        that training it is refused."""
        self._or_fail(lambda: self._replan(in_background=True))

    def finish_replan(self) -> None:
        """See `start_replan`."""
        if self._plans.is_unconfirmed:
            self._or_fail(self._confirm)

    def _confirm(self) -> None:
        try:
            self._plans.confirm()
        except BaseException:
            # A pass may have begun. Only gradients are communicated by such plans, and none was yet.
            if self._plan is not None:
                self._plan.scheduler.reset()
            raise

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
            self._finish()  # before the memory that it works on is given back
        finally:
            plan, self._plan = self._plan, None
            plan.suspend()
            plan.scheduler.close()
            self.bagua_buckets = []


def _check_interchangeable(algorithm: Any, allow: Sequence[Any]) -> None:
    for one in [algorithm, *allow] if allow else []:
        if not vars(type(one)).get("is_interchangeable", False):
            raise ValueError(
                f"Tuning cannot change from or to {_label(one)}: it keeps state of its own between steps, or"
                " communicates something else than gradients.\n"
                f"allow was {', '.join(_labels(allow))}; the module's algorithm is {_label(algorithm)}.\n"
                "Allow algorithms that only average gradients, or none: then only the sizes of buckets are tuned."
            )


def _label(algorithm: Any) -> str:
    return str(getattr(algorithm, "label", type(algorithm).__name__))


def _labels(algorithms: Sequence[Any]) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(_label(one) for one in algorithms))


def _no_others(_: object) -> list[Any]:
    return []


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
