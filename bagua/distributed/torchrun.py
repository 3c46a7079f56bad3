"""Runs torchrun in this process, and says in words what stops it. torch is imported when a function is called."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bagua.command_exit import EXIT_OF_SIGNAL, EXIT_USAGE, CommandError

LOCAL_RANK_FLAG = "--local_rank=${local_rank}"  # torchrun puts the number in, for each process
REDIRECTED = "3"  # torchrun's number for stdout and stderr


def check_script(script: str, *, is_module: bool, is_program: bool) -> None:
    """Raises CommandError if it is missing; each process would say so, once per attempt."""
    if is_program:
        if shutil.which(script) is None:
            raise CommandError(
                f"{script}: no such program in PATH, or not executable.\n"
                "Check its name and mode; give a path for one in this directory: ./NAME",
                EXIT_USAGE,
            )
    elif not is_module and not Path(script).exists():
        raise CommandError(
            f"{script}: no such file in {Path.cwd()}.\n"
            "Give the path of the script, after all options of the launcher; for a module, use -m.",
            EXIT_USAGE,
        )


def make_parser() -> argparse.ArgumentParser:
    _require_torch()
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    for action in parser._actions:
        if action.nargs == argparse.REMAINDER:
            action.required = False  # Python before 3.12 calls them required where the script is missing
    return parser


def start(arguments: Sequence[str]) -> int:
    return run(make_parser().parse_args(arguments))


def keep_rounds_apart(options: argparse.Namespace) -> None:
    """Lets rank 0 of each round of the rendezvous serve a store of its own.

    By default the agents serve one for all rounds: new ranks find in it what dead ones have left, and an agent that was
    rank 0 keeps using its own after another has become rank 0 (seen with torch 2.13).
    """
    if options.rdzv_backend != "static":
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def run(options: argparse.Namespace) -> int:
    """
    Raises:
        CommandError: what stopped it, other than a process that failed.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torch_run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    try:
        torch_run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        raise CommandError(f"a process failed. Its own message is above, or in its log.\n{error}") from None
    except SignalException as error:
        return EXIT_OF_SIGNAL + int(error.sigval)
    except (DistError, RendezvousError) as error:
        raise CommandError(_rendezvous_failure(error, where, options)) from None
    except (AssertionError, ValueError) as error:  # of options; torchrun runs no code of the user in this process
        raise CommandError(
            f"torchrun does not accept the options: {error}\n"
            "See --help. Without GPUs, the number of processes per node must be a number.",
            EXIT_USAGE,
        ) from error
    return 0


def _rendezvous_failure(error: Exception, where: str, options: argparse.Namespace) -> str:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    if isinstance(error, RendezvousClosedError):
        return (
            f"the rendezvous {options.rdzv_id} at {where} is closed: the job has ended, or a launcher of it failed.\n"
            "Start a new job with another --rdzv-id; its script loads the last checkpoint."
        )
    cause = error.__cause__ or error
    text = f"{error}\n{cause}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"port {where.rpartition(':')[2]} is in use on this node, which serves the rendezvous at {where}.\n"
            "End what uses it (ss -ltnp shows it; a job that is still running?), or choose another port, the same on"
            " all nodes: --master_port"
        )
    said = str(cause).partition("\n")[0] or type(cause).__name__
    return (
        f"the rendezvous of {options.nnodes} nodes at {where} failed: {said}\n"
        "Check that the command runs on every node with the same address and port, that node 0 is there, and that a"
        " firewall lets the port through."
    )


def _require_torch() -> None:
    try:
        import torch.distributed.run  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"torch cannot be imported ({error}).\nInstall it in this environment: pip install torch"
        ) from None
