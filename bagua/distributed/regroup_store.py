"""`python -m bagua.distributed.run --regroup --store-only`: serves the store of a job that goes on without ranks that
it loses. The store has to outlive each of them, so that none of them serves it.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import socket
from collections.abc import Sequence
from typing import Any

from bagua.command_exit import EXIT_USAGE, CommandError
from bagua.distributed.options import DEFAULT_MASTER_PORT, add_option, port

_REGROUP = "--regroup"


def add_regroup_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("regrouping")
    group.add_argument(
        _REGROUP,
        action="store_true",
        help="for a job that goes on without ranks that it loses; the first argument, with --store-only",
    )
    add_option(
        group,
        "store_only",
        action="store_true",
        help="start no processes, and serve the job's store at --master-port until this process is ended. Start it"
        " anew for each job",
    )


def is_regroup(arguments: Sequence[str]) -> bool:
    """Whether they begin with `--regroup`. Elsewhere it may be an argument of a script."""
    return arguments[:1] == [_REGROUP]


def refuse_processes() -> None:
    """
    Raises:
        CommandError: always; processes were to be started.
    """
    raise CommandError(
        "--regroup without --store-only, or with a script: starting ranks is not implemented.\n"
        "Serve the store by --regroup --store-only on one host, and start each rank by itself, with RANK,"
        " WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
        EXIT_USAGE,
    )


def serve_store(program: str, arguments: Sequence[str]) -> int:
    """Until SIGTERM or SIGINT.

    Raises:
        CommandError: processes were to be started, or the port is taken.
    """
    parser = argparse.ArgumentParser(prog=program)
    add_regroup_options(parser)
    add_option(parser, "master_port", type=port, default=DEFAULT_MASTER_PORT, metavar="PORT")
    options, others = parser.parse_known_args(arguments)
    if not options.store_only or others:
        refuse_processes()
    import torch.distributed as dist

    make_store: Any = getattr(dist, "TCPStore")  # noqa: B009 - not declared to type checkers

    # A rank that ends it by Ctrl-C in the same terminal is no error.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        store = make_store(
            "localhost",
            options.master_port,
            is_master=True,
            timeout=datetime.timedelta(seconds=30),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise CommandError(f"port {options.master_port} cannot be served: {str(error).splitlines()[0]}") from None
    print(f"The store of the job listens at port {store.port} of {socket.gethostname()}.", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0
