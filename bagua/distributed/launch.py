"""`python -m bagua.distributed.launch`: the processes of one node, for a fixed number of nodes. torchrun does the work;
the flags are those of Bagua 0.9."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from bagua.command_exit import EXIT_USAGE, CommandError
from bagua.distributed import torchrun
from bagua.distributed.options import (
    add_further_options,
    add_master_options,
    add_option,
    add_script_options,
    add_training_options,
    positive,
    processes,
    say_without_gpu,
    training_variables,
)

PROGRAM = "python -m bagua.distributed.launch"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Starts the processes of one node with torchrun. Run it on every node. If one process fails, the"
        " others on the node are ended.",
    )
    add_option(parser, "nnodes", type=positive, default=1, metavar="N", help="number of nodes (default: 1)")
    add_option(parser, "node_rank", type=int, default=0, metavar="RANK", help="of this node (default: 0)")
    add_option(
        parser,
        "nproc_per_node",
        type=processes,
        default="1",
        metavar="N",
        help="number of processes on this node, or auto, gpu or cpu (default: 1)",
    )
    add_master_options(parser, "free port of node 0")
    add_script_options(parser, script_help="what each process runs")
    add_training_options(parser)
    add_further_options(parser)
    add_option(parser, "host_list", help=argparse.SUPPRESS)
    add_option(parser, "ssh_port", help=argparse.SUPPRESS)
    # Given by baguarun: ssh closes our stdin when it ends, and tells us in no other way.
    parser.add_argument("--end_with_stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if options.end_with_stdin:
        _end_with_caller()
    try:
        check(options)
        say_without_gpu(PROGRAM, options)
        os.environ.update(variables(options))
        return torchrun.start(torchrun_arguments(options))
    except CommandError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code


def check(options: argparse.Namespace) -> None:
    """Raises CommandError for what torchrun would report once per process, late, or not in words."""
    if options.host_list:
        raise CommandError(
            f"--host_list={options.host_list}: this command starts the processes of one node only.\n"
            "Use baguarun, which starts it on each host of the list.",
            EXIT_USAGE,
        )
    if not 0 <= options.node_rank < options.nnodes:
        raise CommandError(
            f"--node_rank={options.node_rank} with --nnodes={options.nnodes}: must be from 0 to {options.nnodes - 1}.\n"
            "Number the nodes from 0, each with its own rank.",
            EXIT_USAGE,
        )
    if options.module and options.no_python:
        raise CommandError("-m and --no_python exclude each other: a module needs Python.", EXIT_USAGE)
    torchrun.check_script(options.script, is_module=options.module, is_program=options.no_python)
    try:
        socket.getaddrinfo(options.master_addr.strip("[]"), options.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CommandError(
            f"--master_addr={options.master_addr} cannot be resolved ({error.strerror}).\n"
            "Give a name or address of node 0 that all nodes can resolve; test it with: getent hosts"
            f" {options.master_addr}"
        ) from None


def variables(options: argparse.Namespace) -> dict[str, str]:
    """What the processes of this node get besides the variables of torchrun."""
    return {"NODE_RANK": str(options.node_rank), **training_variables(options, options.master_addr)}


def torchrun_arguments(options: argparse.Namespace) -> list[str]:
    host = options.master_addr
    words = [
        "--rdzv-backend=static",
        "--rdzv-id=bagua",
        f"--nnodes={options.nnodes}",
        f"--node-rank={options.node_rank}",
        f"--nproc-per-node={options.nproc_per_node}",
        f"--master-addr={f'[{host}]' if ':' in host and not host.startswith('[') else host}",
        f"--master-port={options.master_port}",
    ]
    if options.logdir:
        words += [f"--log-dir={options.logdir}", f"--redirects={torchrun.REDIRECTED}"]
    words += ["--module"] * options.module + ["--no-python"] * options.no_python
    local_rank = [torchrun.LOCAL_RANK_FLAG] * options.set_additional_flag
    return [*words, options.script, *local_rank, *options.script_args]


def _end_with_caller() -> None:
    """Sends this process SIGTERM once its stdin is closed: over ssh without a terminal, that is all that tells of the
    end of its caller. Its children get an empty stdin."""
    watched = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_watch_caller, args=(watched,), name="bagua-caller", daemon=True).start()


def _watch_caller(descriptor: int) -> None:
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
