"""One ssh process per host: passes their output on, and ends all of them when one fails or the user interrupts.

Three threads per host only read pipes and put events into a queue; the main thread alone decides and ends processes.
"""

from __future__ import annotations

import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from types import FrameType
from typing import IO

from bagua.command_exit import EXIT_FAILURE, EXIT_OF_SIGNAL, CommandError
from bagua.host_port import split_host_port

# Before the host. No leading "-": ssh would take it for an option.
_USER = re.compile(r"(?:[\w.][\w.-]*@)?")

# The remote shell prints it before anything else is done: the host has answered.
READY = "bagua: host ready"


@dataclass(frozen=True)
class RemoteHost:
    """
    Attributes:
        name: as the user wrote it, which is what messages say.
        login: what ssh gets: name or address, with the user if there is one, without brackets.
        port: of sshd; None: as ssh's own configuration says.
    """

    name: str
    login: str
    port: int | None

    @property
    def address(self) -> str:
        """Without the user."""
        return self.login.rpartition("@")[2]


def parse_hosts(text: str, default_port: int | None) -> tuple[RemoteHost, ...]:
    """
    Args:
        text: such as "host1:2222,host2".
        default_port: of hosts without one.

    Raises:
        ValueError: an entry is malformed, or is there twice.
    """
    hosts: list[RemoteHost] = []
    for entry in (part.strip() for part in text.split(",")):
        user, at, name = entry.rpartition("@")
        if not _USER.fullmatch(user + at):
            raise ValueError(f"{entry!r} is not a host: {user!r} is no name of a user")
        address, port = split_host_port(name)
        host = RemoteHost(entry, f"{user}{at}{address}", default_port if port is None else port)
        if any((one.login, one.port) == (host.login, host.port) for one in hosts):
            raise ValueError(f"{entry} is there twice: one launcher starts all processes of a host")
        hosts.append(host)
    return tuple(hosts)


def ssh_command(host: RemoteHost, command: str, timeout_s: int) -> list[str]:
    """
    Args:
        timeout_s: to connect and to log in.
    """
    options = {
        "BatchMode": "yes",  # a prompt for a password would wait indefinitely
        "ConnectTimeout": str(timeout_s),
        # A host that is gone is noticed after a minute.
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "4",
    }
    words = ["ssh", "-T", *(word for item in options.items() for word in ("-o", "=".join(item)))]
    if host.port is not None:
        words += ["-p", str(host.port)]
    return [*words, "--", host.login, command]


def remote_command(directory: str, variables: Mapping[str, str], launcher: Sequence[str]) -> str:
    """For the login shell of any kind: only sh reads what is inside."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    steps = [
        shlex.join(["echo", READY]),
        shlex.join(["cd", "--", directory]),
        shlex.join(["exec", "env", *assignments, *launcher]),
    ]
    return shlex.join(["exec", "sh", "-c", " && ".join(steps)])


# torchrun gives processes 30 s to end before it kills them; a second signal of the user does not wait.
_END_S = 40.0
_KILL_S = 5.0
_SSH_FAILED = 255
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Event(Enum):
    READY = auto()
    EXITED = auto()
    OUTPUT_CLOSED = auto()  # what our own output goes to has gone


class _Interrupted(BaseException):
    """A signal; BaseException: it must pass through everything."""

    def __init__(self, number: int) -> None:
        self.number = number


class SshJob:
    """
    Args:
        commands: of `ssh_command`, one per host.
        timeout_s: within which each host has to answer.
    """

    def __init__(self, commands: Sequence[tuple[RemoteHost, list[str]]], timeout_s: float) -> None:
        self._commands = commands
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[tuple[_Event, int]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._silent: set[int] = set()  # have not answered yet
        self._output = threading.Lock()

    def run(self) -> int:
        """Returns the exit status: 0, that of the first launcher that failed, or 128 plus a signal's number. Call it
        in the main thread.

        Raises:
            CommandError: a host failed or did not answer; the message names it. All others have been ended.
        """
        previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
        try:
            try:
                self._start()
                self._watch()
                return 0
            finally:
                self._end()
        except _Interrupted as interrupted:
            return EXIT_OF_SIGNAL + interrupted.number
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        for number, (_, command) in enumerate(self._commands):
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    process_group=0,  # Ctrl-C reaches only us, so that the end is orderly
                )
            except OSError as error:
                raise CommandError(
                    f"{command[0]} cannot be started ({error.strerror}).\nInstall an OpenSSH client, or correct PATH."
                ) from error
            self._processes.append(process)
            assert process.stdout is not None
            assert process.stderr is not None
            readers = [
                self._thread(self._relay, number, process.stdout, sys.stdout.buffer),
                self._thread(self._relay, number, process.stderr, sys.stderr.buffer),
            ]
            self._thread(self._report_exit, number, process, readers)

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="bagua-ssh", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _relay(self, number: int, source: IO[bytes], sink: IO[bytes]) -> None:
        prefix = f"{self._commands[number][0].name}: ".encode()
        is_open = True
        with source:
            for line in source:
                if line.rstrip() == READY.encode():
                    self._events.put((_Event.READY, number))
                elif is_open:
                    try:
                        with self._output:
                            sink.write(prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
                            sink.flush()
                    except OSError:
                        is_open = False
                        self._events.put((_Event.OUTPUT_CLOSED, number))

    def _report_exit(self, number: int, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        process.wait()
        for reader in readers:  # the events of its output come first
            reader.join()
        self._events.put((_Event.EXITED, number))

    def _watch(self) -> None:
        """Returns when all launchers have ended with status 0."""
        running = set(range(len(self._processes)))
        silent = self._silent = set(running)
        deadline = time.monotonic() + self._timeout_s
        while running:
            try:
                event, number = self._events.get(timeout=max(0.0, deadline - time.monotonic()) if silent else None)
            except queue.Empty:
                names = ", ".join(self._commands[one][0].name for one in sorted(silent))
                raise CommandError(
                    f"{names} did not answer within {self._timeout_s:g} s. The job was ended.\n"
                    f"Test the login by hand: {self._login_test(min(silent))}\n"
                    "If it is slow, give it more time with --timeout."
                ) from None
            if event is _Event.OUTPUT_CLOSED:
                raise CommandError("its output was closed. The job was ended.")
            if event is _Event.EXITED:
                self._check_exit(number, has_answered=number not in silent)
                running.discard(number)
            silent.discard(number)

    def _check_exit(self, number: int, *, has_answered: bool) -> None:
        """Raises CommandError unless the launcher has ended with status 0."""
        status = self._processes[number].wait()
        name = self._commands[number][0].name
        if status == 0 and has_answered:
            return
        if status == _SSH_FAILED or not has_answered:
            raise CommandError(
                f"ssh to {name} failed with exit status {status}; its message is above. The job was ended.\n"
                f"Test the login by hand, which must work without a prompt: {self._login_test(number)}"
            )
        raise CommandError(
            f"the launcher on {name} failed with exit status {status}; its message is above. The job was ended.",
            status if 0 < status < _SSH_FAILED else EXIT_FAILURE,
        )

    def _login_test(self, number: int) -> str:
        host = self._commands[number][0]
        return " ".join(["ssh", *(["-p", str(host.port)] if host.port else []), host.login, "true"])

    def _end(self) -> None:
        """Closes the stdin of all that are left, at which their launchers end, and collects them."""
        for number, process in enumerate(self._processes):
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            if number in self._silent and process.poll() is None:
                process.terminate()  # before it is connected, ssh does not read
        for seconds, send in ((_END_S, signal.SIGTERM), (_KILL_S, signal.SIGKILL)):
            try:
                if self._wait_all(seconds):
                    break
            except _Interrupted:
                pass
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(send)
        for process in self._processes:
            process.wait()
        for thread in self._threads:
            thread.join(_KILL_S)  # a process of a rank may have kept a pipe

    def _wait_all(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise _Interrupted(number)
