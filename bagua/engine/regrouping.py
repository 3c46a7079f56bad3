"""What a model needs to follow when the job goes on without a rank (bagua.regroup): what is refused, and its state.

Functions; on the training thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bagua.engine.parameters import left_out_parameters
from bagua.regroup import coordinator
from bagua.replicas.state_broadcast import broadcast_optimizer_state, broadcast_parameters

if TYPE_CHECKING:
    from bagua.engine.setup import Setup
    from bagua.regroup.coordinator import Regrouping


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
        (f"a module on {_devices(setup.module)}", _devices(setup.module) != "cpu"),
        (f"a module with {len(setup.optimizers)} optimizers", len(setup.optimizers) != 1),
    ]
    for name, is_used in names:
        if is_used:
            raise NotImplementedError(
                f"regroup: {name} is not supported under regroup.\n"
                f"Module: {type(setup.module).__name__}. Supported are modules on the CPU that are wrapped with one"
                " optimizer, and an algorithm that follows a regroup, as the default one does.\n"
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


def kept_state(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[], None]:
    """What puts parameters and optimizer states back as they are now."""
    values = [(one, one.detach().clone()) for one in module.parameters()]
    states: list[Any] = [copy.deepcopy(one.state_dict()) for one in optimizers]

    def put_back() -> None:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    return put_back


def share_state(parameters: Sequence[tuple[str, Tensor]], setup: Setup) -> None:
    """Collective: all have parameters and optimizer states of group rank 0.

    Raises:
        Regrouped: another rank was lost.
    """
    broadcast_parameters(parameters, setup.communicator)
    left_out = left_out_parameters(setup.module, setup.ignored)
    for optimizer in setup.optimizers:
        broadcast_optimizer_state(optimizer, setup.communicator, left_out)


def _devices(module: nn.Module) -> str:
    return ", ".join(sorted({one.device.type for one in module.parameters()}))
