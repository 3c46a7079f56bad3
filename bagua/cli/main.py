"""`bagua`: what tuning while training has measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bagua.cli.main_parser import make_parser
from bagua.cli.net import make_parser as make_net_parser
from bagua.cli.parsers import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = make_parser()
    if words and words[0] not in commands.choices and words[0] in make_net_parser()[1].choices:
        parser.error(f"unknown command {words[0]!r}; that is `bagua-net {words[0]}`")
    return run_program(parser, commands, words)


if __name__ == "__main__":
    sys.exit(main())
