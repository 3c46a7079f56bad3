"""The one error that netlab raises, and the translation of kernel answers into it: "No such file or directory" is what
rtnetlink answers when a queueing discipline is not in the kernel, which tells a user nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class NetlabError(RuntimeError):
    """A lab could not be built, entered or removed; the text names the cause and the remedy."""


@contextmanager
def translated(step: str, feature: str | None = None) -> Iterator[None]:
    """Turns an OSError or a netlink error of the enclosed `step`, which needs the kernel option `feature`, into a
    NetlabError."""
    try:
        yield
    except Exception as error:
        # pyroute2's NetlinkError is no OSError; it carries the errno as `code`. Anything else is our own bug.
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
        if not isinstance(code, int):
            raise
        needs = f", and {feature} in the kernel ({os.uname().release}), as a module or built in" if feature else ""
        raise NetlabError(
            f"netlab: {step} failed: {os.strerror(abs(code))} (errno {abs(code)}); it needs CAP_NET_ADMIN and"
            f" CAP_SYS_ADMIN, which root has (in a container, run it privileged){needs}"
        ) from error
