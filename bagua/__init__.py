"""Bagua: fast, observable data-parallel training over ordinary TCP networks.

Importing this package activates Bagua-Net where ENABLE_BAGUA_NET (or BAGUA_NET_REQUIRED, or BAGUA_NET_ENCRYPTION) asks
for it; see docs/how-to/switch-on.md. It imports neither torch nor native code; `bagua.comm_hooks`, which does, is
imported at its first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from bagua.version import __version__

if TYPE_CHECKING:
    from types import ModuleType

    from bagua import comm_hooks as comm_hooks

__all__ = ["__version__"]

if not {"ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED", "BAGUA_NET_ENCRYPTION"}.isdisjoint(os.environ):
    from bagua.net.activation import activate_at_import

    activate_at_import()


def __getattr__(name: str) -> ModuleType:
    if name == "comm_hooks":
        return importlib.import_module("bagua.comm_hooks")
    raise AttributeError(f"module 'bagua' has no attribute {name!r}")
