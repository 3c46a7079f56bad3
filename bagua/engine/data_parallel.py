"""The engine of one module: it starts the replicas from the same values, and runs an algorithm's communication.

What happens in each step: bagua.engine.training_steps. What is communicated: bagua.engine.plan_maker. The engine never
names an algorithm: it knows the extension points that bagua.torch_api.algorithms.base documents.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.batch_weights import check_weights
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.gradient_owners import owners_by_name
from bagua.engine.parameters import ignored_names
from bagua.engine.plan_tuner import PlanTuner
from bagua.engine.setup import ActiveRanks, Setup
from bagua.engine.speed_shares import LEAST_STEPS
from bagua.engine.step_statistics import KEPT, PassRecorder, StepStatistics
from bagua.job import computing
from bagua.job.computing import Computing
from bagua.regroup.job_step import WorldChange
from bagua.tuning.sampled_steps import median, typical

_module_counts: dict[str, Iterator[int]] = defaultdict(itertools.count)


class DataParallelEngine(AlgorithmFacade):
    """Data parallelism of `module` by `algorithm`. `module.with_bagua` makes one, and keeps it as `module.bagua_ddp`.

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
        active_ranks: which ranks take part in a step; None: all.
        static_graph: all backward passes are like the first one: a parameter may get its gradient in several parts,
            and the ranks agree on unused parameters only once.
        synchronizes_first: the ranks compare modules, optimizers and settings when this is made, and take the values of
            group rank 0. Otherwise nothing is communicated, and the caller ensures that they are equal.
        loss: "mean" or "sum" of its samples, of passes with batch weights; None: without.
        counts_batch: the first dimension of the first tensor that the module is called with is the weight.

    Raises:
        NotImplementedError: the algorithm does not support batch weights.
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
        active_ranks: ActiveRanks | None = None,
        static_graph: bool = False,
        synchronizes_first: bool = True,
        loss: str | None = None,
        counts_batch: bool = False,
    ) -> None:
        if not process_group.is_member:
            raise ValueError(
                f"This rank is not a member of the process group (ranks {process_group.ranks}).\n"
                "Wrap the module on the members only."
            )
        _check_interchangeable(algorithm, allow)
        kind = type(module).__name__
        setup = Setup(
            module,
            tuple(optimizers),
            process_group,
            algorithm,
            bagua_module_name or f"{kind}_{next(_module_counts[kind])}",
            ignored_names(module),
            gradient_as_bucket_view,
            find_unused_parameters or static_graph,
            bucket_bytes,
            first_bucket_bytes,
            # Named in the comparison of the ranks' settings.
            tuple(_labels([algorithm, *allow])) if autotune else None,
            static_graph,
            synchronizes_first,
            loss,
            counts_batch,
        )
        check_weights(setup)
        super().__init__(setup, active_ranks or ActiveRanks())
        try:
            self._steps.start(once_compared)
        except BaseException:
            self.detach()  # so that the module can be wrapped by something that works
            raise
        owners_by_name[setup.name] = self
        computing.tell(lambda: own_computing(KEPT, median))
        if autotune:
            self.autotune(allow)

    # --- what users see ----------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """False after `detach`.

        Raises:
            RuntimeError: the engine is detached because it could not be initialized again.
        """
        if self._steps.failure is not None:
            raise RuntimeError(self._steps.failure)
        return self._steps.plans.current is not None

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

    @property
    def replans_before_backward(self) -> bool:
        """Parameters are frozen and unfrozen within forward passes: `before_backward` alone looks for that. May be
        set."""
        return self._steps.replans_before_backward

    @replans_before_backward.setter
    def replans_before_backward(self, replans: bool) -> None:
        self._steps.replans_before_backward = replans

    @property
    def after_backward(self) -> list[Callable[[], None]]:
        """Functions that are called at the end of each backward pass that communicates, when its results are in place.
        They may replan. Whoever wants one appends it."""
        return self._steps.after_backward

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last step was dropped, because the job has lost a rank: there are no gradients, and the optimizer
        does nothing. Until the next backward pass begins."""
        return self._steps.step_was_dropped

    @property
    def kept_bytes(self) -> int:
        """Of the copies of gradients with which a step can be repeated when a rank is lost."""
        local = self._steps.plans.local
        return 0 if local is None else local.nbytes

    def join_job(self) -> None:
        """At the end of the wrap. If the job has begun without this process, it joins here, and has the state of the
        other ranks then.

        Raises:
            RuntimeError: the job has ended, or refuses this process; the module is ordinary again.
        """
        if self._steps.regrouping is None:
            return
        try:
            self._steps.regrouping.enter()
        except BaseException:
            self.detach()
            raise

    def on_regroup(self, callback: Callable[[WorldChange], object]) -> None:
        """`callback(change)` each time that the job has lost ranks, or that ranks have joined, once the model has
        followed: for what depends on their number, such as the learning rate. On the thread that trains. Not on a rank
        that joins: it takes over what the others have then.

        Args:
            callback: is given the epoch, rank and world size now and before, the lost and the new ranks, and the step
                (bagua.regroup.job_step.WorldChange).

        Raises:
            RuntimeError: `init_process_group` was called without `regroup`.
        """
        if self._steps.regrouping is None:
            raise RuntimeError(
                "on_regroup: this job does not regroup.\n"
                "Call init_process_group(regroup=Regroup()) of bagua.torch_api before the module is wrapped."
            )
        self._steps.on_regroup.append(callback)

    def set_batch_weight(self, weight: float) -> None:
        """What this rank's batch counts for in the next backward pass, such as its number of samples or tokens: with
        `batch_weights=True`, the gradient is that of the mean over the samples of all ranks. Every rank calls it, once
        before each backward pass. Set again before that pass, the last one counts.

        Args:
            weight: from 0 to 2**53. With 0, this rank's gradients count as zeros, whatever they are. A rank without a
                batch makes a pass on any other one. If all ranks give 0, the gradients are zeros.

        Raises:
            RuntimeError: the module was wrapped without `batch_weights` or `count_batch`. And in the backward pass, on
                all ranks: a rank has given none, or one out of these limits.
            TypeError: not a number.
        """
        weights = self._steps.weights
        if weights is None:
            raise RuntimeError(
                f"set_batch_weight: {self.setup.name} was wrapped without batch weights.\n"
                "Pass batch_weights=True to with_bagua() or DistributedDataParallel(), on all ranks."
            )
        weights.set(weight)

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
        self._steps.passes.contribute_zeros()

    def initialize_again(self) -> None:
        """Start from the values of rank 0, in the middle of training. Every rank calls it, between two steps. After an
        error the module is not synchronized any more, so that training it is refused."""
        self._steps.start_again()

    def replan(self, setup: Setup | None = None) -> None:
        """Change what is communicated, between two steps: to the parameters that need a gradient now, and the
        algorithm's present phase. Every rank calls it. All values stay as they are, gradients too; nothing is
        broadcast, but parameters that were never synchronized before.

        Args:
            setup: the present one, `setup`, with another algorithm or other sizes of buckets; None: the present one.

        Raises:
            RuntimeError: the ranks do not want the same; on all of them, and nothing is changed.
            ValueError: there is nothing to train.
        """
        self._steps.replan(setup)

    def autotune(self, allow: Sequence[Any] = ()) -> None:
        """Find the fastest way to communicate in the next steps, at most 300, and keep it: the sizes of buckets, with
        or without a hierarchy of nodes where the result is the same, and the algorithm, of those that are allowed.
        Results are those of the settings that are tried. Every rank calls it, between two steps.

        Args:
            allow: algorithms that may be used instead of the module's, by name or constructed.

        Raises:
            TypeError: `allow` is not a list of them.
            ValueError: a name is not registered, or training cannot change to one of them, or from the module's to
                others.
        """
        mine = self.setup.algorithm
        allow = getattr(mine, "allowed", list)(allow)
        _check_interchangeable(mine, allow)
        choices = [mine, *getattr(mine, "equivalents", _no_others)(self.process_group), *allow]
        by_label: dict[str, Any] = {}
        for one in choices:
            by_label.setdefault(_label(one), one)
        plan = self._steps.plans.current
        assert plan is not None
        self._steps.tuner = PlanTuner(self.setup, plan, self.recorder, by_label, bool(allow))

    @property
    def tuner(self) -> PlanTuner | None:
        """What looks for the fastest way to communicate; None: it was not asked for, or is done."""
        return self._steps.tuner

    def log_stats(self, every_n_steps: int | None = 100) -> None:
        """Log `stats()` on group rank 0 after each so many steps in training; None: no more.

        Raises:
            ValueError: `every_n_steps` is below 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1, or None to stop")
        self.recorder.log_every = (every_n_steps or 0) if self.communicator.rank() == 0 else 0

    @property
    def recorder(self) -> PassRecorder:
        """What takes the times of steps."""
        return self._steps.recorder

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
        return {
            "train_step_counter": self._steps.count,
            "algorithm": self.bagua_algorithm.state_dict(),
            "synchronized": self._steps.plans.synchronized,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the engine that gave `state` was. Load it last, after wrapping and after the states of module and
        optimizers, which wrapping overwrites with those of rank 0.

        Raises:
            ValueError: the state is of another algorithm, or of something else than an engine.
        """
        mine = self._state()
        # States of earlier versions lack it.
        _check_state("an engine", mine, state, ("synchronized",))
        may_lack = self.bagua_algorithm.added_to_state
        _check_state(self.setup.algorithm_name, mine["algorithm"], state["algorithm"], may_lack)
        if "synchronized" in state:
            self._steps.plans.synchronized = state["synchronized"]
        self.bagua_algorithm.load_state_dict(self, state["algorithm"])
        self._steps.count = int(state["train_step_counter"])

    def wait_pending_comm_ops(self) -> None:
        """Wait for what has been launched, so that this thread may use the group."""
        if self._steps.plans.current is not None:
            self._steps.passes.abandon_interrupted()
            self.scheduler.wait_pending_comm_ops()

    def detach(self) -> None:
        """Remove every hook and give the tensors memory of their own: the module is ordinary again."""
        self._steps.detach()

    # A copy of the module has no engine: wrap it again.
    def __deepcopy__(self, memo: dict[int, Any]) -> None: ...

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_engine, ()


def engine_named(name: str | None) -> DataParallelEngine | None:
    """The engine at work for the module of this name."""
    return None if name is None else cast("DataParallelEngine | None", owners_by_name.get(name))


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


def _check_state(
    owner: str, expected: Mapping[str, Any], given: Mapping[str, Any], may_lack: Collection[str] = ()
) -> None:
    if not set(expected) - set(may_lack) <= set(given) <= set(expected):
        raise ValueError(
            f"The state has the keys {sorted(given)}; {owner} needs {sorted(expected)}.\n"
            "Load what bagua_ddp.state_dict() returned for a module with the same algorithm."
        )


def _no_engine() -> None:
    return None


def own_computing(steps: int, middle: Callable[[Sequence[float]], float] = typical) -> Computing:
    """How long a step of this rank takes, without what it waits for. With several modules that are trained in turn, one
    of that which takes longest, less what all wait for. A module that has not been trained while another one made as
    many steps does not count.

    Args:
        steps: the last ones; at most as many as are kept.
        middle: of their times.

    Raises:
        RuntimeError: as `DataParallelEngine.is_attached`.
    """
    engines = [cast("DataParallelEngine", one) for one in owners_by_name.values()]
    recorders = [one.recorder for one in engines if one.is_attached]
    measured = [(one.latest_at, one.latest(steps, middle)) for one in recorders if one.latest_at is not None]
    newest = max((at for at, _ in measured), default=0.0)
    known = [one for at, one in measured if one[0] >= LEAST_STEPS and newest - at <= one[0] * one[1]]
    if not known:
        return Computing()
    count, step_s, _ = max(known, key=lambda one: one[1])
    return Computing(count, step_s - sum(exposed_s for _, _, exposed_s in known))
