"""`python -m bagua.distributed.run --regroup`: the ranks of one node, in a job that goes on without ranks that it
loses. torchrun has no part in it: it ends all ranks when one dies."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bagua.command_exit import EXIT_INTERRUPTED, EXIT_USAGE, CommandError
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

if TYPE_CHECKING:
    from bagua.distributed.regroup_agent import Job, JobState
    from bagua.distributed.regroup_nodes import Meeting, NodeCount

REGROUP = "--regroup"
# torchrun's, with its defaults.
_SECONDS = {"join_timeout": 600.0, "last_call_timeout": 30.0}
_RESTARTS = 3
_PAUSE_S = 0.2


def is_regroup(arguments: Sequence[str]) -> bool:
    """Whether they begin with `--regroup`. Elsewhere it may be an argument of a script."""
    return arguments[:1] == [REGROUP]


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program} {REGROUP}",
        description="Starts the ranks of one node, in a job that goes on without ranks that it loses. Run it on every"
        " node. A rank that dies is started again by itself; the others go on. SIGTERM or Ctrl-C ends the ranks of this"
        " node alone.",
    )
    add_option(
        parser,
        "nnodes",
        type=_nodes,
        default="1",
        metavar="MIN[:MAX]",
        help="number of nodes (default: 1). With MIN:MAX, the job starts with MIN nodes or more, at most MAX",
    )
    add_option(
        parser,
        "nproc_per_node",
        type=processes,
        default="1",
        metavar="N",
        help="number of ranks on this node, or auto, gpu or cpu (default: 1)",
    )
    add_option(
        parser,
        "node_rank",
        type=int,
        metavar="RANK",
        help="of this node. Node 0 serves the job's store. Without numbers, the host does that --master-addr names",
    )
    add_master_options(parser, "port of node 0 for the job's store")
    add_option(
        parser,
        "rdzv_conf",
        type=_seconds,
        default=_SECONDS,
        metavar="NAME=SECONDS,...",
        help="join_timeout: how long MIN nodes are waited for (default: 600); last_call_timeout: from then on, how long"
        " more are waited for, up to MAX (default: 30)",
    )
    add_option(
        parser,
        "rank_restarts",
        type=_not_negative,
        default=_RESTARTS,
        metavar="N",
        help="how many times in a row a rank is started again without having made a step of training; then the others"
        f" go on without it (default: {_RESTARTS}). 0: it is not started again",
    )
    add_option(
        parser,
        "store_only",
        action="store_true",
        help="start no ranks, and serve the job's store at --master-port until this process is ended. Start it anew for"
        " each job",
    )
    add_script_options(parser, script_help="what each rank runs")
    add_training_options(parser)
    add_further_options(parser)
    for action in parser._actions:
        if action.dest == "script":
            action.required = False  # not with --store-only
    return parser


def main(program: str, arguments: Sequence[str]) -> int:
    """
    Args:
        arguments: that begin with `--regroup`.

    Raises:
        CommandError: the job cannot be started.
    """
    parser = make_parser(program)
    _refuse_options_of_torchrun(parser)
    options = parser.parse_args(arguments[1:])
    if options.store_only:
        if options.script is not None:
            raise CommandError("--store-only starts no ranks: leave the script out.", EXIT_USAGE)
        from bagua.distributed.regroup_store import serve_until_ended

        return serve_until_ended(options.master_port)
    try:
        return _run(program, options)
    except KeyboardInterrupt:  # before ranks are started
        return EXIT_INTERRUPTED


def _run(program: str, options: argparse.Namespace) -> int:
    def say(text: str) -> None:
        print(f"{program}: {text}", file=sys.stderr, flush=True)

    _check(options)
    say_without_gpu(program, options)
    from torch.distributed.run import determine_local_world_size

    from bagua.distributed.regroup_agent import Agent, Job
    from bagua.distributed.regroup_nodes import Meeting
    from bagua.distributed.regroup_store import serve_or_reach

    try:
        count: int = determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise CommandError(f"--nproc-per-node={options.nproc_per_node}: {error}", EXIT_USAGE) from None
    address = options.master_addr.strip("[]")
    nodes, limits = options.nnodes, options.rdzv_conf
    store, is_server = serve_or_reach(address, options.master_port, options.node_rank, limits["join_timeout"], say)
    job, meeting = Job(store), Meeting(store, nodes, limits["join_timeout"], limits["last_call_timeout"], say)
    try:
        position = meeting.join(count, options.node_rank)
    except CommandError:
        if is_server:
            meeting.wait_for_readers()
        raise
    if position.is_late:
        _check_late(_begun(job, meeting, limits["join_timeout"]), nodes, address, options.master_port)
    environment = {
        **os.environ,
        **training_variables(options, address),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(options.master_port),
    }
    if count > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    return Agent(
        partial(_command, options),
        environment,
        position,
        count,
        job,
        meeting,
        is_server,
        options.rank_restarts,
        Path(options.logdir) if options.logdir else None,
        socket.gethostname(),
        say,
    ).run()


def _check(options: argparse.Namespace) -> None:
    if options.script is None:
        raise CommandError("the script is missing. Give its path after all options, or --store-only.", EXIT_USAGE)
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes.most:
        raise CommandError(
            f"--node-rank={options.node_rank} with --nnodes={options.nnodes}: must be from 0 to"
            f" {options.nnodes.most - 1}.",
            EXIT_USAGE,
        )
    if options.module and options.no_python:
        raise CommandError("-m and --no-python exclude each other: a module needs Python.", EXIT_USAGE)
    torchrun.check_script(options.script, is_module=options.module, is_program=options.no_python)


def _begun(job: Job, meeting: Meeting, timeout_s: float) -> JobState:
    """Of a node that has come after the start: its ranks are none of those that begin the job.

    Raises:
        CommandError: the job cannot begin, or has not within the timeout.
    """
    begin = time.monotonic()
    while (state := job.state()).epoch is None:
        problem = meeting.problem()
        if problem is not None:
            raise CommandError(problem)
        if time.monotonic() - begin >= timeout_s:
            raise CommandError(
                f"the ranks that came before this node have not begun the job within {timeout_s:g} s.\n"
                "Check their logs. To wait longer: --rdzv-conf join_timeout=SECONDS"
            )
        time.sleep(_PAUSE_S)
    return state


def _check_late(state: JobState, nodes: NodeCount, address: str, master_port: int) -> None:
    """Of a node that has come after the start.

    Raises:
        CommandError: the job is over, or has its nodes.
    """
    if state.is_over:
        raise CommandError(
            f"the store at {address}:{master_port} is that of a job that has ended.\nStart it anew for each job."
        )
    present = {(one.place.host, one.place.node) for one in state.left}
    if len(present) >= nodes.most:
        raise CommandError(
            f"the job has {len(present)} nodes, as many as --nnodes={nodes} allows.\n"
            "Start this node again when one of them is gone, or start the job with a larger MAX."
        )


def _command(options: argparse.Namespace, local_rank: int) -> list[str]:
    """Of a rank."""
    words = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    flag = [f"--local_rank={local_rank}"] if options.set_additional_flag else []
    return [*words, options.script, *flag, *options.script_args]


# --- options ---------------------------------------------------------------------------------------------------------


class _Refused(argparse.Action):
    """An option of torchrun that has no meaning here."""

    def __call__(self, _parser: object, _options: object, _values: object, option: str | None = None) -> NoReturn:
        name = (option or "").replace("_", "-")
        why = (
            "it counts restarts of all ranks, and here each rank is started again by itself. Use --rank-restarts."
            if name == "--max-restarts"
            else f"it is an option of torchrun, which has no part in this. See: --help after {REGROUP}."
        )
        raise CommandError(f"{name} together with {REGROUP}: {why}", EXIT_USAGE)


def _refuse_options_of_torchrun(parser: argparse.ArgumentParser) -> None:
    known = {name for action in parser._actions for name in action.option_strings}
    for action in torchrun.make_parser()._actions:
        names = [name for name in action.option_strings if name not in known]
        if names:
            extra: dict[str, Any] = {"nargs": 0} if action.nargs == 0 else {}
            parser.add_argument(*names, action=_Refused, help=argparse.SUPPRESS, **extra)


def _nodes(text: str) -> NodeCount:
    from bagua.distributed.regroup_nodes import NodeCount

    least, _, most = text.partition(":")
    count = NodeCount(positive(least), positive(most or least))
    if count.most < count.least:
        raise argparse.ArgumentTypeError(f"{text}: MAX must be at least MIN, as in 1:4")
    return count


def _seconds(text: str) -> dict[str, float]:
    found = dict(_SECONDS)
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in found:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown: it takes {' and '.join(found)}")
        try:
            found[name] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} must be NAME=SECONDS") from None
        if not 0 <= found[name] < float("inf"):
            raise argparse.ArgumentTypeError(f"{part!r}: seconds must be 0 or more")
    return found


def _not_negative(text: str) -> int:
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{text} is too small: it must be at least 0")
    return 0 if text == "0" else positive(text)
