"""The one error that netlab raises, and the translation of kernel answers into it.

rtnetlink answers "No such file or directory" when a queueing discipline is not in the kernel, and "Operation not
supported" when a link type is not. Neither tells a user what to do, so each step says which kernel feature it needs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class NetlabError(RuntimeError):
    """A lab could not be built, entered or removed; the text names the cause and the remedy."""


# errno values with which rtnetlink says "this kind does not exist in this kernel".
_UNKNOWN_KIND = {errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EAFNOSUPPORT}


def describe_failure(step: str, number: int, feature: str | None, detail: str = "") -> str:
    """One sentence for errno `number` of `step`, which needs the kernel option `feature` (CONFIG_... name)."""
    cause = detail or os.strerror(number) if number > 0 else detail or "unknown error"
    text = f"netlab: {step} failed: {cause} (errno {number})"
    if number in (errno.EPERM, errno.EACCES):
        return f"{text}; it needs CAP_NET_ADMIN and CAP_SYS_ADMIN: run as root"
    if number == errno.EROFS:
        return f"{text}; the path is mounted read-only: in a container, run it privileged"
    if feature is not None and number in _UNKNOWN_KIND:
        module = feature.removeprefix("CONFIG_NET_").removeprefix("CONFIG_").lower()
        return (
            f"{text}; this kernel ({os.uname().release}) seems to lack {feature}: "
            f"load the module (modprobe {module}) or use a kernel built with {feature}"
        )
    if number in (errno.ENOSPC, errno.ENOMEM):
        return f"{text}; the limit is /proc/sys/user/max_net_namespaces or memory"
    return text


@contextmanager
def translated(step: str, feature: str | None = None) -> Iterator[None]:
    """Turns an OSError or a netlink error of the enclosed `step` into a NetlabError."""
    try:
        yield
    except NetlabError:
        raise
    except OSError as error:
        raise NetlabError(describe_failure(step, error.errno or 0, feature)) from error
    except Exception as error:
        # pyroute2's NetlinkError is no OSError; it carries the errno as `code`. Anything else is our own bug.
        code = getattr(error, "code", None)
        if not isinstance(code, int):
            raise
        raise NetlabError(describe_failure(step, abs(code), feature)) from error
