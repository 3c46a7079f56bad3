"""`bagua-net top`: a live view of one or several hosts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.cli.parsers import Subcommands
from bagua.command_exit import EXIT_FAILURE, EXIT_USAGE, CommandError
from bagua.net.bench.command_line import within

if TYPE_CHECKING:
    from bagua.net.stats.sources import Source


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "top",
        help="watch one or several hosts in the terminal",
        description="Shows rates, connections, retransmits and stalls by process, peer and device, live. Keys: q "
        "and Ctrl-C quit, space pauses, a letter sorts (n rate now, a average, r rank, p peer, s stalled, t "
        "retransmits, l lost streams, u round trip, c CPU, o oldest request), v reverses.",
    )
    add_host_options(parser)
    parser.add_argument(
        "--interval", type=within(float, 0.1, 3600.0), default=1.0, metavar="S", help="seconds between updates"
    )
    parser.add_argument("--json", action="store_true", help="print one report per host as JSON, and end")
    parser.set_defaults(execute=execute)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """For `sources_of`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--hosts",
        metavar="LIST",
        help="hosts separated by commas, on which `bagua-net stats` is run over ssh (default: this host)",
    )
    group.add_argument(
        "--endpoints",
        metavar="LIST",
        help="`bagua-net exporter`s of the hosts, as HOST:PORT separated by commas, instead of ssh",
    )
    parser.add_argument(
        "--remote-command",
        metavar="COMMAND",
        help="how to call bagua-net on the hosts (default: the path that it has here)",
    )


def execute(options: argparse.Namespace) -> int:
    if not options.json:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise CommandError(
                "stdin or stdout is not a terminal.\n`bagua-net top` draws on one.\n"
                "Use `bagua-net stats --watch`, or --json.",
                EXIT_USAGE,
            )
        try:
            import textual  # noqa: F401
        except ImportError as error:
            raise CommandError(
                f"`bagua-net top` needs the package textual: {error}.\nIt is not installed in {sys.prefix}.\n"
                "Install it with: pip install textual. `bagua-net stats --watch` works without."
            ) from error
    sources = sources_of(options)
    try:
        return _print_json(sources) if options.json else _watch(sources, options.interval)
    finally:
        for source in sources:
            source.close()


def sources_of(options: argparse.Namespace) -> list[Source]:
    """
    Raises:
        CommandError: `--hosts` or `--endpoints` names none.
    """
    from bagua.net.stats.sources import EndpointSource, LocalSource, SshSource, checked_hosts

    if options.endpoints is not None:
        try:
            return [EndpointSource(one.strip(), options.interval) for one in options.endpoints.split(",")]
        except ValueError as error:
            raise CommandError(f"--endpoints {options.endpoints}: {error}", EXIT_USAGE) from error
    if options.hosts is None:
        return [LocalSource(options.interval)]
    try:
        hosts = checked_hosts(options.hosts)
    except ValueError as error:
        raise CommandError(f"--hosts {options.hosts}: {error}", EXIT_USAGE) from error
    command = options.remote_command or str(Path(sys.argv[0]).resolve())
    return [SshSource(host, options.interval, command) for host in hosts]


def _watch(sources: list[Source], interval_s: float) -> int:
    from bagua.net.top.app import TopApp

    app = TopApp(sources, interval_s)
    app.run()
    return app.return_code or 0


def _print_json(sources: list[Source]) -> int:
    from bagua.net.stats.sources import second_reports

    code = 0
    for state in second_reports(sources):
        if state.report is None or state.problem is not None:
            print(f"bagua-net top: {state.name}: {state.problem or 'no report within 30 s'}", file=sys.stderr)
            code = EXIT_FAILURE
        if state.report is not None:
            print(json.dumps(state.report.as_json()))
    return code
