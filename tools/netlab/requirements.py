"""What this process lacks to build a lab, as one sentence with the remedy; None when it lacks nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def missing_privilege(capabilities: int | None = None) -> str | None:
    """What only another user or machine can have. `capabilities` replaces this process's effective mask (for tests)."""
    if not sys.platform.startswith("linux"):
        return f"netlab needs Linux network namespaces; this is {sys.platform}"
    status = Path("/proc/thread-self/status").read_text()
    mask = int(status.partition("CapEff:")[2].split()[0], 16) if capabilities is None else capabilities
    lacking = [name for name, bit in _CAPABILITIES.items() if not mask >> bit & 1]
    if lacking:
        options = " ".join(f"--cap-add {name.removeprefix('CAP_')}" for name in _CAPABILITIES)
        return (
            f"netlab needs {' and '.join(_CAPABILITIES)} to make network namespaces; this process (uid {os.geteuid()}) "
            f"lacks {' and '.join(lacking)}: run it as root (sudo), or in a container started with {options}"
        )
    return None


def missing_requirement() -> str | None:
    """The first thing that is missing of all that a lab needs."""
    lacking = missing_privilege()
    if lacking is not None:
        return lacking
    if importlib.util.find_spec("pyroute2") is None:
        return "netlab needs the Python package pyroute2, which is not installed: pip install pyroute2"
    if not Path("/proc/self/ns/net").exists():
        return "netlab needs a kernel with network namespaces (CONFIG_NET_NS)"
    return None
