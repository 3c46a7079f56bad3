"""Reading of environment variables, by the same rules as the compiled library (net_plugin/config/plugin_config.cc):
values are trimmed, and a variable that is set to nothing counts as not set. No torch, no native import."""

from __future__ import annotations

from collections.abc import Mapping

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


class EnvironmentValueError(ValueError):
    """A variable holds a value that means nothing. The message names variable, value and what is allowed."""


def read_text(environment: Mapping[str, str], name: str) -> str | None:
    """The trimmed value, or None if the variable is unset or blank."""
    return environment.get(name, "").strip() or None


def read_switch(environment: Mapping[str, str], name: str) -> bool | None:
    """A boolean, or None if it is not set. Raises EnvironmentValueError for anything else."""
    text = read_text(environment, name)
    if text is None:
        return None
    word = text.lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise EnvironmentValueError(f"{name}={text}: must be 1, true, yes or on, or else 0, false, no or off")


def read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """An integer parameter of NCCL's, read as leniently as NCCL does: what is no number counts as the default."""
    text = read_text(environment, name)
    if text is None:
        return default
    try:
        return int(text, 0)
    except ValueError:
        return default
