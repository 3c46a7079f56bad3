"""Packages that only a part of Bagua needs: their absence is an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any


def import_optional(package: str, extra: str, purpose: str) -> Any:
    """
    Args:
        purpose: what needs it, e.g. "backend='lmdb'".

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.split(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package}, which is not installed.\nInstall it: pip install 'bagua[{extra}]'",
            name=package,
        ) from None
