"""`bagua`: what training has found out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bagua.cli import tune
from bagua.cli.errors import EXIT_INTERRUPTED, CommandError
from bagua.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        exit_code = int(options.execute(options))
        sys.stdout.flush()  # what is still in the buffer would otherwise meet the closed pipe after this function
        return exit_code
    except CommandError as error:
        print(f"bagua {options.subcommand}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; Python would complain again when it closes stdout.
        sys.stderr.close()
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua", description="Shows what training has found out. For the NCCL plugin, see bagua-net."
    )
    parser.add_argument("--version", action="version", version=f"bagua {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    tune.add_parser(subcommands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
