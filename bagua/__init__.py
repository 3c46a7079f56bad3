"""Bagua: fast, observable data-parallel training over ordinary TCP networks.

Importing this package activates Bagua-Net where ENABLE_BAGUA_NET (or BAGUA_NET_REQUIRED) asks for it; see
docs/activation.md. It imports neither torch nor native code.
"""

from __future__ import annotations

import os

from bagua.version import __version__

__all__ = ["__version__"]

if "ENABLE_BAGUA_NET" in os.environ or "BAGUA_NET_REQUIRED" in os.environ:
    from bagua.net.activation import activate_at_import

    activate_at_import()
