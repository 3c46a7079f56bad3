"""What a rank writes into a checkpoint: the names of files and their contents. Functions; the thread that trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.contrib.checkpoint import durable_files, state_names
from bagua.contrib.checkpoint.state_names import plain_parameters, plain_state, unwrapped
from bagua.job.sharded_parameters import refuse_sharded

# Under this key a file says what it is. Files of Bagua 0.9 have none.
ABOUT = "bagua"


class Engine(Protocol):
    """Who trains a module, as far as checkpoints have to know it."""

    @property
    def setup(self) -> Any: ...
    @property
    def bagua_algorithm(self) -> Any: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def process_group(self) -> BaguaProcessGroup: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...
    def wait_pending_comm_ops(self) -> None: ...


@dataclass(frozen=True)
class Subject:
    """
    What is saved or loaded.

    Attributes:
        module: itself, without wrapper.
        engines: of all that train a part of it, or a module that it is a part of. Usually one; none where nothing is
            wrapped.
    """

    module: nn.Module
    engines: tuple[Engine, ...]

    @property
    def inner_engines(self) -> list[Engine]:
        """Whose modules are in it, so that their states are, too."""
        modules = set(self.module.modules())
        return [engine for engine in self.engines if unwrapped(engine.module) in modules]

    @property
    def algorithm(self) -> str | None:
        """Of the engines."""
        return ", ".join(engine.setup.algorithm_name for engine in self.engines) or None

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether one rank's state is that of all."""
        return all(engine.bagua_algorithm.keeps_replicas_equal for engine in self.engines)

    @property
    def process_group(self) -> BaguaProcessGroup | None:
        """Of the engines."""
        return self.engines[0].process_group if self.engines else None


def complete_exchange(subject: Subject) -> None:
    """Before anything is said to the other ranks: they may be waiting for an exchange that this one owes them.

    Raises:
        CollectiveError: a rank is gone; names it.
    """
    for engine in subject.engines:
        engine.bagua_algorithm.complete_exchange(engine)


def refuse_shards(states: Mapping[str, Any], optimizer: Any, doing: str) -> None:
    """One rank writes for all, so that the file would have its shards alone. The state of FSDP1's model is whole, as
    torch gives it by default, and only its optimizer's is not.

    Args:
        states: of model and optimizer, or a whole file.
        optimizer: its parameters are looked at, too; None: none.
        doing: for the message: "saving Linear".

    Raises:
        ValueError: a tensor is distributed by torch.
    """
    remedy = "Save and load its model and its optimizer with torch.distributed.checkpoint"
    refuse_sharded(_tensors_in(states, ""), doing, remedy)
    groups = getattr(optimizer, "param_groups", ())
    parameters = [one for group in groups for one in group["params"]]
    named = ((f"parameter {at} of {type(optimizer).__name__}", one) for at, one in enumerate(parameters))
    refuse_sharded(named, doing, remedy)


def _tensors_in(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, one in state.items():
            yield from _tensors_in(one, f"{name}.{key}".removeprefix("."))
    elif isinstance(state, list | tuple):
        for at, one in enumerate(state):
            yield from _tensors_in(one, f"{name}.{at}")


def contents_of(
    subject: Subject, optimizer: Any, lr_scheduler: Any, iteration: int, rank: int, world_size: int, per_rank: bool
) -> dict[str, Any]:
    """
    The files of this rank, by name. Tensors are those at work.

    Raises:
        ValueError: torch distributes parameters over the ranks.
        Exception: what the states of model, optimizer and scheduler raise.
    """
    # First: it may complete an exchange, which changes weights.
    engine_states = [engine.state_dict() for engine in subject.inner_engines]
    model_state = plain_state(subject.module)
    optimizer_state = None if optimizer is None else optimizer.state_dict()
    states = {**model_state, type(optimizer).__name__: optimizer_state}
    refuse_shards(states, optimizer, f"saving {type(subject.module).__name__}")
    counts = {} if per_rank else state_names.local_counts(model_state)
    about = {
        "world_size": world_size,
        "per_rank": per_rank,
        "algorithm": subject.algorithm,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "engine": engine_states if len(engine_states) > 1 else next(iter(engine_states), None),
        "experts": {layer: count * world_size for layer, count in counts.items()},
    }
    main: dict[str, Any] = {"iteration": iteration, "model": model_state, ABOUT: about}
    if lr_scheduler is not None:
        main["lr_scheduler"] = lr_scheduler.state_dict()
    if not counts:
        if optimizer is not None:
            main["optimizer"] = optimizer_state
        if per_rank and rank > 0:
            return {durable_files.replica_file(rank): main}
        return {durable_files.MODEL_FILE: main} if rank == 0 else {}
    main["model"], experts = state_names.split(model_state, rank, counts)
    files: dict[str, Any] = {durable_files.expert_file(expert): state for expert, state in experts.items()}
    if optimizer is not None:
        files[durable_files.expert_optimizer_file(rank)] = {
            "optimizer": optimizer_state,
            "parameter_names": parameter_names(subject.module, optimizer, rank, counts),
        }
    if rank == 0:
        files[durable_files.MODEL_FILE] = main
    return files


def parameter_names(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, counts: dict[str, int]
) -> list[str | None]:
    """Of the parameters of an optimizer, in its order, as files have them. None: not a parameter of the module."""
    names = {key: state_names.global_name(name, rank, counts) for key, name in plain_parameters(module).items()}
    return [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]


def engine_states_of(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the engines, from what a file says of itself."""
    states = about.get("engine")
    if states is None:
        return []
    return states if isinstance(states, list) else [states]
