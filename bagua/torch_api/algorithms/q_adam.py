"""QAdam: Adam whose momentum is communicated in eight bits, once its variance has settled.

Step t of a parameter p, from t = 1; W is `warmup_steps`, g_i the gradient of rank i plus weight_decay * p:

t <= W   g = mean of g_i            m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
t > W    m = mean of C(b1 m + (1 - b1) g_i)                        v stays as it is
always   p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^min(t, W)) + eps)

C is the compression of bagua.comm_ops.compressed. Momentum enters linearly and bears it; the variance would not, so it
is learned before (Tang et al., 1-bit Adam, ICML 2021; here with eight bits, and without error compensation). What
differs from Bagua 0.9, and why: docs/reference/algorithms/qadam.md.

[Note: momentum changes in step]
Backward communicates b1 m + (1 - b1) g in memory of the buckets (AveragedMomentum); `step` takes it over. Until then m
stays, so that a second backward pass begins with it again, with all that has been added up in `.grad`, and that a step
which is skipped leaves no trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.tensor import ensure_record, gradient_of, set_gradient
from bagua.comm_ops.compressed import compressed_alignment, idle_hierarchy
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.bucket import Bucket
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.algorithms.q_adam_optimizer import (
    AveragedMomentum,
    QAdamOptimizer,
    averaged_momentum_of,
    gradients_for_momentum,
    reciprocal,
)

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]

# Of momenta that can be compressed. Where they are others (float64, complex), gradients are averaged to the end.
_COMPRESSED_DTYPE = torch.float32


class _FoldGradients:
    """The first operation on momenta: fills the bucket with b1 m + (1 - b1) g of this rank's gradients."""

    inline = False

    def __init__(self, optimizer: QAdamOptimizer, places: Mapping[int, int], scaler: Any) -> None:
        self._optimizer = optimizer
        self._places = places
        self._scaler = scaler

    @torch.no_grad()
    def run(self, bucket: Bucket) -> None:
        unscale: float | Tensor = 1.0
        if self._scaler is not None:
            unscale = reciprocal(self._scaler.scale(torch.ones((), dtype=torch.float32, device=bucket.device)))
        members: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for parameter, view in zip(bucket.tensors, bucket.views, strict=True):
            parameters, views = members[self._places[id(parameter)], parameter.dtype]
            parameters.append(parameter)
            views.append(view)
        for (place, _), (parameters, views) in members.items():
            group = self._optimizer.param_groups[place]
            torch._foreach_copy_(views, [self._optimizer.state[parameter]["exp_avg"] for parameter in parameters])
            gradients = gradients_for_momentum(parameters, group["weight_decay"], unscale, in_place=False)
            torch._foreach_lerp_(views, gradients, 1 - group["betas"][0])
        if bucket.weight is not None:
            bucket.flattened_tensor().mul_(bucket.weight)
        for parameter in bucket.tensors:
            momentum = averaged_momentum_of(parameter)
            assert momentum is not None
            momentum.is_current = True


class _CarryOverflow:
    """The last operation, with a GradScaler: where averaged momenta are not finite, this rank's gradients are not
    either, so that the scalers of all ranks skip the step, not only those of the ranks that had an overflow."""

    inline = False

    @torch.no_grad()
    def run(self, bucket: Bucket) -> None:
        gradient = next((one.grad for one in bucket.tensors if one.numel()), None)
        if gradient is not None:
            low, high = bucket.flattened_tensor().aminmax()
            gradient[(0,) * gradient.dim()].add_((low - low) + (high - high))  # 0 or NaN; the host does not look


class QAdamAlgorithmImpl(AlgorithmImpl):
    """See QAdamAlgorithm."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        q_adam_optimizer: QAdamOptimizer | None,
        hierarchical: bool = True,
        grad_scaler: Any = None,
    ) -> None:
        super().__init__(process_group)
        self.optimizer = q_adam_optimizer
        self.hierarchical = hierarchical
        self.grad_scaler = grad_scaler
        self._version: int | None = None
        # Ids of parameters whose momentum can be communicated, as of that version.
        self._warm: frozenset[int] = frozenset()
        self._parameters: list[Tensor] = []
        # Of the optimizer's parameters: the group of each, by its id.
        self._places: dict[int, int] = {}
        # Ids of parameters whose momentum is communicated.
        self._compressed: set[int] = set()

    @property
    def phase(self) -> frozenset[int]:
        """Whose momentum is communicated: changes after the step with which parameters have warmed up."""
        if self.optimizer is not None and self._version != self.optimizer.phase_version:
            self._version, self._warm = self.optimizer.phase_version, frozenset(self._to_compress())
        return self._warm

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        """Momenta of parameters that have warmed up, gradients of all others; the last first."""
        named = bagua_ddp.synchronized_parameters
        self._parameters = [parameter for _, parameter in named]
        if self.optimizer is not None:
            groups = self.optimizer.param_groups
            self._places = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
            self._check_optimizers(bagua_ddp)
            self._version = None  # of other parameters
            self._compressed = set(self.phase)
        for name, parameter in named:
            if self.optimizer is not None and id(parameter) in self._compressed:
                memory = torch.empty_like(self.optimizer.state[parameter]["exp_avg"])
                momentum = AveragedMomentum(memory, is_unscaled=self.grad_scaler is not None)
                ensure_record(parameter, name, bagua_ddp.bagua_module_name, momentum, momentum.replace)
            else:
                ensure_record(parameter, name, bagua_ddp.bagua_module_name, gradient_of, set_gradient)
        return self._parameters[::-1]

    def _check_optimizers(self, bagua_ddp: AlgorithmFacade) -> None:
        if not any(one is self.optimizer for one in bagua_ddp.bagua_optimizers):
            raise ValueError(
                "q_adam_optimizer is not among the optimizers that the module is wrapped with.\n"
                "Also list it there, so that all ranks start with the same state."
            )
        if not any(id(parameter) in self._places for parameter in self._parameters):
            raise ValueError(
                f"q_adam_optimizer steps no parameter that {bagua_ddp.bagua_module_name} trains.\n"
                "Construct it with this module's parameters."
            )

    def _to_compress(self) -> set[int]:
        assert self.optimizer is not None
        warm, state = self.optimizer.warm_parameters(), self.optimizer.state
        return {
            id(parameter)
            for parameter in self._parameters
            if id(parameter) in warm and state[parameter]["exp_avg"].dtype == _COMPRESSED_DTYPE
        }

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> Sequence[BaguaBucket]:
        """As given, but momenta and gradients apart."""
        alignment = compressed_alignment(self.process_group, self.hierarchical)
        buckets: list[BaguaBucket] = []
        for group in tensors:
            gradients = [tensor for tensor in group if id(tensor) not in self._compressed]
            momenta = [tensor for tensor in group if id(tensor) in self._compressed]
            if gradients:
                buckets.append(BaguaBucket(gradients, str(len(buckets)), do_flatten))
            if momenta:
                buckets.append(BaguaBucket(momenta, str(len(buckets)), do_flatten, alignment))
        return buckets

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if bucket.holds_gradients:
            bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
            return
        assert self.optimizer is not None
        bucket.append_op(_FoldGradients(self.optimizer, self._places, self.grad_scaler))
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=True,
            scattergather=True,
            compression="MinMaxUInt8",
            group=self.process_group,
        )
        if self.grad_scaler is not None:
            bucket.append_op(_CarryOverflow())

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        return idle_hierarchy(self.process_group, self.hierarchical, "momenta")

    def init_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[str, Tensor], None]:
        if not (self._compressed and bagua_ddp.find_unused_parameters):
            return bagua_ddp.mark_ready

        def mark(name: str, parameter: Tensor) -> None:
            if parameter.grad is None:  # others may have one, and then every rank steps
                parameter.grad = torch.zeros_like(parameter)
            bagua_ddp.mark_ready(name, parameter)

        return mark


class QAdamAlgorithm(Algorithm):
    """
    Args:
        q_adam_optimizer: steps the module's parameters; `with_bagua` is given it, too.
        hierarchical: after warm-up, momenta are averaged within each node first, uncompressed, so that only one rank
            per node sends to other nodes.
        grad_scaler: the torch.amp.GradScaler that scales the loss, if there is one. Gradients are divided by its scale
            before they go into the momentum.

    Raises:
        TypeError: another kind of optimizer.
    """

    weighs_batches = True

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True, grad_scaler: Any = None) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(
                f"q_adam_optimizer is a {type(q_adam_optimizer).__name__}; QAdam works with a QAdamOptimizer only"
            )
        self.q_adam_optimizer: QAdamOptimizer | None = q_adam_optimizer
        self.hierarchical = hierarchical
        self.grad_scaler = grad_scaler

    @classmethod
    def options_from(cls, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """The QAdamOptimizer among the module's optimizers.

        Raises:
            ValueError: there is none, or several.
        """
        found = [one for one in optimizers if isinstance(one, QAdamOptimizer)]
        if len(found) != 1:
            raise ValueError(
                "The algorithm qadam needs one QAdamOptimizer; the optimizers are"
                f" {[type(one).__name__ for one in optimizers]}.\n"
                "Step the parameters with QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=100)"
                " (bagua.torch_api.algorithms.q_adam)."
            )
        return {"q_adam_optimizer": found[0]}

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles, which a copied wrapper has, are without optimizer: whoever steps the copy needs its
        # gradients, averaged, whatever the momenta of the original are.
        return {**self.__dict__, "q_adam_optimizer": None, "grad_scaler": None}

    def reify(self, process_group: BaguaProcessGroup) -> QAdamAlgorithmImpl:
        return QAdamAlgorithmImpl(process_group, self.q_adam_optimizer, self.hierarchical, self.grad_scaler)
