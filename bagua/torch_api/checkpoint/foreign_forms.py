"""States in files that Bagua 0.9 wrote, or that were converted by torch.distributed.checkpoint, as those of
`save_checkpoint` are. Functions.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bagua.torch_api.checkpoint.contents import ABOUT, engine_states_of
from bagua.torch_api.checkpoint.plain_names import rename_for


def adapt(state: dict[str, Any], module: nn.Module) -> None:
    """
    In place.

    Args:
        state: what a rank is about to load.
        module: into which.
    """
    rename_for(module, state["model"])
    _with_numbers(state.get("optimizer"))
    # The conversion leaves empty containers out.
    for engine in engine_states_of(state.get(ABOUT) or {}):
        engine.setdefault("algorithm", {})


def _with_numbers(optimizer_state: dict[str, Any] | None) -> None:
    """The conversion makes strings of the positions of parameters, which an optimizer would ignore."""
    if optimizer_state is None or "param_groups" not in optimizer_state:
        return
    states = optimizer_state.setdefault("state", {})
    if all(isinstance(key, str) and key.isdecimal() for key in states):
        optimizer_state["state"] = {int(key): value for key, value in states.items()}
