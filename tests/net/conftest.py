"""Fresh interpreters and fake machines for the tests of activation and of the command line.

Everything runs against the installed package: a test fails, and does not skip, where it is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.bench_command import Bench
from support.fresh_process import TIMEOUT_S, BuildLibrary, BuildNccl, Completed, RunCommand, RunNet, RunPython
from support.load_driver import LoadDriver, StartDriver

_OURS = ("NCCL_", "BAGUA_NET_", "_BAGUA_NET_", "ENABLE_BAGUA_NET", "TORCH_DEVICE_BACKEND", "LD_LIBRARY_PATH")
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_", "OMPI_", "MPI_", "TORCHELASTIC_")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of this process without any that concern us, and with a home directory of its own."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*_OURS, *_RANKS))}
    # The machine of the test may have an RDMA network, about which the plugin would ask.
    return {**kept, "HOME": str(home), "NCCL_IB_DISABLE": "1", "NO_COLOR": "1"}


@pytest.fixture
def run_command(tmp_path: Path) -> RunCommand:
    """Runs a command outside the source tree, with a deadline."""

    def run(command: Sequence[str | Path], environment: Mapping[str, str]) -> Completed:
        return subprocess.run(
            [str(word) for word in command],
            env=dict(environment),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


@pytest.fixture
def run_python(run_command: RunCommand) -> RunPython:
    """Runs a script in a fresh interpreter that has the installed package."""

    def run(script: str, environment: Mapping[str, str], *options: str) -> Completed:
        return run_command([sys.executable, *options, "-c", script], environment)

    return run


@pytest.fixture
def bagua_net() -> Path:
    """The installed console script."""
    script = Path(sys.executable).parent / "bagua-net"
    assert script.exists(), f"{script} is missing: install the package in the environment that runs pytest"
    return script


@pytest.fixture
def net(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> RunNet:
    """Runs `bagua-net` with these words, in `environment` with these variables besides."""

    def run(*words: object, **variables: str) -> Completed:
        return run_command([bagua_net, *map(str, words)], environment | variables)

    return run


@pytest.fixture
def without_library(tmp_path: Path) -> dict[str, str]:
    """Variables with which `python -S` imports a copy of the package that lacks all that was compiled. -S, because
    the finder of an editable install would come before PYTHONPATH."""
    import bagua

    source = Path(bagua.__file__).parent
    copy = tmp_path / "without_library" / "bagua"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("lib", "bin", "*.so", "__pycache__"))
    installed = [entry for entry in sys.path if "site-packages" in entry or "dist-packages" in entry]
    return {"PYTHONPATH": os.pathsep.join([str(copy.parent), *installed])}


@pytest.fixture
def build_library(tmp_path: Path) -> BuildLibrary:
    """Compiles C text to a shared library."""

    def build(name: str, text: str, *options: str) -> Path:
        folder = tmp_path / "built"
        folder.mkdir(exist_ok=True)
        library = folder / name
        compiler = os.environ.get("CXX", "c++").split()
        command = [*compiler, "-x", "c", "-shared", "-fPIC", *options, "-o", str(library), "-"]
        subprocess.run(command, input=text, text=True, check=True, timeout=TIMEOUT_S)
        return library

    return build


@pytest.fixture
def build_nccl(build_library: BuildLibrary) -> BuildNccl:
    """A libnccl.so.2 that only knows its version."""

    def build(code: int) -> Path:
        return build_library("libnccl.so.2", f"int ncclGetVersion(int* version) {{ *version = {code}; return 0; }}")

    return build


@pytest.fixture
def start_driver(environment: dict[str, str], tmp_path: Path) -> Iterator[StartDriver]:
    """Starts load drivers, and ends them with the test."""
    started: list[LoadDriver] = []

    def start(*arguments: object, **variables: str) -> LoadDriver:
        # Loopback: the same network for both transports, and nothing leaves the machine.
        full = {**environment, "NCCL_SOCKET_IFNAME": "lo", **variables}
        started.append(LoadDriver(arguments, full, tmp_path / f"driver{len(started)}.log"))
        return started[-1]

    yield start
    for driver in started:
        driver.end()
    for driver in started:
        # A sanitizer's exit code alone would pass for the error that a test expects.
        assert "Sanitizer" not in driver.log(), driver.log()
        assert "runtime error:" not in driver.log(), driver.log()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """bagua-net-bench with the fake driver."""
    return Bench.install(tmp_path)
