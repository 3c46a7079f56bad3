"""`baguarun`: starts a job on several hosts over ssh, one launcher on each."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua.command_exit import EXIT_USAGE, CommandError
from bagua.distributed.options import (
    DEFAULT_MASTER_PORT,
    add_option,
    add_script_options,
    add_training_options,
    port,
    positive,
    processes,
)
from bagua.distributed.ssh_job import RemoteHost, SshJob, parse_hosts, remote_command, ssh_command
from bagua.version import __version__

_SSH_PORT = 22
_EPILOG = """\
baguarun needs a login by key on each host, and the same Python environment and working directory at the same paths. It
starts `python -m bagua.distributed.launch` there, and puts the host's name before each line of output. If one host
fails, or on Ctrl-C, the processes on all hosts are ended.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baguarun",
        description="Starts a training script on several hosts over ssh.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"baguarun {__version__}")
    add_option(
        parser,
        "host_list",
        required=True,
        metavar="HOST[:PORT],...",
        help="hosts, optionally with the port of their sshd; the first is node 0",
    )
    add_option(
        parser,
        "nproc_per_node",
        type=processes,
        default="1",
        metavar="N",
        help="number of processes on each host, or auto, gpu or cpu (default: 1)",
    )
    add_option(
        parser,
        "ssh_port",
        type=port,
        metavar="PORT",
        help="of hosts without one in the list (default: as in ssh's own configuration)",
    )
    add_option(
        parser,
        "master_addr",
        metavar="HOST",
        help="address of the first host for the others, if it is not its name in the list",
    )
    add_option(
        parser,
        "master_port",
        type=port,
        default=DEFAULT_MASTER_PORT,
        metavar="PORT",
        help=f"free port of the first host (default: {DEFAULT_MASTER_PORT})",
    )
    parser.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        metavar="VAR[=VALUE]",
        help="set an environment variable on all hosts; without a value, as it is here. Repeatable",
    )
    add_option(
        parser,
        "timeout",
        type=positive,
        default=30,
        metavar="SECONDS",
        help="within which each host has to answer (default: 30)",
    )
    add_script_options(parser, script_help="what each process runs; a path on the hosts")
    add_training_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        return SshJob(commands(options), options.timeout).run()
    except CommandError as error:
        print(f"baguarun: {error}", file=sys.stderr)
        return error.exit_code


def commands(options: argparse.Namespace) -> list[tuple[RemoteHost, list[str]]]:
    """The ssh command for each host.

    Raises:
        CommandError: --host_list or -x is malformed.
    """
    try:
        hosts = parse_hosts(options.host_list, options.ssh_port)
    except ValueError as error:
        raise CommandError(f"--host_list: {error}", EXIT_USAGE) from None
    variables = {
        "BAGUA_NODE_DOMAIN_NAMES": ",".join(host.address for host in hosts),
        "BAGUA_SSH_PORT": str(options.ssh_port or _SSH_PORT),
        **dict(_variable(text) for text in options.variables),
    }
    return [
        (
            host,
            ssh_command(
                host,
                remote_command(str(Path.cwd()), variables, _launcher(options, hosts, node_rank)),
                options.timeout,
            ),
        )
        for node_rank, host in enumerate(hosts)
    ]


def _variable(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise CommandError(f"-x {text}: {name!r} is not a variable.\nWrite -x NAME or -x NAME=VALUE.", EXIT_USAGE)
    if not is_given and name not in os.environ:
        raise CommandError(f"-x {name}: the variable is not set here.\nSet it, or write -x {name}=VALUE.", EXIT_USAGE)
    return name, value if is_given else os.environ[name]


def _launcher(options: argparse.Namespace, hosts: Sequence[RemoteHost], node_rank: int) -> list[str]:
    words = [
        *(sys.executable, "-m", "bagua.distributed.launch", "--end_with_stdin"),
        f"--nnodes={len(hosts)}",
        f"--node_rank={node_rank}",
        f"--nproc_per_node={options.nproc_per_node}",
        f"--master_addr={options.master_addr or hosts[0].address}",
        f"--master_port={options.master_port}",
    ]
    given = vars(options)
    switches = ("module", "no_python", "set_additional_flag", "enable_bagua_net")
    words += [f"--{name}" for name in switches if given[name]]
    words += [f"--{name}={given[name]}" for name in ("logdir", "default_bucket_size") if given[name]]
    return [*words, options.script, *options.script_args]


if __name__ == "__main__":
    sys.exit(main())
