"""Whether the gloo backend can run here, found out without importing torch."""

from __future__ import annotations

import importlib.util


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None
