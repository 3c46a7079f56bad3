"""What a rank writes into a checkpoint: the names of files and their contents. Functions; the thread that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagua.engine.data_parallel import BaguaDistributedDataParallel
from bagua.torch_api.checkpoint import expert_states, layout
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel

# Under this key a file says what it is. Files of Bagua 0.9 have none.
ABOUT = "bagua"


@dataclass(frozen=True)
class Subject:
    """
    What is saved or loaded.

    Attributes:
        module: itself, without wrapper: names of parameters have no prefix.
        engine: None where it is not wrapped.
    """

    module: nn.Module
    engine: BaguaDistributedDataParallel | None

    @property
    def algorithm(self) -> str | None:
        """Of the engine."""
        return None if self.engine is None else type(self.engine.bagua_algorithm).__name__

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether one rank's state is that of all."""
        return self.engine is None or self.engine.bagua_algorithm.keeps_replicas_equal


def subject_of(model: nn.Module) -> Subject:
    """
    Args:
        model: a module, wrapped by with_bagua or not, or a DistributedDataParallel, Bagua's or torch's.
    """
    if isinstance(model, DistributedDataParallel):
        return Subject(model.module, model.inner)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return Subject(model.module, None)
    return Subject(model, model.__dict__.get("bagua_ddp"))


def complete_exchange(subject: Subject) -> None:
    """Before anything is said to the other ranks: they may be waiting for an exchange that this one owes them.

    Raises:
        CollectiveError: a rank is gone; names it.
    """
    if subject.engine is not None:
        subject.engine.bagua_algorithm.complete_exchange(subject.engine)


def contents_of(
    subject: Subject, optimizer: Any, lr_scheduler: Any, iteration: int, rank: int, world_size: int, per_rank: bool
) -> dict[str, Any]:
    """
    The files of this rank, by name. Tensors are those at work.

    Raises:
        Exception: what the states of model, optimizer and scheduler raise.
    """
    # First: it may complete an exchange, which changes weights.
    engine_state = None if subject.engine is None else subject.engine.state_dict()
    model_state = subject.module.state_dict()
    counts = {} if per_rank else expert_states.local_counts(model_state)
    about = {
        "world_size": world_size,
        "per_rank": per_rank,
        "algorithm": subject.algorithm,
        "engine": engine_state,
        "experts": {layer: count * world_size for layer, count in counts.items()},
    }
    main: dict[str, Any] = {"iteration": iteration, "model": model_state, ABOUT: about}
    if lr_scheduler is not None:
        main["lr_scheduler"] = lr_scheduler.state_dict()
    if not counts:
        if optimizer is not None:
            main["optimizer"] = optimizer.state_dict()
        if per_rank and rank > 0:
            return {layout.replica_file(rank): main}
        return {layout.MODEL_FILE: main} if rank == 0 else {}
    main["model"], experts = expert_states.split(model_state, rank, counts)
    files: dict[str, Any] = {layout.expert_file(expert): state for expert, state in experts.items()}
    if optimizer is not None:
        files[layout.expert_optimizer_file(rank)] = {
            "optimizer": optimizer.state_dict(),
            "parameter_names": parameter_names(subject.module, optimizer, rank, counts),
        }
    if rank == 0:
        files[layout.MODEL_FILE] = main
    return files


def parameter_names(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, counts: dict[str, int]
) -> list[str | None]:
    """Of the parameters of an optimizer, in its order, as files have them. None: not a parameter of the module."""
    names = {
        id(parameter): expert_states.global_name(name, rank, counts) for name, parameter in module.named_parameters()
    }
    return [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
