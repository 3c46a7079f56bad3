"""The version of the package. tests/packaging and tests/net compare it with the metadata and the compiled library."""

from __future__ import annotations

__version__ = "1.0.0"
