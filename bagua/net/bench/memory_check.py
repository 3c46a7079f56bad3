"""All backends keep their buffers during the run, so a large size can ask for more memory than there is."""

from __future__ import annotations

import re
from pathlib import Path

from bagua.net.bench.errors import BenchError
from bagua.net.bench.sizes import format_size

# A buffer and, while data is verified, a second one of the same size.
_BUFFERS = 2


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def check_memory(largest_bytes: int, local_ranks: int, ring_backends: int, meminfo: str | None = None) -> None:
    if meminfo is None:
        try:
            meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        except OSError:
            return
    available = available_bytes(meminfo)
    needed = largest_bytes * local_ranks * (ring_backends + _BUFFERS - 1)
    if available is not None and needed > available:
        raise BenchError(
            f"size {format_size(largest_bytes)} with {local_ranks} ranks and {ring_backends} backends needs"
            f" {format_size(needed)} of memory, and {format_size(available)} are available; lower -e/--maxbytes,"
            " --ranks or the number of --backends"
        )
