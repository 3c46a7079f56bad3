"""Which configuration file `bagua-net enable` and `bagua-net disable` change."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from bagua.command_exit import CommandError
from bagua.net import nccl_config_file


def add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system",
        action="store_true",
        help=f"all users' file, {nccl_config_file.SYSTEM_FILE}, instead of NCCL_CONF_FILE or ~/.nccl.conf",
    )


def chosen_file(options: argparse.Namespace, environment: Mapping[str, str]) -> Path:
    if options.system:
        return nccl_config_file.SYSTEM_FILE
    file = nccl_config_file.user_file(environment)
    if file is None:
        raise CommandError("HOME is not set, so there is no ~/.nccl.conf; set HOME or NCCL_CONF_FILE, or use --system")
    return file
