"""The memory of a turn: torch's count on a GPU, the process's resident memory on a CPU.

On a CPU, what the allocator kept of earlier turns is given back to the kernel before a turn begins, or the turn would
find it there and seem to need none. A figure is then right to some MiB, and absent where the kernel cannot forget a
peak.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_MIB = 1 << 20
# An algorithm may keep a flag or a counter; this much would change no figure of the table.
_KEPT_LIMIT_BYTES = _MIB
_STATUS = Path("/proc/self/status")
_FORGET_PEAK = (Path("/proc/self/clear_refs"), "5")  # see proc(5)


class TurnMemory:
    """`begin` before a turn, `restart` where another peak begins. Host only: nothing here waits for the device but
    `begin`. Used by the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = 0

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            gc.collect()
            _give_back()
            self._before = _resident_bytes("VmRSS")
        self.restart()

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif not _forget_peak():
            self._before = None

    def peak(self) -> int | None:
        """Bytes, since the last `begin` or `restart`. On a CPU, those beyond what there was before the turn."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        most = _resident_bytes("VmHWM")
        return None if most is None or self._before is None else max(0, most - self._before)

    def kept(self) -> str | None:
        """At the end: what was not freed; None if all was, and on a CPU, where nobody can tell."""
        if self._device.type != "cuda":
            return None
        kept_bytes = torch.cuda.memory_allocated(self._device) - (self._before or 0)
        return (
            None
            if kept_bytes <= _KEPT_LIMIT_BYTES
            else f"{kept_bytes / _MIB:.0f} MiB of GPU memory are still allocated"
        )


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _forget_peak() -> bool:
    path, code = _FORGET_PEAK
    try:
        path.write_text(code)
    except OSError:
        return False
    return True


def _resident_bytes(field: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
