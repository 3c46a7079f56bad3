"""--busy-per-cpu: processes that keep this host's CPUs busy during a run, as the workers of a data loader do."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.endpoint import gather

# Reads, computes and writes 4 MiB again and again, as decoding does. What comes on stdin, or its end, ends it.
_PROGRAM = """\
import select, sys
print('{"event": "burning"}', flush=True)
work, table = bytes(4 << 20), bytes(range(1, 256)) + bytes(1)
while not select.select([sys.stdin], [], [], 0)[0]:
    work = work.translate(table)
"""


@contextlib.contextmanager
def busy_cpus(per_cpu: int, timeout_s: float, environment: Mapping[str, str]) -> Iterator[None]:
    """All of them are busy when this returns. They end with this process, however that ends."""
    count = per_cpu * len(os.sched_getaffinity(0))
    with DriverGroup() as group:
        command = [sys.executable, "-S", "-c", _PROGRAM]
        burning = [group.start(f"busy process {index + 1} of {count}", command, environment) for index in range(count)]
        gather(burning, "burning", timeout_s, "starting")
        yield
