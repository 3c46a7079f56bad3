"""`bagua-net`: switch Bagua-Net on and off, and find out whether it works."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bagua.cli import (
    net_blame,
    net_compare,
    net_disable,
    net_doctor,
    net_enable,
    net_env,
    net_exporter,
    net_knobs,
    net_run,
    net_stats,
    net_top,
    net_trace,
)
from bagua.cli.errors import EXIT_INTERRUPTED, CommandError
from bagua.version import __version__

_EPILOG = """\
Ways to use the plugin:
  ENABLE_BAGUA_NET=1 torchrun train.py    a torch job; the script need not import bagua
  bagua-net run -- ./all_reduce_perf      any command
  eval "$(bagua-net env)"                 everything started from this shell
  bagua-net enable                        every job of this user, from NCCL's own configuration file

`bagua-net doctor` tells whether a job would use it, `bagua-net compare` whether a job is faster with it, and
`bagua-net stats` and `bagua-net top` what running jobs do. `bagua-net blame` names the process that holds a job up.
`bagua-net-bench` shows what it can do on this machine.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        exit_code = int(options.execute(options))
        sys.stdout.flush()  # what is still in the buffer would otherwise meet the closed pipe after this function
        return exit_code
    except CommandError as error:
        print(f"bagua-net {options.subcommand}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; Python would complain again when it closes stdout.
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua-net",
        description="Switches Bagua-Net, the NCCL network plugin, on and off, and finds out whether it works.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bagua-net {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for module in (
        *(net_run, net_env, net_enable, net_disable, net_doctor, net_compare),
        *(net_stats, net_top, net_blame, net_exporter, net_trace, net_knobs),
    ):
        module.add_parser(subcommands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
