"""`bagua-net exporter`: a Prometheus endpoint for all processes of this host."""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from bagua.cli.parsers import Subcommands
from bagua.command_exit import EXIT_USAGE, CommandError
from bagua.net.bench.command_line import within
from bagua.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from bagua.net.exporter.collector import PushAddress

DEFAULT_PORT = 9977
PUSH_INTERVAL_S = 15.0


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "exporter",
        help="serve the statistics of this host to Prometheus",
        description="Serves the statistics of every process on this host that uses Bagua-Net and that this user may "
        "look at, at http://ADDRESS:PORT/metrics, and to `bagua-net top --endpoints` at /report. /health "
        "answers with the version, without reading statistics. If "
        "BAGUA_NET_PROMETHEUS_ADDRESS is set, it also pushes them to that Pushgateway every 15 s.",
    )
    parser.add_argument(
        "--address", default="127.0.0.1", help="address to listen on (default 127.0.0.1; 0.0.0.0: every interface)"
    )
    parser.add_argument(
        "--port", type=within(int, 0, 65535), default=DEFAULT_PORT, help=f"TCP port (default {DEFAULT_PORT}; 0: any)"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON, and end")
    parser.add_argument("--version", action="version", version=f"bagua-net {__version__}", help="print the version")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.net.exporter.collector import HostCollector, ReportApp, registry_of

    collector = HostCollector()
    if options.json:
        print(json.dumps(collector.as_json(), indent=2))
        return 0
    gateway = _gateway()
    try:
        from prometheus_client import start_http_server
    except ImportError as error:
        raise CommandError(
            f"`bagua-net exporter` needs the package prometheus_client: {error}.\n"
            f"It is not installed in {sys.prefix}.\n"
            "Install it with: pip install prometheus_client. `bagua-net exporter --json` works without."
        ) from error
    registry = registry_of(collector)
    try:
        server, _ = start_http_server(options.port, options.address, registry)
        server.set_app(ReportApp(server.get_app()))
    except (OSError, OverflowError, UnicodeError) as error:
        where = f"The exporter cannot listen on {options.address}, port {options.port}"
        is_elsewhere = isinstance(error, socket.gaierror | UnicodeError)
        if is_elsewhere or (isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL):
            raise CommandError(
                f"{where}: {options.address} is not an address of this host ({error}).\n"
                "Give one of this host with --address, or 0.0.0.0 for every interface."
            ) from error
        raise CommandError(
            f"{where}: {error}.\nAnother exporter may run on this host.\nChoose another port with --port."
        ) from error
    print(f"serving http://{options.address}:{server.server_port}/metrics", flush=True)
    try:
        _push_until_interrupted(gateway, registry_of(collector))
    finally:
        server.shutdown()
        server.server_close()
    return 0


def _gateway() -> PushAddress | None:
    from bagua.net.exporter.collector import PUSH_VARIABLE, PushAddress

    text = os.environ.get(PUSH_VARIABLE, "").strip()
    if not text:
        return None
    try:
        return PushAddress.parsed(text)
    except ValueError as error:
        # Not the value: it may hold a password.
        raise CommandError(
            f"{PUSH_VARIABLE} has a value that cannot be used: {error}.\n"
            f"It names the Pushgateway that the exporter pushes to.\nCorrect {PUSH_VARIABLE} or unset it.",
            EXIT_USAGE,
        ) from error


def _push_until_interrupted(gateway: PushAddress | None, registry: CollectorRegistry) -> None:
    never = threading.Event()
    said = ""
    while True:
        if gateway is not None:
            problem = ""
            try:
                gateway.push(registry)
            except OSError as error:
                problem = f"pushing to {gateway.url} failed: {error}"
            if problem != said:
                print(f"bagua-net exporter: {problem or 'pushing works again'}", file=sys.stderr, flush=True)
                said = problem
        never.wait(PUSH_INTERVAL_S)
