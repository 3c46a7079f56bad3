"""What algorithms see of the engine, with the names of Bagua 0.9: the argument `bagua_ddp` of the methods of
bagua.torch_api.algorithms.base."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.tensor import mark_ready
from bagua.engine.batch_weights import BatchWeights
from bagua.engine.bucket import Bucket
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.parameters import trainable_parameters
from bagua.engine.setup import ActiveRanks, Setup
from bagua.engine.training_steps import TrainingSteps


class AlgorithmFacade:
    """
    Args:
        setup: how the module is trained.
        active_ranks: which ranks take part in a step.

    Attributes:
        module: this rank's replica.
        process_group: the ranks that train together.
        bagua_module_name: by which the ranks know the module.
        parameters_to_ignore: names of parameters and buffers that are not synchronized.
    """

    def __init__(self, setup: Setup, active_ranks: ActiveRanks) -> None:
        self.module = setup.module
        self.process_group: BaguaProcessGroup = setup.group
        self.bagua_module_name = setup.name
        self.parameters_to_ignore = setup.ignored
        self._steps = TrainingSteps(setup, self, active_ranks)

    # The usual backward hook: the parameter's tensor may be communicated.
    mark_ready = staticmethod(mark_ready)

    @property
    def setup(self) -> Setup:
        """By which the module is trained now."""
        return self._steps.plans.setup

    @property
    def communicator(self) -> BaguaCommunicator:
        """Of all ranks that train together."""
        return self.setup.communicator

    @property
    def find_unused_parameters(self) -> bool:
        """Parameters that a backward pass does not reach contribute zeros."""
        return self.setup.find_unused_parameters

    @property
    def batch_weights(self) -> BatchWeights | None:
        """What the batches of this rank count for; None: all ranks count alike."""
        return self._steps.weights

    @property
    def bagua_optimizers(self) -> list[Optimizer]:
        """After whose steps the algorithm may communicate."""
        return list(self.setup.optimizers)

    def tensors_of(self, optimizer: Optimizer) -> list[Tensor]:
        """What a listed optimizer steps, as `synchronized_parameters` has it."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    @property
    def bagua_algorithm(self) -> Any:
        """What the algorithm has become for this module."""
        return self._steps.plans.algorithm

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """In launch order."""
        plan = self._steps.plans.current
        return [] if plan is None else list(plan.buckets)

    @property
    def bagua_train_step_counter(self) -> int:
        """Forward passes in training so far."""
        return self._steps.count

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes communicate. May be set, as torch's: False while gradients are accumulated."""
        return self._steps.passes.communicates

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, communicates: bool) -> None:
        self._steps.passes.communicates = bool(communicates)

    @property
    def scheduler(self) -> CommScheduler:
        """What launches the buckets. Another one with each plan."""
        plan = self._steps.plans.current
        assert plan is not None
        return plan.scheduler

    @property
    def synchronized_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) in the module's order, used or not: what `init_tensors` communicates."""
        return list(self._steps.plans.parameters)

    @property
    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that could be synchronized, frozen or not, in the module's order."""
        return list(self._steps.plans.trainable.named)

    @property
    def synchronized_names(self) -> list[str]:
        """Of those, of what was communicated at any time: the others are broadcast when they are unfrozen."""
        return self._steps.plans.synchronized

    @property
    def is_within_forward(self) -> bool:
        """Whether a forward pass has begun that runs its backward passes itself, as with Lightning's manual
        optimization."""
        return self._steps.is_within_forward

    @property
    def is_in_pass(self) -> bool:
        """Whether this thread is in a backward pass of the module: an optimizer steps in a hook."""
        return self._steps.is_in_pass

    def communicate(self, names: Collection[str]) -> None:
        """Change the plan to the parameters of these names, frozen or not. Every rank calls it, with the same names:
        when an exchange begins that does not cover all that is in the plan, or a state is loaded.

        Args:
            names: of `replicated_parameters`.

        Raises:
            RuntimeError: the ranks do not want the same; the module is not synchronized any more.
        """
        self._steps.communicate(names)

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronized, in the module's order. With `find_unused_parameters`, of
        those that any rank used in the last backward pass."""
        parameters = trainable_parameters(self.module, self.parameters_to_ignore)
        used = self._steps.passes.used_anywhere
        return parameters if used is None else [one for one in parameters if one[0] in used]

    def rebuild_buckets(self, setup: Setup | None = None) -> None:
        """As `replan`, with new buckets in any case. Every rank calls it."""
        self._steps.plans.forget_kept()
        self._steps.replan(setup)
