"""Makes NCCL take our plugin: decides which variables that needs, and sets them.

`plan` decides and touches nothing; `activate` applies the plan to this process, `environment` is the plan for a
process that is about to be started. docs/how-to/switch-on.md is the user's side of this file.

[Note: what NCCL needs] NCCL 2.21 and newer take NCCL_NET_PLUGIN as a path. 2.12 to 2.20 make
`libnccl-net-<value>.so` of any value: a path spoils them, and they find us only as the default `libnccl-net.so` over
LD_LIBRARY_PATH, which the loader reads when a process starts. 2.28 and 2.29 forget NCCL_NET_PLUGIN when the last
communicator is gone and then open the default name, too. So processes that we start get both, and a process that runs
already gets the path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bagua.env import read_switch, read_text
from bagua.net import nccl_config_file, notice
from bagua.net.blame import start_in_job
from bagua.net.library import initial_environment, library_path, loader_search_path
from bagua.net.nccl_config_file import ConfigSetting
from bagua.net.nccl_release import NcclRelease, wheel_release
from bagua.net.plugin_setting import PLUGIN_NAME, default_name_finds, is_our_name, names_library, plugin_value


class ActivationError(RuntimeError):
    """The plugin cannot be switched on. The message names the cause and the remedy."""


class ActivationState(Enum):
    """
    Attributes:
        OFF: ENABLE_BAGUA_NET=0.
        NOT_ASKED: no variable asks for the plugin.
        ACTIVE: NCCL will load the plugin.
        KEPT: one of your own settings selects another plugin or network, and was left alone.
    """

    OFF = "off"
    NOT_ASKED = "not asked"
    ACTIVE = "active"
    KEPT = "kept"


class Target(Enum):
    """For whom the variables are. The difference is LD_LIBRARY_PATH, which only a new process reads."""

    THIS_PROCESS = "this process"
    NEW_PROCESS = "new process"
    NEW_PROCESS_BY_NAME = "new process, found by name"  # for NCCL 2.12 to 2.20


@dataclass(frozen=True)
class KeptSetting:
    """
    A setting of yours that was left alone.

    Attributes:
        name: NCCL_NET or NCCL_NET_PLUGIN.
        source: "the environment", or the path of the configuration file.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class ActivationResult:
    """
    Attributes:
        changes: the variables that were set.
        library: the plugin; None if it is not used.
        kept: your own settings that were left alone.
        warnings: what was logged.
    """

    state: ActivationState
    changes: Mapping[str, str] = field(default_factory=dict)
    library: Path | None = None
    kept: tuple[KeptSetting, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Surroundings:
    """What activation depends on besides the variables. Tests make their own."""

    library: Path
    config: tuple[ConfigSetting, ...] = ()
    torch_nccl: tuple[str, NcclRelease] | None = None  # name and release of the wheel
    loader_path: tuple[Path, ...] = ()  # LD_LIBRARY_PATH as the loader of the target reads it

    @classmethod
    def of_this_host(cls, environment: Mapping[str, str], target: Target) -> Surroundings:
        started_with = initial_environment() if target is Target.THIS_PROCESS else environment
        return cls(
            library=library_path(),
            config=tuple(nccl_config_file.read_settings(nccl_config_file.config_files(environment))),
            torch_nccl=wheel_release(),
            loader_path=tuple(loader_search_path(started_with)),
        )


def activate(environment: MutableMapping[str, str] | None = None) -> ActivationResult:
    """
    Set NCCL's variables if ENABLE_BAGUA_NET is on. Call it before the process's first NCCL communicator. A second call
    changes nothing. Warnings go to the logger `bagua.net`, once. Ranks then also report which rank they wait for.

    Args:
        environment: is read and changed; None: os.environ.

    Raises:
        EnvironmentValueError: a variable has an invalid value.
        MissingFileError: the plugin is not installed.
        PluginPathError: NCCL cannot load a plugin from its path.
        ActivationError: the plugin cannot be switched on for another reason.
    """
    target = os.environ if environment is None else environment
    result = plan(target, Target.THIS_PROCESS)
    for name, value in result.changes.items():
        _replaced.setdefault(name, target.get(name))
        target[name] = value
    notice.report(result.warnings, target)
    if environment is None and result.state is ActivationState.ACTIVE:
        start_in_job(os.environ)
    return result


def activate_at_import() -> None:
    """For `import bagua` and `import torch`, which an optional network plugin must not break: errors become warnings,
    unless BAGUA_NET_REQUIRED or BAGUA_NET_ENCRYPTION says that the job must not go on without it. Our own commands are
    no job: they say what is wrong with the variables themselves, and a doctor whose import failed could not."""
    if _is_own_command():
        return
    try:
        activate()
    except Exception as error:
        if _is_required(os.environ):
            raise
        notice.report([f"not activated, NCCL uses its own transport: {error}"], os.environ)


def environment(base: Mapping[str, str], *, by_name: bool = False) -> dict[str, str]:
    """
    The variables that a new process needs in addition to `base` to use the plugin.

    Args:
        base: the environment of the new process.
        by_name: for NCCL 2.12 to 2.20, which find a plugin by its name only.

    Raises:
        RuntimeError: as `activate`.
    """
    target = Target.NEW_PROCESS_BY_NAME if by_name else Target.NEW_PROCESS
    return dict(plan(base, target).changes)


def original_environment() -> dict[str, str]:
    """os.environ without what `activate` set in this process: what the user set."""
    original = dict(os.environ)
    for name, value in _replaced.items():
        if value is None:
            original.pop(name, None)
        else:
            original[name] = value
    return original


def plan(base: Mapping[str, str], target: Target, surroundings: Surroundings | None = None) -> ActivationResult:
    """What has to be set. A new process is started by someone who asked for the plugin; this process has asked only
    if a variable says so, and `surroundings` are looked at only then: most processes that import torch have not."""
    is_asked = read_switch(base, "ENABLE_BAGUA_NET")
    is_new = target is not Target.THIS_PROCESS
    if is_asked is False:
        said = "ENABLE_BAGUA_NET=0 is set: NCCL uses its own transport\nTo use the plugin, set it to 1 or unset it."
        return ActivationResult(ActivationState.OFF, warnings=(said,) if is_new else ())
    demanding = demanding_setting(base)
    if is_asked is None and demanding is None and not is_new:
        return ActivationResult(ActivationState.NOT_ASKED)

    here = Surroundings.of_this_host(base, target) if surroundings is None else surroundings
    settings = {setting.name: KeptSetting(setting.name, setting.value, str(setting.file)) for setting in here.config}
    settings |= {name: KeptSetting(name, value, "the environment") for name, value in base.items()}

    other_net = settings.get("NCCL_NET")
    if other_net is not None and not is_our_name(other_net.value):
        return _keep_net(other_net, demanding, here.library)

    required = {"NCCL_NET": PLUGIN_NAME} if demanding is not None and other_net is None else {}
    other_plugin = settings.get("NCCL_NET_PLUGIN")
    if other_plugin is not None and not names_library(other_plugin.value, here.library, list(here.loader_path)):
        return _keep_plugin(other_plugin, required, here.library)

    if other_plugin is not None:
        changes = {}
    elif is_new:
        changes = _changes_for_new_process(target, here)
    else:
        changes = _changes_for_this_process(here)
    if is_new:
        changes |= {} if is_asked else {"ENABLE_BAGUA_NET": "1"}
        changes |= _loader_path_change(base, here.library)
    return ActivationResult(ActivationState.ACTIVE, changes | required, here.library)


def demanding_setting(base: Mapping[str, str]) -> str | None:
    """The setting because of which the job must not go on without the plugin, such as "BAGUA_NET_REQUIRED=1". None:
    there is none. Encryption is one, because NCCL's own transport sends everything in the clear."""
    if read_switch(base, "BAGUA_NET_REQUIRED"):
        return "BAGUA_NET_REQUIRED=1"
    encryption = read_text(base, "BAGUA_NET_ENCRYPTION")
    return f"BAGUA_NET_ENCRYPTION={encryption}" if encryption not in (None, "0") else None


def nccl_finds_plugin(environment: Mapping[str, str]) -> bool:
    """Whether NCCL will take the plugin of this installation in this process, as far as variables and configuration
    files say; whether the library starts, only NCCL's log knows. Never raises: what keeps us from telling keeps
    `activate` from setting anything, too."""
    try:
        # torch's wheel is not looked at: it decides about what is still to be set.
        here = Surroundings(
            library=library_path(),
            config=tuple(nccl_config_file.read_settings(nccl_config_file.config_files(environment))),
            loader_path=tuple(loader_search_path(initial_environment())),
        )
        # NCCL puts what its files set into the environment, where the library reads it.
        if read_switch({one.name: one.value for one in here.config} | dict(environment), "ENABLE_BAGUA_NET") is False:
            return False
        result = plan({**environment, "ENABLE_BAGUA_NET": "1"}, Target.THIS_PROCESS, here)
        return result.state is ActivationState.ACTIVE and way_to_plugin(environment, here) is not None
    except (ValueError, RuntimeError, OSError):
        return False


def way_to_plugin(environment: Mapping[str, str], here: Surroundings) -> tuple[str, Path | None] | None:
    """What makes NCCL itself find us, without any Python in the job, and the configuration file if it is one."""
    path = list(here.loader_path)
    if "NCCL_NET_PLUGIN" in environment:
        value = environment["NCCL_NET_PLUGIN"]
        return (f"NCCL_NET_PLUGIN={value}", None) if names_library(value, here.library, path) else None
    for setting in here.config:
        if setting.name == "NCCL_NET_PLUGIN" and names_library(setting.value, here.library, path):
            return f"{setting.file} sets NCCL_NET_PLUGIN", setting.file
    if default_name_finds(here.library, path):
        return "LD_LIBRARY_PATH leads to it", None
    return None


def _changes_for_new_process(target: Target, here: Surroundings) -> dict[str, str]:
    if target is Target.NEW_PROCESS_BY_NAME or _needs_name(here):
        return {}
    return {"NCCL_NET_PLUGIN": plugin_value(here.library)}


def _changes_for_this_process(here: Surroundings) -> dict[str, str]:
    # Found by its name already, as `bagua-net run --by-name` arranges it: a path would spoil that for an old NCCL.
    if default_name_finds(here.library, list(here.loader_path)):
        return {}
    if _needs_name(here):
        assert here.torch_nccl is not None
        name, release = here.torch_nccl
        raise ActivationError(
            f"NCCL {release} ({name}) finds plugins only through the LD_LIBRARY_PATH with which a process is started\n"
            "Start the job with `bagua-net run -- CMD`, or install a torch with NCCL 2.21 or newer (torch 2.5)."
        )
    return {"NCCL_NET_PLUGIN": plugin_value(here.library)}


def _needs_name(here: Surroundings) -> bool:
    return here.torch_nccl is not None and not here.torch_nccl[1].takes_path


def _loader_path_change(base: Mapping[str, str], library: Path) -> dict[str, str]:
    if default_name_finds(library, loader_search_path(base)):
        return {}
    before = base.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": f"{library.parent}:{before}" if before else str(library.parent)}


def _keep_net(setting: KeptSetting, demanding: str | None, library: Path) -> ActivationResult:
    said = (
        f"NCCL_NET={setting.value} (set in {setting.source}) is kept: NCCL does not use the plugin\n"
        f"To use the plugin, unset NCCL_NET or set it to {PLUGIN_NAME}."
    )
    if demanding is not None:
        raise ActivationError(f"{demanding}, but {said}")
    return ActivationResult(ActivationState.KEPT, library=library, kept=(setting,), warnings=(said,))


def _keep_plugin(setting: KeptSetting, required: dict[str, str], library: Path) -> ActivationResult:
    """With BAGUA_NET_REQUIRED, NCCL itself checks that the other file is a Bagua-Net: it may be another build."""
    said = (
        f"NCCL_NET_PLUGIN={setting.value} (set in {setting.source}) is kept: NCCL loads it instead of {library}\n"
        "To use the plugin of this installation, unset NCCL_NET_PLUGIN."
    )
    return ActivationResult(ActivationState.KEPT, required, library, (setting,), (said,))


def _is_own_command() -> bool:
    """Whether this process is `bagua-net` or `bagua-net-bench`, or `python -m` of one of their modules, whose name is
    not in sys.argv yet while the package is imported."""
    if sys.argv[:1] == ["-m"]:
        return any(word.startswith("bagua.cli.") for word in sys.orig_argv)
    program = Path(sys.argv[0]) if sys.argv else Path()
    return program.name in _OWN_COMMANDS or program.parts[-3:-1] == ("bagua", "cli")


def _is_required(base: Mapping[str, str]) -> bool:
    try:
        return demanding_setting(base) is not None
    except ValueError:
        # As the library does: an invalid value counts as a request to be strict.
        return True


_OWN_COMMANDS = ("bagua-net", "bagua-net-bench")

# What `activate` set in this process, with the value before.
_replaced: dict[str, str | None] = {}
