"""Packages that only a part of Bagua needs: their absence is an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any


def import_optional(package: str, purpose: str) -> Any:
    """
    Args:
        purpose: what needs it, e.g. "backend='lmdb'".

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    name = package.split(".")[0]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs the package {name}, which is not installed.\nInstall it: pip install {name}",
            name=package,
        ) from None
