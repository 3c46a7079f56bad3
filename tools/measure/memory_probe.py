"""How much memory this process uses, and used at most.

On a GPU torch counts itself; NCCL's buffers are not in it. On a CPU what is in use is the C library's count, of all
threads and also of what compiled code allocates, and the peak is that of the resident memory; gloo's buffers are in
both. The peak is right to the page because ALLOCATOR_SETTINGS make the allocator give large pieces back at once.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# For the environment of the process that is measured: glibc would keep freed pieces of up to 32 MiB otherwise.
ALLOCATOR_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = (Path("/proc/self/clear_refs"), "5")  # see proc(5)


class _MallocCounts(ctypes.Structure):
    """struct mallinfo2, see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True)
class Use:
    """Bytes beyond what there was at `Probe.begin`."""

    kept: int  # now
    peak: int  # since `Probe.restart`


class Probe:
    """`begin`, then `restart` where a peak begins and `use` where it ends. For one thread. Only `begin` waits for the
    device: the count of allocated bytes is the host's."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError where a CPU's memory cannot be measured so."""
        self._device = device
        self._before = self._resident_before = 0
        if device.type == "cpu":
            self._libc: Any = ctypes.CDLL(None)
            if not hasattr(self._libc, "mallinfo2"):
                raise RuntimeError("memory on a CPU is counted by glibc's mallinfo2 (2.33 or newer); measure on a GPU")
            self._libc.mallinfo2.restype = _MallocCounts

    @classmethod
    def where_possible(cls, device: torch.device) -> Probe | None:
        """None where this machine cannot measure it."""
        try:
            probe = cls(device)
            probe.restart()
        except (RuntimeError, OSError):
            return None
        return probe

    def begin(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            # cuBLAS's workspaces live in torch's memory: the next one would find those of this one.
            clear: Any = torch._C
            clear._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        else:
            self._libc.malloc_trim(0)
        self._before, self._resident_before = self._used(), self._resident("VmRSS")

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            path, code = _FORGET_PEAK
            path.write_text(code)

    def use(self) -> Use:
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            return Use(self._used() - self._before, most - self._before)
        kept = self._used() - self._before
        # Pages that were never written are in use, and not resident.
        return Use(kept, max(kept, self._resident("VmHWM") - self._resident_before))

    def _used(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        counts = self._libc.mallinfo2()
        return int(counts.uordblks + counts.hblkhd)

    def _resident(self, name: str) -> int:
        if self._device.type == "cuda":
            return 0
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
        return int(line.split()[1]) * 1024
