"""Hosts that are network namespaces (tools/netlab), and the marks of tests that need them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)  # behind everything else: `tools` holds programs, not an installed package

from netlab import NIC_CUTS, Lab, cut_nic, missing_privilege  # noqa: E402

__all__ = ["NEEDS_LAB", "NIC_CUTS", "Lab", "cut_nic", "missing_privilege", "namespaces_of", "needs_lab"]

_LACKING = missing_privilege()
NEEDS_LAB = [pytest.mark.netns, pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))]


def namespaces_of(pid: int) -> list[str]:
    """That a process has made for labs."""
    return sorted(path.name for path in Path("/run/netns").glob(f"netlab-{pid}-*"))


def needs_lab(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_LAB:
        test = mark(test)
    return test
