"""Whether the ranks' Bagua has its compiled compression, which a source tree on PYTHONPATH has not: without it,
algorithms that compress on CPUs take several times as long as for users, and nothing else shows it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

_MODULE = "bagua.kernels._minmax_uint8"
_FACT = "python_compression"  # where the package is that has no other


def compression_facts(device: str) -> dict[str, str]:
    """In a rank, on "cpu" or "cuda"; empty if there is nothing to say."""
    package = importlib.util.find_spec("bagua")
    if device != "cpu" or package is None or importlib.util.find_spec(_MODULE) is not None:
        return {}
    return {_FACT: str(package.origin)}


def compression_notes(facts: Mapping[str, Any]) -> Sequence[str]:
    """Of what the ranks said about themselves."""
    if _FACT not in facts:
        return ()
    note = (
        f"{facts[_FACT]} has no compiled {_MODULE}: what compresses runs in Python here, several times slower than for"
        " users; install the package (make install), and leave the source tree out of PYTHONPATH"
    )
    return (note,)
