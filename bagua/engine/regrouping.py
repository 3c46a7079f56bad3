"""What a model needs to follow when the job goes on without a rank (bagua.regroup): what is refused, and its state.

Functions; on the training thread.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.engine.parameters import left_out_parameters, replicated_parameters
from bagua.engine.plan_maker import PlanMaker
from bagua.engine.setup import Setup
from bagua.engine.state_feed import StateFeed, StateFollower, sendable_options
from bagua.engine.training_plan import TrainingPlan
from bagua.job.places import Place
from bagua.regroup import coordinator
from bagua.regroup.coordinator import Regrouping
from bagua.regroup.transfer import Offer
from bagua.replicas import optimizer_description
from bagua.replicas.replica_check import Replica
from bagua.replicas.state_broadcast import (
    broadcast_optimizer_state,
    broadcast_parameters,
    install_entries,
    prepare_entries,
    shapes_difference,
)


def regrouping_of(setup: Setup) -> Regrouping | None:
    """What regroups this process, if it was asked to.

    Raises:
        NotImplementedError: the model is trained in a way that does not follow when a rank is lost.
    """
    regrouping = coordinator.current()
    if regrouping is None:
        return None
    names = [
        (f"the algorithm {setup.algorithm_name}", not vars(type(setup.algorithm)).get("follows_regroup", False)),
        ("static_graph=True", setup.static_graph),
        ("autotune=True", setup.tuning_space is not None),
        (f"a module on {_devices(setup.module)}", not _is_on(setup.module, regrouping.device)),
        ("a module without optimizers", not setup.optimizers),
    ]
    for name, is_used in names:
        if is_used:
            raise NotImplementedError(
                f"regroup: {name} is not supported under regroup.\n"
                f"Module: {type(setup.module).__name__}. Supported are modules on {_supported(regrouping.device)} that"
                " are wrapped with their optimizers, and an algorithm that follows a regroup, as the default one"
                " does.\n"
                "Use these (DistributedDataParallel takes optimizers=[optimizer]), or leave regroup out of"
                " init_process_group()."
            )
    refuse_world(setup)
    return regrouping


def refuse_world(setup: Setup) -> None:
    """
    Raises:
        NotImplementedError: the algorithm uses a hierarchy of several nodes.
    """
    if getattr(setup.algorithm, "hierarchical", False) and not setup.group.topology.is_one_node:
        raise NotImplementedError(
            f"regroup: {setup.algorithm_name} with hierarchical=True on several nodes is not supported under regroup.\n"
            f"Pass hierarchical=False: Algorithm.init({setup.algorithm_name!r}, hierarchical=False)."
        )


def refuse_other_parameters() -> None:
    """
    Raises:
        NotImplementedError: always; parameters were frozen or unfrozen.
    """
    raise NotImplementedError(
        "regroup: parameters were frozen or unfrozen after the module was wrapped, which is not supported under"
        " regroup.\n"
        "Freeze them before it is wrapped, or wrap it again."
    )


class FollowingModel:
    """The model's part of a training that follows: see bagua.regroup.job_step.Participant."""

    plans: PlanMaker

    def keep_state(self) -> Callable[[], None]:
        setup = self.plans.setup
        values = [(one, one.detach().clone()) for one in setup.module.parameters()]
        states: list[Any] = [copy.deepcopy(one.state_dict()) for one in setup.optimizers]

        def put_back() -> None:
            with torch.no_grad():
                for parameter, value in values:
                    parameter.copy_(value)
            for optimizer, state in zip(setup.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

        return put_back

    def share_state(self) -> None:
        setup = self.plans.setup
        broadcast_parameters(self.plans.parameters, setup.communicator)
        left_out = left_out_parameters(setup.module, setup.ignored)
        for optimizer in setup.optimizers:
            broadcast_optimizer_state(optimizer, setup.communicator, left_out)

    def described(self) -> dict[str, Any]:
        plan, setup = self.plans.current, self.plans.setup
        assert plan is not None
        left_out = left_out_parameters(setup.module, setup.ignored)
        return {
            "trained": plan.replica.lists,
            "others": _others(plan, setup).lists,
            "groups": [optimizer_description.shapes_of(one, left_out) for one in setup.optimizers],
        }

    def why_not(self, described: dict[str, Any], place: Place, rank: int) -> str | None:
        plan, setup = self.plans.current, self.plans.setup
        assert plan is not None
        left_out = left_out_parameters(setup.module, setup.ignored)
        problem = plan.replica.difference_of(described["trained"], rank)
        problem = problem or _others(plan, setup).difference_of(described["others"], rank)
        # The lists of optimizers are compared with the parameters.
        for optimizer, said_groups in zip(setup.optimizers, described["groups"], strict=False):
            theirs: list[list[optimizer_description.Shape]] = [
                [None if shape is None else tuple(shape) for shape in group] for group in said_groups
            ]
            groups = optimizer_description.shapes_of(optimizer, left_out)
            if problem is None and theirs != groups:
                problem = f"rank {rank} has an optimizer with {shapes_difference(theirs, groups)}."
        current = coordinator.current()
        assert current is not None
        hosts = {one.place.host for one in current.epoch.members}
        if problem is None and getattr(setup.algorithm, "hierarchical", False) and hosts != {place.host}:
            problem = f"{setup.algorithm_name} with hierarchical=True on several nodes is not supported under regroup."
        return problem and f"This process cannot join the job, as rank {rank}.\n{problem}"

    def give_state(self, step: int) -> Offer:
        setup = self.plans.setup
        left_out = left_out_parameters(setup.module, setup.ignored)
        tensors: list[Tensor] = [one for _, one in replicated_parameters(setup.module, setup.ignored)]
        descriptions, slots = [], []
        for optimizer in setup.optimizers:
            description, of_optimizer = optimizer_description.describe(optimizer, left_out)
            tensors += of_optimizer
            descriptions.append(description)
            slots.append([] if isinstance(description, str) else [(one.entry, one.name) for one in description.slots])
        return Offer(
            step,
            pickle.dumps(descriptions),
            hashlib.sha256(repr(slots).encode()).hexdigest(),
            [one.detach().contiguous() for one in tensors],
        )

    def take_state(self, description: bytes) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """
        Raises:
            RuntimeError: the state of an optimizer cannot be sent.
            ValueError: an optimizer is another one.
        """
        setup = self.plans.setup
        left_out = left_out_parameters(setup.module, setup.ignored)
        targets = [one.detach() for _, one in replicated_parameters(setup.module, setup.ignored)]
        prepared = []
        for optimizer, said in zip(setup.optimizers, pickle.loads(description), strict=True):
            if isinstance(said, str):
                raise RuntimeError(f"This process cannot join: the optimizer's state cannot be sent ({said}).")
            entries, tensors = prepare_entries(optimizer, said, left_out, setup.communicator)
            prepared.append((optimizer, entries))
            targets += tensors
        filled = [one.contiguous() for one in targets]

        def put_into_place() -> None:
            for target, values in zip(targets, filled, strict=True):
                if target is not values:
                    target.copy_(values)
            for optimizer, entries in prepared:
                install_entries(optimizer, entries, left_out)

        return filled, put_into_place

    def feed(self, share: int, of: int) -> StateFeed:
        return StateFeed(self.plans.setup, share, of)

    def follower(self) -> StateFollower:
        return StateFollower(self.plans.setup)

    def give_rest(self) -> dict[str, Any]:
        setup = self.plans.setup
        return {
            "options": [sendable_options(one) for one in setup.optimizers],
            "buffers": {name: one.cpu() for name, one in _buffers(setup)},
        }

    def take_rest(self, rest: dict[str, Any]) -> None:
        setup = self.plans.setup
        for optimizer, of_groups in zip(setup.optimizers, rest["options"], strict=True):
            for group, options in zip(optimizer.param_groups, of_groups, strict=True):
                group.update(options)
        with torch.no_grad():
            for name, buffer in _buffers(setup):
                buffer.copy_(rest["buffers"][name])


def _others(plan: TrainingPlan, setup: Setup) -> Replica:
    # A model that is not trained in another one's turn may be frozen as a whole just now.
    trained = {id(parameter) for _, parameter in plan.parameters}
    frozen = [one for one in replicated_parameters(setup.module, setup.ignored) if id(one[1]) not in trained]
    return Replica([*frozen, *_buffers(setup)], "frozen parameters and buffers")


def _buffers(setup: Setup) -> Iterator[tuple[str, Tensor]]:
    """Those that checkpoints have: others may be of any shape."""
    for prefix, owner in setup.module.named_modules():
        for key, buffer in owner._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is not None and key not in owner._non_persistent_buffers_set and name not in setup.ignored:
                yield name, buffer


def _devices(module: nn.Module) -> str:
    return ", ".join(sorted({str(one.device) for one in module.parameters()}))


def _supported(gpu: torch.device | None) -> str:
    return "the CPU" if gpu is None else f"the CPU or {gpu} (the current GPU in init_process_group())"


def _is_on(module: nn.Module, gpu: torch.device | None) -> bool:
    """Whether all parameters are on the CPU, or all on this GPU."""
    return _devices(module) in ("cpu", str(gpu))
