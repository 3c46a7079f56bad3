"""Reads HOST:PORT. Standard library only."""

from __future__ import annotations

import re

# A name or IPv4 address, or an IPv6 address in brackets. No leading "-": ssh would take that for an option.
_IPV6 = r"[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%[\w.-]+)?"
_HOST_PORT = re.compile(rf"(?:\[(?P<v6>{_IPV6})\]|(?P<name>[\w.][\w.-]*))(?::(?P<port>\d{{1,5}}))?", re.ASCII)
_BARE_IPV6 = re.compile(_IPV6, re.ASCII)


def split_host_port(text: str) -> tuple[str, int | None]:
    """
    Args:
        text: HOST, HOST:PORT, [IPV6], [IPV6]:PORT, or an IPv6 address alone.

    Returns:
        The host, without brackets, and the port; None if none is given.

    Raises:
        ValueError: it is none of these, or the port is not between 1 and 65535.
    """
    if _BARE_IPV6.fullmatch(text):
        return text, None
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a host; write HOST, HOST:PORT or [IPV6]:PORT")
    port = None if match["port"] is None else int(match["port"])
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"{text!r} has port {port}, which must be between 1 and 65535")
    return match["v6"] or match["name"], port


def require_port(text: str) -> tuple[str, int]:
    """As `split_host_port`, of what has to name a port. Raises ValueError if it does not."""
    host, port = split_host_port(text)
    if port is None:
        raise ValueError(f"{text!r} names no port; write HOST:PORT or [IPV6]:PORT")
    return host, port
