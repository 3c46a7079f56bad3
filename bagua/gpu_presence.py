"""Whether this host has a GPU, without loading a driver. Standard library only."""

from __future__ import annotations

from pathlib import Path


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """NVIDIA's and AMD's drivers, and WSL."""
    return any(devices.glob("nvidia[0-9]*")) or any((devices / name).exists() for name in ("kfd", "dxg"))
