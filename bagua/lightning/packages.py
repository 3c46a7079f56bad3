"""Lightning comes as two packages with the same contents, whose classes are not each other's: which one is in use, and
classes of ours for either.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

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
        "Install it: pip install lightning"
    )


class ForPackage:
    """Members of a class that is made for one of Lightning's packages. It has no name that pickle could find: what is
    pickled is how it was made, so that Lightning can start processes by spawn."""

    _made_by: tuple[Callable[[str], Any], str]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
        return _blank, self._made_by, self.__getstate__()


def subclass_for(
    package: str, name: str, members: type[ForPackage], make: Callable[[str], Any], module: str, base: str
) -> Any:
    """
    Args:
        package: of Lightning.
        name: of the class.
        members: of ours.
        make: makes this same class of a package's name.
        module: of the package, where its base class is.
        base: the name of that.

    Raises:
        ImportError: the package is not installed.
    """
    parent = getattr(importlib.import_module(f"{package}.{module}"), base)
    own = {"__module__": members.__module__, "__doc__": members.__doc__, "_made_by": (make, package)}
    return type(name, (members, parent), own)


def _blank(make: Callable[[str], Any], package: str) -> Any:
    made = make(package)
    return made.__new__(made)
