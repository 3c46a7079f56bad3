"""The hosts of `baguarun`, and the ssh command that starts a launcher on one of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
