"""The variables that `bagua-net run` and `bagua-net env` add, with what the user has to be told of them."""

from __future__ import annotations

import os

from bagua.command_exit import CommandError
from bagua.net import native, notice, unknown_settings
from bagua.net.activation import ActivationState, Target, original_environment, plan
from bagua.net.nccl_config_file import config_files, read_settings
from bagua.net.secret_file import SECRET_FILE

BY_NAME_HELP = (
    "let NCCL find the plugin by its name, over LD_LIBRARY_PATH alone; for NCCL 2.12 to 2.20, which cannot be given a "
    "path"
)


def launch_changes(*, by_name: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The user's environment, and what has to be set in it. Warnings go to stderr."""
    base = original_environment()
    target = Target.NEW_PROCESS_BY_NAME if by_name else Target.NEW_PROCESS
    try:
        result = plan(base, target)
    except (ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error
    if result.state is ActivationState.ACTIVE:
        settings = {item.name: item.value for item in read_settings(config_files(base))} | base
        secret = settings.get(SECRET_FILE, "").strip()
        # The ranks may start on other hosts, which have the file: a login node need not.
        is_elsewhere = bool(secret) and not os.path.lexists(secret)
        try:
            refusals = native.refusals(settings, with_secret=not is_elsewhere)
        except RuntimeError as error:
            raise CommandError(str(error)) from error
        if refusals:
            raise CommandError("\n".join(refusals))
        if is_elsewhere:
            notice.report(
                [f"{SECRET_FILE}={secret}: this host has no such file. Ranks that start here will fail."], base
            )
        unknown_settings.report(base)
    # What was said is recorded in the environment that the command will have.
    notice.report(result.warnings, base)
    return base, dict(result.changes)
