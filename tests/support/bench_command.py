"""bagua-net-bench as a program of its own, driving the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.fake_driver import HANGS, install_fake_driver
from support.processes import living_pids

SMALL_RUN = ["-b", "1K", "-e", "4M", "-f", "64", "-n", "3", "--repeats", "3"]


def hanging(pids: Path) -> int:
    """How many drivers have come to the command at which they hang."""
    return sum(file.read_text() == HANGS for file in pids.iterdir())


@dataclass(frozen=True)
class Bench:
    """Runs bagua-net-bench with the fake driver."""

    folder: Path
    driver: Path
    library: Path

    @staticmethod
    def install(folder: Path) -> Bench:
        library = folder / "libnccl-net.so"
        library.touch()
        (folder / "pids").mkdir()
        return Bench(folder, install_fake_driver(folder), library)

    @property
    def pids(self) -> Path:
        return self.folder / "pids"

    def command(self, *arguments: str) -> list[str]:
        given = ["--driver", str(self.driver), "--library", str(self.library), *arguments]
        return [sys.executable, "-m", "bagua.cli.net_bench", *given]

    def environment(self, fault: Mapping[str, object] | None = None) -> dict[str, str]:
        launcher = ("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_", "NCCL_", "BAGUA_NET_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
        environment["FAKE_DRIVER_PIDS"] = str(self.pids)
        if fault is not None:
            environment["FAKE_DRIVER_FAULT"] = json.dumps(fault)
        return environment

    def run(self, *arguments: str, fault: Mapping[str, object] | None = None) -> subprocess.CompletedProcess[str]:
        finished = subprocess.run(
            self.command(*arguments), env=self.environment(fault), capture_output=True, text=True, timeout=60
        )
        assert living_pids(self.pids) == []
        return finished
