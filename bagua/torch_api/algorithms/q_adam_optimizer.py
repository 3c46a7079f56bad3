"""The optimizer of QAdam: Adam that ceases to learn its variance, and whose momentum may then come from elsewhere.

Step t of a parameter p, from t = 1; W is `warmup_steps`, g its gradient plus weight_decay * p:

t <= W   m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
t > W    m = b1 m + (1 - b1) g, or what the algorithm has averaged over the ranks; v stays as it is
always   p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^min(t, W)) + eps)

1 - b2^min(t, W) corrects for the steps in which v was estimated. With `freeze_bias_correction=False` it is 1 - b2^t:
v stays, its correction does not, and steps grow after W, by up to 1 / sqrt(1 - b2^W).

Momentum and variance of parameters in half precision are float32: in float16, eps is zero, and so are the squares of
small gradients.

It runs on the training thread. All parameters that are at the same step are updated by the same few multi-tensor calls
(on CPUs so many at a time as the caches hold), in the order of operations of torch.optim.Adam, for the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor

from bagua.collectives.tensor import record_of
from bagua.kernels.argument_checks import HALF_DTYPES

# On CPUs a call is about so many bytes of parameters, or about one: what it computes on the way takes as many.
_BYTES_AT_A_TIME = 1 << 20


class AveragedMomentum:
    """Where the next momentum of one parameter is communicated: the getter of its Bagua record, by which the optimizer
    finds it. An engine that is detached takes the record away, and this with it.

    tensor: the next momentum, in the memory of its bucket.
    is_current: it takes this rank's gradients into account, and has been averaged; until the next step.
    is_unscaled: gradients were divided by the scale of a GradScaler.
    """

    def __init__(self, tensor: Tensor, is_unscaled: bool) -> None:
        self.tensor = tensor
        self.is_current = False
        self.is_unscaled = is_unscaled

    def __call__(self, parameter: Tensor) -> Tensor:
        return self.tensor

    def replace(self, parameter: Tensor, tensor: Tensor) -> None:
        """The setter of the record."""
        self.tensor = tensor


def averaged_momentum_of(parameter: Tensor) -> AveragedMomentum | None:
    """None while its gradients are what is communicated, or nothing is."""
    record = record_of(parameter)
    getter = None if record is None else record.getter
    return getter if isinstance(getter, AveragedMomentum) else None


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam whose variance is frozen after `warmup_steps`. With QAdamAlgorithm, its momentum is communicated from then
    on; without, it goes on with its own gradients.

    While warming up, results have the bits of torch.optim.Adam. State of a parameter: `step` (int), `exp_avg` and
    `exp_avg_sq`, in its dtype, but float32 for float16 and bfloat16. All options may differ by parameter group.

    The warm-up determines the step size of each element from then on: its momentum is divided by the root mean square
    of its gradients up to step `warmup_steps`. Choose a step at which gradient magnitudes have settled and a warm-up of
    the learning rate is over, and by which every parameter has received typical gradients; a third of the steps is a
    safe choice for short trainings. If it is too small, elements with almost no gradient until then make huge steps
    later, and training can diverge.

    Args:
        params: parameters or groups of them.
        lr: step size.
        warmup_steps: steps of plain Adam, counted for each parameter: those in which it had a gradient.
        betas: how much of momentum and variance remains in each step.
        eps: added to the denominator.
        weight_decay: this times the parameter is added to its gradient.
        freeze_bias_correction: after `warmup_steps`, the bias correction of the variance is frozen, as the variance is.
            False: it continues, and steps grow by up to 1 / sqrt(1 - betas[1] ** warmup_steps).

    Raises:
        ValueError: lr, eps or weight_decay below 0, a beta outside of [0, 1), or warmup_steps below 1 or not whole.
    """

    # A GradScaler then tells `step` the scale, and whether gradients overflowed, instead of leaving `step` out.
    _step_supports_amp_scaling = True
    # `fuse_optimizer` has nothing to make faster.
    _bagua_steps_many_at_a_time = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_bias_correction: bool = True,
    ) -> None:
        # Changes whenever parameters may have begun or ceased to warm up.
        self.phase_version = 0
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "freeze_bias_correction": freeze_bias_correction,
        }
        super().__init__(params, defaults)

    @property
    def warmup_steps(self) -> int:
        """Of the first group."""
        steps: int = self.param_groups[0]["warmup_steps"]
        return steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: an option of the group is out of range.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def warm_parameters(self) -> set[int]:
        """The ids of those that have made their `warmup_steps`."""
        return {
            id(parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if self._steps_of(parameter) >= group["warmup_steps"]
        }

    def _steps_of(self, parameter: Tensor) -> int:
        return self.state[parameter]["step"] if self.state.get(parameter) else 0

    # --- a step ------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. Returns what `closure`, which runs first, returns.

        Raises:
            RuntimeError: a sparse gradient, or momenta of a scaled loss whose scale QAdamAlgorithm was not told.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._sorted_by_step()
        unscale = self._unscaling(work)
        if unscale is not None:
            for (index, step, averaged), parameters in work.items():
                for alike in _of_one_kind(parameters):
                    for some in _at_a_time(alike):
                        self._update(self.param_groups[index], step, averaged, some, unscale)
                if step == self.param_groups[index]["warmup_steps"]:
                    self.phase_version += 1
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            momentum = averaged_momentum_of(parameter)
            if momentum is not None:
                momentum.is_current = False
        return loss

    def _sorted_by_step(self) -> dict[tuple[int, int, bool], list[Tensor]]:
        """The parameters that have a gradient, by group, number of the step they are to make, and whether their
        momentum has been averaged.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        work: dict[tuple[int, int, bool], list[Tensor]] = defaultdict(list)
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and QAdam takes"
                        " dense ones; use sparse=False"
                    )
                step = self._steps_of(parameter) + 1
                momentum = averaged_momentum_of(parameter) if step > group["warmup_steps"] else None
                work[index, step, momentum is not None and momentum.is_current].append(parameter)
        return work

    def _unscaling(self, work: Mapping[tuple[int, int, bool], Sequence[Tensor]]) -> float | Tensor | None:
        """What gradients are to be multiplied by; None: they overflowed, the step is skipped.

        Raises:
            RuntimeError: the algorithm does not know the GradScaler.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return 1.0
        averaged = chain.from_iterable(parameters for (_, _, is_averaged), parameters in work.items() if is_averaged)
        if any(momentum is not None and not momentum.is_unscaled for momentum in map(averaged_momentum_of, averaged)):
            raise RuntimeError(
                "QAdamAlgorithm was not given the GradScaler that scales these gradients.\n"
                "After warm-up, momenta are averaged in backward(), where gradients are still scaled.\n"
                "Pass it to the algorithm: QAdamAlgorithm(optimizer, grad_scaler=scaler). Or use bfloat16 autocast,"
                " which needs no scaler."
            )
        if found_inf.item():
            return None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else reciprocal(scale)

    def _update(
        self, group: Mapping[str, Any], step: int, averaged: bool, parameters: list[Tensor], unscale: float | Tensor
    ) -> None:
        """The formulas at the head of this file, of parameters of one dtype and device."""
        states = [self._state_of(parameter) for parameter in parameters]
        momenta = _real(state["exp_avg"] for state in states)
        variances = _real(state["exp_avg_sq"] for state in states)
        beta1, beta2 = group["betas"]
        if averaged:
            torch._foreach_copy_(momenta, [averaged_momentum_of(one)(one) for one in parameters])  # type: ignore[misc]
        else:
            gradients = gradients_for_momentum(parameters, group["weight_decay"], unscale, in_place=True)
            torch._foreach_lerp_(momenta, gradients, 1 - beta1)
            if step <= group["warmup_steps"]:
                torch._foreach_mul_(variances, beta2)
                torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(variances)
        learned = min(step, group["warmup_steps"]) if group["freeze_bias_correction"] else step
        # A list of the same number again is another kernel on GPUs than the number, and it is what Adam has.
        torch._foreach_div_(denominators, [(1 - beta2**learned) ** 0.5] * len(parameters))
        torch._foreach_add_(denominators, group["eps"])
        targets = _widened(parameters)
        torch._foreach_addcdiv_(targets, momenta, denominators, [-(group["lr"] / (1 - beta1**step))] * len(parameters))
        if parameters[0].dtype in HALF_DTYPES:
            torch._foreach_copy_(parameters, targets)
        for state in states:
            state["step"] = step
        if step == group["warmup_steps"]:
            for variance in variances:
                _fill_unseen(variance)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            dtype = torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        return state

    # --- saved state -------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round float32 state to parameters of half precision.

        Options that were saved win over those that the optimizer was made with. Groups that were saved before there was
        `freeze_bias_correction` have False, so that the run goes on bit for bit.

        Takes the state of a torch.optim.Adam, too. `warmup_steps` and `freeze_bias_correction` are then those that the
        optimizer was made with, but `warmup_steps` at least the most steps that a parameter of the group has made: its
        variance is of all of them, and so has its correction to be.
        """
        super().load_state_dict(state_dict)
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, parameter in zip(names, own, strict=True):
            if parameter.dtype in HALF_DTYPES and name in state_dict["state"]:
                for key in ("exp_avg", "exp_avg_sq"):
                    saved: Tensor = state_dict["state"][name][key]
                    self.state[parameter][key] = saved.to(parameter.device, torch.float32, copy=True)
        for given, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if "warmup_steps" not in given:
                self._go_on_from_adam(group)

    def _go_on_from_adam(self, group: dict[str, Any]) -> None:
        """For parameters that have made all their `warmup_steps` with it, what else the last of them does."""
        group["warmup_steps"] = max([group["warmup_steps"], *map(self._steps_of, group["params"])])
        for parameter in group["params"]:
            if self._steps_of(parameter) == group["warmup_steps"]:
                state = self.state[parameter]
                state["exp_avg_sq"] = state["exp_avg_sq"].clone()  # it may be the memory of the Adam
                for variance in _real([state["exp_avg_sq"]]):
                    _fill_unseen(variance)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Pickles from before the option: groups that are added later are to do what the others do.
        self.defaults.setdefault("freeze_bias_correction", False)
        for group in self.param_groups:
            is_adams = "warmup_steps" not in group
            group.setdefault("warmup_steps", self.defaults["warmup_steps"])
            group.setdefault("freeze_bias_correction", is_adams and self.defaults["freeze_bias_correction"])
        for one in self.state.values():
            one["step"] = int(one["step"])
        self.phase_version = getattr(self, "phase_version", 0) + 1


def _check_options(options: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0:
            raise ValueError(f"{name}={options[name]}: must be at least 0")
    for index, beta in enumerate(options["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{index}]={beta}: must be at least 0 and below 1")
    steps = options["warmup_steps"]
    if not steps >= 1 or steps % 1 != 0:
        raise ValueError(
            f"warmup_steps={steps}: must be at least 1, and whole, since the variance is learned in these steps"
        )


# --- lists of tensors ------------------------------------------------------------------------------------------------


def gradients_for_momentum(
    parameters: Sequence[Tensor], weight_decay: float, unscale: float | Tensor, in_place: bool
) -> list[Tensor]:
    """grad * unscale + weight_decay * p, of parameters of one dtype and device, in the dtype of their momenta.

    Args:
        in_place: `.grad` itself is unscaled, as a GradScaler would do it, where that is possible without a copy.
    """
    given = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(given) == len(parameters)
    gradients = _widened(given)
    if isinstance(unscale, Tensor):
        factor = unscale.to(gradients[0].device)
        if in_place or given[0].dtype in HALF_DTYPES:
            torch._foreach_mul_(gradients, factor)
        else:
            gradients = list(torch._foreach_mul(gradients, factor))
    if weight_decay != 0:
        gradients = list(torch._foreach_add(gradients, _widened(parameters), alpha=weight_decay))
    return gradients


def reciprocal(scale: Tensor) -> Tensor:
    """Of a scale, as a GradScaler computes it."""
    return scale.double().reciprocal().float()


def _of_one_kind(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Apart by dtype and device: multi-tensor calls take the fast way then."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.dtype, parameter.device].append(parameter)
    return kinds.values()


def _at_a_time(parameters: list[Tensor]) -> Iterable[list[Tensor]]:
    """Of one kind. On GPUs all: there the launches count. Not by plan_buckets, which looks at more of each tensor: with
    4000 small ones that took a tenth of the step."""
    if parameters[0].device.type != "cpu":
        return [parameters]
    groups: list[list[Tensor]] = [[]]
    size = 0
    for parameter in parameters:
        if size >= _BYTES_AT_A_TIME:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of one dtype. Half precision: float32 copies. Otherwise themselves, complex numbers as pairs of real ones."""
    if tensors[0].dtype not in HALF_DTYPES:
        return _real(tensors)
    copies = [torch.empty_like(one, dtype=torch.float32) for one in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _real(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(one) if one.is_complex() else one for one in tensors]


def _fill_unseen(variance: Tensor) -> None:
    """Elements that had no gradient while warming up (rows of an embedding, for instance) get the mean variance of the
    others: their steps would be divided by eps alone. The host does not look."""
    unseen = variance == 0
    mean = variance.sum() / (~unseen).sum().clamp(min=1)
    variance.copy_(torch.where(unseen, mean, variance))
