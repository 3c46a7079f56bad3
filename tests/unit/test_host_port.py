"""HOST:PORT, as the command line tools and NCCL's RAS service take it."""

from __future__ import annotations

import pytest

from bagua.host_port import require_port, split_host_port


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1", ("node1", None)),
        ("node-1.example.org:22", ("node-1.example.org", 22)),
        ("my_host:65535", ("my_host", 65535)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]", ("::1", None)),
        ("[fe80::1%eth0]:28028", ("fe80::1%eth0", 28028)),
        ("::1", ("::1", None)),
        ("fe80::1%eth0", ("fe80::1%eth0", None)),
        ("2001:db8::1:22", ("2001:db8::1:22", None)),  # an address: a port needs brackets
    ],
)
def test_what_is_taken(text: str, found: tuple[str, int | None]) -> None:
    assert split_host_port(text) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not a host; write HOST, HOST:PORT or"),
        (":22", "is not a host"),
        ("node:", "is not a host"),
        ("node:ssh", "is not a host"),
        ("node:22:x", "is not a host"),
        ("[node]:22", "is not a host"),
        ("[::1", "is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("node one", "is not a host"),
        ("node:٣", "is not a host"),
        ("node:0", "'node:0' has port 0, which must be between 1 and 65535"),
        ("[::1]:65536", "has port 65536, which must be"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("[", r"\[")):
        split_host_port(text)


def test_a_port_that_has_to_be_there() -> None:
    assert require_port("[::1]:28028") == ("::1", 28028)
    for text in ("localhost", "::1:28028"):
        with pytest.raises(ValueError, match=f"'{text}' names no port; write HOST:PORT or"):
            require_port(text)
