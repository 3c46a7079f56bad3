"""The version of the package. The build takes it from the git tag and writes it to bagua/_version.py."""

from __future__ import annotations

try:
    from bagua._version import __version__ as __version__
except ModuleNotFoundError:  # a source tree that was not built
    __version__ = "0+source"
