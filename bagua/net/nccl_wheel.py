"""The NCCL that torch brings as a wheel, known from the wheel's metadata: this runs in `import torch`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from bagua.net.nccl_release import NcclRelease


def wheel_release(search_path: Iterable[str] | None = None) -> tuple[str, NcclRelease] | None:
    """Name and release of the NCCL wheel that torch brings."""
    for directory in sys.path if search_path is None else search_path:
        for metadata in sorted(Path(directory or ".").glob("nvidia_nccl_cu*.dist-info")):
            name, _, version = metadata.name.removesuffix(".dist-info").partition("-")
            release = NcclRelease.from_text(version)
            if release is not None:
                return name.replace("_", "-"), release
    return None
