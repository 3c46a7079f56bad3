"""Hosts that are network namespaces (tools/netlab), and the marks of tests that need them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)  # behind everything else: `tools` holds programs, not an installed package

from netlab import NIC_CUTS, Lab, cut_nic, missing_privilege  # noqa: E402

__all__ = [
    "NEEDS_LAB",
    "NIC_CUTS",
    "Lab",
    "cut_nic",
    "enter_namespace",
    "missing_privilege",
    "needs_lab",
]

_LACKING = missing_privilege()
NEEDS_LAB = [pytest.mark.netns, pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))]


CLONE_NEWNET = 0x40000000


def enter_namespace(path: str) -> None:
    """Of a lab's host, for the calling thread and those that it starts: a rank that is forked does without the seconds
    in which a program of its own imports torch. /sys stays that of the test process."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({path})")
    finally:
        os.close(namespace)


def needs_lab(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_LAB:
        test = mark(test)
    return test
