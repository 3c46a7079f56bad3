"""Lightning comes as two packages with the same contents, whose classes are not each other's. Which one is in use."""

from __future__ import annotations

import importlib.util
import sys

# The usual one first.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def packages_in_use() -> list[str]:
    """Those that this process has imported."""
    return [package for package in PACKAGES if package in sys.modules]


def package_in_use() -> str:
    """The one that is imported, the usual one if both are, or the one that is installed.

    Raises:
        ImportError: none is installed; names the remedy.
    """
    for package in (*packages_in_use(), *PACKAGES):
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ImportError(
        "Neither lightning nor pytorch_lightning is installed, and bagua.lightning needs one of them.\n"
        "Install it: pip install 'bagua[lightning]'"
    )
