"""The two settings of a comparison: what the environment of the command is changed to."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from bagua.net.activation import Target, plan
from bagua.net.bench.errors import UsageError
from bagua.net.plugin_setting import is_our_name

WITH_PLUGIN = "plugin"
WITHOUT_PLUGIN = "no-plugin"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """
    Attributes:
        name: for the user.
        environment: all variables of the command.
        plugin: whether the plugin is asked for; None where the setting leaves that as it is.
        warnings: of switching the plugin on.
    """

    name: str
    environment: Mapping[str, str]
    plugin: bool | None = None
    warnings: tuple[str, ...] = ()


def default_settings(base: Mapping[str, str]) -> tuple[Setting, Setting]:
    return parse_setting(WITHOUT_PLUGIN, base), parse_setting(WITH_PLUGIN, base)


def parse_setting(text: str, base: Mapping[str, str]) -> Setting:
    """Words of a shell: VARIABLE=VALUE, `plugin` or `no-plugin`.

    Raises:
        UsageError: a word is neither, or there is none.
        ValueError, RuntimeError: the plugin cannot be switched on, as `activation.plan` raises.
    """
    environment = dict(base)
    plugin: bool | None = None
    warnings: tuple[str, ...] = ()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--with {text!r}: {error}") from error
    if not words:
        raise UsageError("--with is empty; give VARIABLE=VALUE, plugin or no-plugin")
    # Assignments last, whatever their order: they are what the user names explicitly.
    for word in words:
        if word == WITH_PLUGIN:
            plugin = True
            environment.pop("ENABLE_BAGUA_NET", None)
            result = plan(environment, Target.NEW_PROCESS)
            environment |= result.changes
            warnings = result.warnings
        elif word == WITHOUT_PLUGIN:
            plugin = False
            environment = _without_plugin(environment)
        elif _ASSIGNMENT.fullmatch(word) is None:
            raise UsageError(
                f"--with {text!r}: {word!r} is not VARIABLE=VALUE, {WITH_PLUGIN} or {WITHOUT_PLUGIN}; write for example"
                ' --with "plugin BAGUA_NET_NSTREAMS=4"'
            )
    environment |= {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}
    return Setting(_name(text), environment, plugin, warnings)


def _name(text: str) -> str:
    return {WITH_PLUGIN: "Bagua-Net", WITHOUT_PLUGIN: "NCCL's own network"}.get(text.strip(), text.strip())


def _without_plugin(environment: Mapping[str, str]) -> dict[str, str]:
    """The library declines with ENABLE_BAGUA_NET=0, however NCCL finds it."""
    kept = {
        name: value
        for name, value in environment.items()
        if name != "BAGUA_NET_REQUIRED" and not (name == "NCCL_NET" and is_our_name(value))
    }
    return {**kept, "ENABLE_BAGUA_NET": "0"}
