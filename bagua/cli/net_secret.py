"""`bagua-net secret`: makes the file for BAGUA_NET_SECRET_FILE."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from bagua.cli.parsers import Subcommands
from bagua.command_exit import CommandError

_BYTES = 32

_EPILOG = """\
Every rank needs the same file:

  bagua-net secret new ~/job.secret
  scp ~/job.secret other-node:
  BAGUA_NET_SECRET_FILE=~/job.secret torchrun ...
"""


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "secret",
        help="make the secret of a job",
        description="Makes a file for BAGUA_NET_SECRET_FILE: random bytes that all ranks of a job share.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="write a new secret",
        description="Writes a new secret, which only its owner can read. A file that exists is not overwritten.",
    )
    new.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    new.set_defaults(execute=execute_new)


def execute_new(options: argparse.Namespace) -> int:
    file: Path = options.file
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise CommandError(f"{file} exists, and a secret is not overwritten. Name another file.") from error
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}. Name a file in a folder of yours.") from error
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(secrets.token_bytes(_BYTES))
    print(f"Wrote {file}. Copy it to every node, and set BAGUA_NET_SECRET_FILE to its path on all ranks.")
    return 0
