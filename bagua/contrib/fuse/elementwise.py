"""Whether an optimizer updates each element by itself, so that many parameters may be stepped as one."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Elementwise by their definition: not tried out.
_KNOWN = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)

# By what the name of a class, or of one that it inherits from, has in it.
_REFUSED = {
    r"lamb(?!da)|lars|novograd|adafactor|adammini|adam_mini": "it uses norms or means of whole parameters",
    r"muon|shampoo|soap|galore|kfac": "it uses parameters as matrices",
    r"lbfgs": "it calls the closure several times and keeps the history of all parameters",
    r"sparseadam": "its gradients are sparse",
    r"qadam": "it takes the momentum of each parameter from its bucket",
}

_STEPS = 3


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step function of its class, which runs no hooks. Takes the optimizer."""
    step: Any = type(optimizer).step
    plain: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return plain


def steps_many_at_a_time(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its own step does what fusing is for, as the class says. `fuse_step` is then that step."""
    return bool(getattr(optimizer, "_bagua_steps_many_at_a_time", False))


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: its name says that it is not elementwise, it steps two small tensors differently when they are one,
            or it steps with another optimizer.
    """
    if type(optimizer) in _KNOWN:
        return
    name = type(optimizer).__name__
    for cls in type(optimizer).__mro__:
        for pattern, why in _REFUSED.items():
            if re.search(pattern, cls.__name__, re.IGNORECASE):
                raise ValueError(_refusal(name, why))
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        raise ValueError(_refusal(name, "it steps with another optimizer, which can be fused instead"))
    for group in optimizer.param_groups:
        if _differs(optimizer, group):
            raise ValueError(_refusal(name, "two small tensors were stepped differently when they were one"))


def _refusal(name: str, why: str) -> str:
    return (
        f"{name} cannot be fused: {why}.\n"
        "fuse_optimizer() steps many parameters as one flat tensor, which must not change the result.\n"
        "Use optimizer.step(). If you know that it updates each element by itself, pass elementwise=True."
    )


def _differs(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether tensors of very different norms are stepped differently when they are one."""
    device = next((one.device for one in group["params"]), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        device = torch.device("cpu")
    weights = [
        torch.linspace(-1, 1, 12, dtype=torch.float64, device=device).reshape(4, 3),
        torch.linspace(50, 90, 10, dtype=torch.float64, device=device).reshape(2, 5),
    ]
    with torch.random.fork_rng(devices=[]):
        try:
            apart = _stepped(optimizer, group, [one.clone() for one in weights])
        except Exception:  # whatever it needs, it cannot be tried out
            return False
        try:
            as_one = _stepped(optimizer, group, [torch.cat([one.flatten() for one in weights])])
        except Exception:
            return True
    return not torch.allclose(apart, as_one, rtol=1e-9, atol=1e-12, equal_nan=True)


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> Tensor:
    """The weights after some steps of an optimizer like this one."""
    twin = type(optimizer).__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, name, OrderedDict())
    twin.state = defaultdict(dict)
    moving = {"lr": group["lr"] or 0.1} if "lr" in group else {}  # a warm-up may begin at zero
    twin.param_groups = [{**group, **moving, "params": [one.requires_grad_() for one in parameters]}]
    step = plain_step(twin)
    for number in range(_STEPS):
        for one in parameters:
            one.grad = (one.detach() * (number + 1)).sin()
        step(twin)
    return torch.cat([one.detach().flatten() for one in parameters])
