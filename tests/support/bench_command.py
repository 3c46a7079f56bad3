"""bagua-net-bench as a program of its own, with the fake driver or with the installed one."""

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


def outside_a_launcher() -> dict[str, str]:
    """The variables of this process without a launcher's, NCCL's and the plugin's."""
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI_", "NCCL_", "BAGUA_NET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


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
        environment = {**outside_a_launcher(), "FAKE_DRIVER_PIDS": str(self.pids)}
        if fault is not None:
            environment["FAKE_DRIVER_FAULT"] = json.dumps(fault)
        return environment

    def run(
        self, *arguments: str, fault: Mapping[str, object] | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment(fault) | variables
        finished = subprocess.run(self.command(*arguments), env=environment, capture_output=True, text=True, timeout=60)
        assert living_pids(self.pids) == []
        return finished


def start_installed(*words: object, **variables: str) -> subprocess.Popen[str]:
    """bagua-net-bench with the installed driver and library, outside a launcher but for these variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "bagua.cli.net_bench", *map(str, words)],
        env=outside_a_launcher() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_installed(*words: object, **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    with start_installed(*words, **variables) as process:
        output, errors = process.communicate(timeout=200)
    return process.returncode, output, errors
