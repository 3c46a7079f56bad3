"""`bagua-net doctor --peer HOST` and `--serve`: two hosts examine the network between them."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

from bagua.cli.doctor_report import COLOURS, failed_checks, rendered, warned_checks
from bagua.cli.terminal import Terminal
from bagua.command_exit import EXIT_FAILURE, EXIT_USAGE, CommandError
from bagua.host_port import split_host_port
from bagua.net.bench.command_line import within

if TYPE_CHECKING:
    from bagua.net.doctor.finding import Report

_DEFAULT_PORT = 29512
_SSH_S = 15
_WAIT_FOR_A_PERSON_S = 300.0
_WAIT_S = 15.0
_LAST_WORDS = 6
# Whoever sees the handshake can try tokens without asking anybody.
_LEAST_TOKEN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the network to another host")
    ends = group.add_mutually_exclusive_group()
    ends.add_argument(
        "--peer",
        metavar="HOST[:PORT]",
        help="examine the network between this host and HOST, and print the command that has to run there",
    )
    ends.add_argument(
        "--serve",
        nargs="?",
        type=within(int, 1, 65535),
        const=_DEFAULT_PORT,
        metavar="PORT",
        help=f"answer one `doctor --peer` of another host, then end (default port: {_DEFAULT_PORT})",
    )
    group.add_argument("--token", metavar="TOKEN", help="that both ends share; - reads it from standard input")
    group.add_argument(
        "--ssh",
        nargs="?",
        const="",
        metavar="DESTINATION",
        help="start the other end over ssh (default destination: HOST of --peer)",
    )
    group.add_argument(
        "--wait",
        type=within(float, 0, 86400),
        metavar="S",
        help="seconds to wait for the other end (default: 300, or 15 with --peer and --token)",
    )
    group.add_argument(
        "--seconds",
        type=within(float, 0.05, 60),
        default=0.5,
        metavar="S",
        help="of each transfer, of which there are about 30 (default: 0.5)",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """
    Raises:
        CommandError: an option that needs another one is given without it.
    """
    if options.peer is None and options.serve is None:
        for name in ("token", "ssh"):
            if getattr(options, name) is not None:
                raise CommandError(f"--{name} belongs to --peer HOST or --serve; give one of them", EXIT_USAGE)
        return False
    if options.ssh is not None and options.peer is None:
        raise CommandError("--ssh belongs to --peer HOST; give that instead of --serve", EXIT_USAGE)
    if options.serve is not None and options.json:
        raise CommandError("--json belongs to the end that reports; give it with --peer", EXIT_USAGE)
    return True


def execute(options: argparse.Namespace) -> int:
    from bagua.net.bench.errors import BenchError
    from bagua.net.library import MissingFileError

    try:
        return _serve(options) if options.serve is not None else _examine(options)
    except (BenchError, MissingFileError) as error:
        raise CommandError(str(error)) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _token(options: argparse.Namespace) -> str | None:
    token: str = (options.token or "") if options.token != "-" else sys.stdin.readline().strip()
    if not token and options.token == "-":
        raise CommandError("--token - got no token on standard input; write it there as one line", EXIT_USAGE)
    if 0 < len(token) < _LEAST_TOKEN:
        raise CommandError(
            f"--token has {len(token)} characters, and whoever guesses it can answer; give at least {_LEAST_TOKEN}, or"
            " leave --token out to have one made",
            EXIT_USAGE,
        )
    return token or None


def _serve(options: argparse.Namespace) -> int:
    import socket

    from bagua.net.activation import original_environment
    from bagua.net.doctor.peer.handshake import new_token
    from bagua.net.doctor.peer.serving import serve_one_peer

    token = _token(options)
    if token is None:
        token = new_token()
        port = "" if options.serve == _DEFAULT_PORT else f":{options.serve}"
        _say(f"On the other host, run:\n  bagua-net doctor --peer {socket.gethostname()}{port} --token {token}")
    peer = serve_one_peer(options.serve, token, _wait_s(options), original_environment(), _say)
    _say(f"examined by {peer}")
    return 0


def _examine(options: argparse.Namespace) -> int:
    from bagua.net.activation import original_environment
    from bagua.net.doctor.peer.examination import examine_peer
    from bagua.net.doctor.peer.handshake import check_name, new_token
    from bagua.progress import Progress

    host, port = _host_and_port(options.peer)
    given = _token(options)
    token = given or new_token()
    with contextlib.ExitStack() as stack:
        still_waits = _say_once(f"waiting for {host}, port {port}")
        if options.ssh is not None:
            still_waits = stack.enter_context(_started_over_ssh(options.ssh or host, port, token, _wait_s(options)))
        elif given is None:
            check_name(host)
            _say(f"On {host}, run:\n  bagua-net doctor --serve {port} --token {token}")
        report = examine_peer(
            host,
            port,
            token,
            wait_s=_wait_s(options),
            transfer_s=options.seconds,
            environment=original_environment(),
            progress=Progress,
            still_waits=still_waits,
        )
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        terminal = Terminal.of_stdout()
        code, text = _conclusion(report)
        print(rendered(report, terminal.coloured(terminal.wrapped(text, ""), COLOURS[code]), terminal))
    return 0 if report.is_usable else EXIT_FAILURE


def _say_once(what: str) -> Callable[[str], None]:
    """Each reason, when it is new."""
    said: set[str] = set()

    def say(reason: str) -> None:
        if reason not in said:
            said.add(reason)
            _say(f"{what}: {reason}")

    return say


def _wait_s(options: argparse.Namespace) -> float:
    """Who gives --peer a token has it from the other end, which listens already."""
    default = _WAIT_FOR_A_PERSON_S if options.serve is not None or options.token is None else _WAIT_S
    return default if options.wait is None else float(options.wait)


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        host, port = split_host_port(text)
    except ValueError as error:
        raise CommandError(f"--peer {error}", EXIT_USAGE) from None
    return host, _DEFAULT_PORT if port is None else port


def _conclusion(report: Report) -> tuple[str, str]:
    if not report.is_usable:
        return "FAIL", f"Jobs of these two hosts would fail or hang. Failed checks: {failed_checks(report)}."
    if any(section.facts.get("same_host") for section in report.sections):
        return "warn", "Both ends are this host: no network was examined. Give --peer another host."
    if warned := warned_checks(report):
        return "warn", f"The hosts can communicate, {warned}."
    return "ok", "The hosts can communicate."


@contextlib.contextmanager
def _started_over_ssh(destination: str, port: int, token: str, wait_s: float) -> Iterator[Callable[[str], None]]:
    """Yields what raises when ssh, or what it started, has ended too early."""
    if destination.startswith("-"):
        raise CommandError(f"--ssh {destination!r} is not a destination; write HOST or USER@HOST", EXIT_USAGE)
    # The same environment at the same path, as on all hosts of a job. The token is not on its command line.
    words = [sys.executable, "-P", "-m", "bagua.cli.net", "doctor", "--serve", str(port), "--token", "-"]
    words += ["--wait", f"{wait_s:g}"]
    command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_S}", "-o", "ServerAliveInterval=15"]
    command += ["--", destination, shlex.join(words)]
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said)
        except OSError as error:
            raise CommandError(f"ssh cannot be started ({error.strerror}); install an ssh client") from error
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(token.encode() + b"\n")
                process.stdin.flush()
            yield lambda _: _check_ssh(process, destination, said)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            # It ends with the examination; after a failure here it would wait for another peer.
            try:
                process.wait(2 if sys.exc_info()[0] is None else 0.1)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


def _check_ssh(process: subprocess.Popen[bytes], destination: str, said: IO[bytes]) -> None:
    if process.poll() is None:
        return
    from bagua.net.stats.quantities import printable

    said.seek(0)
    words = [printable(line) for line in said.read().decode(errors="replace").strip().splitlines()[-_LAST_WORDS:]]
    raise CommandError(
        f"`bagua-net doctor --serve` on {destination} ended with exit code {process.returncode}"
        + "".join(f"\n  {line}" for line in words)
        + "\nCheck that `ssh` logs in without a password, and that bagua is installed there at the same path."
    )
