"""`bagua-net enable` names the plugin in NCCL's configuration file, for jobs of any language. `disable` undoes it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from bagua.cli.parsers import Subcommands
from bagua.command_exit import CommandError
from bagua.net import nccl_config_file


def add_enable(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "enable",
        help="name the plugin in NCCL's configuration file",
        description="Writes NCCL_NET_PLUGIN to NCCL's configuration file (NCCL_CONF_FILE, or else ~/.nccl.conf), so "
        "that every job of NCCL 2.21 or newer takes the plugin. Other lines stay as they are.",
    )
    _add_file_options(parser)
    parser.add_argument(
        "--force", action="store_true", help="set a NCCL_NET_PLUGIN line of your own aside until `bagua-net disable`"
    )
    parser.set_defaults(execute=enable)


def enable(options: argparse.Namespace) -> int:
    from bagua.net.activation import original_environment
    from bagua.net.library import library_path
    from bagua.net.plugin_setting import plugin_value

    environment = original_environment()
    file = _chosen_file(options, environment)
    try:
        library = library_path()
        changed = nccl_config_file.enable(file, plugin_value(library), force=options.force)
    except (RuntimeError, OSError) as error:
        raise CommandError(str(error)) from error
    print(f"{file}: NCCL_NET_PLUGIN={library}" + ("" if changed else " (was there already)"))
    for warning in _without_effect(file, library, environment):
        print(f"bagua-net enable: warning: {warning}", file=sys.stderr)
    return 0


def _without_effect(file: Path, library: Path, environment: Mapping[str, str]) -> list[str]:
    """What would keep NCCL from the line that was just written."""
    from bagua.net.library import is_same_file
    from bagua.net.plugin_setting import is_our_name

    warnings = []
    settings = {item.name: item for item in nccl_config_file.read_settings(nccl_config_file.config_files(environment))}
    in_effect = settings.get("NCCL_NET_PLUGIN")
    if in_effect is not None and not is_same_file(Path(in_effect.value), library):
        warnings.append(
            f"{in_effect.file} sets NCCL_NET_PLUGIN={in_effect.value}, which takes precedence over {file}; remove it"
        )
    if "NCCL_NET" in settings and not is_our_name(settings["NCCL_NET"].value):
        net = settings["NCCL_NET"]
        warnings.append(f"NCCL_NET={net.value} in {net.file} keeps NCCL from using the plugin; remove that line")
    own = environment.get("NCCL_NET_PLUGIN")
    if own is not None and own != str(library):
        warnings.append(f"NCCL_NET_PLUGIN={own} in the environment takes precedence over the file; unset it")
    net_name = environment.get("NCCL_NET")
    if net_name is not None and not is_our_name(net_name):
        warnings.append(f"NCCL_NET={net_name} in the environment keeps NCCL from using the plugin; unset it")
    return warnings


def add_disable(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "disable",
        help="take the plugin out of NCCL's configuration file",
        description="Removes the line that `bagua-net enable` wrote, and puts back what it set aside.",
    )
    _add_file_options(parser)
    parser.set_defaults(execute=disable)


def disable(options: argparse.Namespace) -> int:
    from bagua.net.activation import original_environment

    file = _chosen_file(options, original_environment())
    try:
        changed = nccl_config_file.disable(file)
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    print(f"{file}: " + ("restored as it was before `bagua-net enable`" if changed else "nothing of ours to remove"))
    left = [item.value for item in nccl_config_file.read_settings([file]) if item.name == "NCCL_NET_PLUGIN"]
    if left:
        print(f"bagua-net disable: your own line NCCL_NET_PLUGIN={left[0]} was left there", file=sys.stderr)
    return 0


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system",
        action="store_true",
        help=f"all users' file, {nccl_config_file.SYSTEM_FILE}, instead of NCCL_CONF_FILE or ~/.nccl.conf",
    )


def _chosen_file(options: argparse.Namespace, environment: Mapping[str, str]) -> Path:
    if options.system:
        return nccl_config_file.SYSTEM_FILE
    file = nccl_config_file.user_file(environment)
    if file is None:
        raise CommandError("HOME is not set, so there is no ~/.nccl.conf; set HOME or NCCL_CONF_FILE, or use --system")
    return file
