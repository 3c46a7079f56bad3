"""States in files that Bagua 0.9 wrote, or that were converted by torch.distributed.checkpoint, as those of
`save_checkpoint` are. Functions.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bagua.torch_api.checkpoint.contents import ABOUT

_WRAPPER = "module."


def adapt(state: dict[str, Any], module: nn.Module) -> None:
    """
    In place.

    Args:
        state: what a rank is about to load.
        module: into which.
    """
    _without_wrapper(state["model"], module)
    _with_numbers(state.get("optimizer"))
    # The conversion leaves empty containers out.
    engine = (state.get(ABOUT) or {}).get("engine")
    if engine is not None:
        engine.setdefault("algorithm", {})


def _without_wrapper(model_state: dict[str, Any], module: nn.Module) -> None:
    """Bagua 0.9 wrote the names of its DistributedDataParallel."""
    is_wrapped = all(name.startswith(_WRAPPER) for name in model_state)
    if is_wrapped and not any(name.startswith(_WRAPPER) for name in module.state_dict()):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(model_state, _WRAPPER)


def _with_numbers(optimizer_state: dict[str, Any] | None) -> None:
    """The conversion makes strings of the positions of parameters, which an optimizer would ignore."""
    if optimizer_state is None or "param_groups" not in optimizer_state:
        return
    states = optimizer_state.setdefault("state", {})
    if all(isinstance(key, str) and key.isdecimal() for key in states):
        optimizer_state["state"] = {int(key): value for key, value in states.items()}
