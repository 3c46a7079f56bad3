"""--busy-per-cpu: processes that keep this host's CPUs busy during a run, as the workers of a data loader do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.endpoint import gather
from bagua.net.bench.errors import BenchError
from bagua.net.bench.settings import check_driver
from bagua.net.library import MissingFileError, driver_path


@contextlib.contextmanager
def busy_cpus(per_cpu: int, driver: Path | None, timeout_s: float, environment: Mapping[str, str]) -> Iterator[None]:
    """All of them are busy when this returns. The kernel ends them with this process, however that ends."""
    if per_cpu == 0:
        yield
        return
    try:
        program = driver or driver_path()
    except MissingFileError as error:
        raise BenchError(str(error)) from error
    check_driver(program)
    count = per_cpu * len(os.sched_getaffinity(0))
    with DriverGroup() as group:
        burning = [
            group.start(f"busy process {index + 1} of {count}", [str(program.absolute()), "burn"], environment)
            for index in range(count)
        ]
        gather(burning, "burning", timeout_s, "starting")
        yield
