"""How a module is trained: what its user has chosen, as one value. Tuning, and whoever changes the sizes of buckets,
makes another one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.parameters import replicated_parameters


@dataclass(frozen=True, eq=False)
class Setup:
    """
    module: this rank's replica.
    optimizers: whose state is made that of group rank 0, and after whose steps the algorithm may communicate.
    group: the ranks that train together.
    algorithm: the recipe, a bagua.torch_api.algorithms.Algorithm.
    name: by which the ranks know the module.
    ignored: names of parameters and buffers that are not synchronized.
    flatten: what is communicated lies in the memory of its bucket.
    find_unused_parameters: parameters that a backward pass does not reach contribute zeros.
    bucket_bytes: the size at which a bucket is closed; None: the default of its device.
    first_bucket_bytes: the same of the first bucket, which is launched earliest; None: as the others.
    tuning_space: labels of the algorithms that tuning may choose; None: no tuning was asked for.
    static_graph: all backward passes are like the first one, see bagua.engine.unused_parameters. Needs
        `find_unused_parameters`.
    synchronizes_first: the ranks compare modules, optimizers and settings before the first plan, and take the values of
        group rank 0. Otherwise nothing is communicated, and the caller ensures that they are equal.
    loss: of passes with batch weights, "mean" or "sum" of its samples; None: all ranks count alike.
    counts_batch: the weight is the first dimension of the first tensor that the module is called with.
    left_out: names of parameters that no rank uses: they are not communicated, and must not get gradients.
    """

    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    group: BaguaProcessGroup
    algorithm: Any
    name: str
    ignored: list[str]
    flatten: bool = True
    find_unused_parameters: bool = False
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = FIRST_BUCKET_BYTES
    tuning_space: tuple[str, ...] | None = None
    static_graph: bool = False
    synchronizes_first: bool = True
    loss: str | None = None
    counts_batch: bool = False
    left_out: frozenset[str] = frozenset()

    @functools.cached_property
    def communicator(self) -> BaguaCommunicator:
        """Of all ranks that train together, on the module's device.

        Raises:
            ValueError: the group is bound to another GPU.
        """
        replicated = (parameter for _, parameter in replicated_parameters(self.module, self.ignored))
        return self.group.communicator_for(type(self.module).__name__, replicated)

    @property
    def algorithm_name(self) -> str:
        """As users write it."""
        return str(getattr(self.algorithm, "public_name", type(self.algorithm).__name__))

    @property
    def communication(self) -> tuple[Any, int | None, int | None]:
        """What may differ from one plan to the next."""
        return self.algorithm, self.bucket_bytes, self.first_bucket_bytes


@dataclass
class ActiveRanks:
    """Which ranks take part in a step. Whoever lets ranks stop earlier than others owns one, and the engine asks it.

    is_uneven: some ranks only repeat what others communicate. They do not see changes of the plan, so there are none.
    gradient_scale: by which communicated gradients are multiplied, because some ranks contributed nothing.
    """

    is_uneven: bool = False
    gradient_scale: float = 1.0
