"""`python -m bagua.distributed.run`: torchrun with Bagua's flags, also for elastic jobs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bagua.command_exit import EXIT_USAGE, CommandError
from bagua.distributed import regroup_job, torchrun
from bagua.distributed.options import (
    add_further_options,
    add_process_options,
    add_training_options,
    processes,
    say_without_gpu,
    training_variables,
)

PROGRAM = "python -m bagua.distributed.run"


def make_bagua_parser() -> argparse.ArgumentParser:
    """Bagua's flags alone, which need no torch."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="torchrun with Bagua's flags, also for elastic jobs. It takes all options of torchrun, too.",
        add_help=False,
    )
    add_process_options(parser)
    add_training_options(parser)
    add_further_options(parser)
    parser.add_argument_group("regrouping").add_argument(
        regroup_job.REGROUP,
        action="store_true",
        help="a job that goes on without ranks that it loses. The first argument, with options of its own:"
        f" {regroup_job.REGROUP} --help",
    )
    return parser


def make_parser() -> argparse.ArgumentParser:
    """With those of the torchrun that is installed."""
    ours = make_bagua_parser()
    return argparse.ArgumentParser(
        prog=PROGRAM, description=ours.description, parents=[torchrun.make_parser(), ours], add_help=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if regroup_job.is_regroup(arguments):
            return regroup_job.main(PROGRAM, arguments)
        options = make_parser().parse_args(arguments)
        if options.regroup:
            raise CommandError(f"{regroup_job.REGROUP} must be the first argument.", EXIT_USAGE)
        check(options)
        say_without_gpu(PROGRAM, options)
        os.environ.update(training_variables(options))
        if options.set_additional_flag:
            options.training_script_args.insert(0, torchrun.LOCAL_RANK_FLAG)
        if options.logdir:
            options.log_dir, options.redirects = options.logdir, torchrun.REDIRECTED
        torchrun.keep_rounds_apart(options)
        return torchrun.run(options)
    except CommandError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code


def check(options: argparse.Namespace) -> None:
    try:
        if options.nproc_per_node.lstrip("-").isdigit():
            processes(options.nproc_per_node)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"--nproc-per-node: {error}", EXIT_USAGE) from None
    torchrun.check_script(options.training_script, is_module=options.module, is_program=options.no_python)


if __name__ == "__main__":
    sys.exit(main())
