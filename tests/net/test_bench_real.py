"""The installed driver and library on this machine: a short run of every backend, and a library that is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result
from bagua.net.library import library_path


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = ("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_", "NCCL_", "BAGUA_NET_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    return subprocess.run(
        [sys.executable, "-m", "bagua.cli.net_bench", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_every_backend_moves_correct_data(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    # Odd sizes are summed as bytes, multiples of four as float32; 3 ranks make uneven chunks.
    sizes = ["-b", "5", "-e", "4M", "-f", "64", "--ranks", "3", "--channels", "2"]
    finished = run_bench(
        *sizes, "-n", "3", "-w", "1", "--repeats", "2", "--backends", "plugin,plugin-1,bare,raw", "--json", str(path)
    )
    assert finished.returncode == 0, finished.stderr
    result = read_result(path)
    times = result.select("time")
    assert {one.case["backend"] for one in times} == {"plugin", "plugin_one_stream", "bare", "raw"}
    assert all(0 < (one.low or 0) <= one.median <= (one.high or 0) for one in times)
    for metric in ("cpu", "of_raw"):
        assert len(result.select(metric)) == len(times)
        assert all(one.median > 0 for one in result.select(metric))
    assert (result.parameters["verified"], result.notes) == (True, ())
    assert result.parameters["backends"]["plugin"].startswith("BaguaNet, table v")
    assert result.machine["tcp_congestion_control"] != "unknown"


def test_a_run_on_busy_cpus() -> None:
    sizes = ["-b", "1K", "-e", "1K", "-n", "2", "-w", "0", "--repeats", "1", "--backends", "plugin,bare"]
    finished = run_bench(*sizes, "--busy-per-cpu", "1")
    assert finished.returncode == 0, finished.stderr
    assert "1 busy process per CPU" in finished.stdout
    assert "every byte of every size correct" in finished.stdout


def test_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    finished = run_bench(
        "--address",
        "::1",
        "-b",
        "1K",
        "-e",
        "1M",
        "-f",
        "1024",
        "-n",
        "2",
        "--repeats",
        "1",
        "--backends",
        "plugin,bare,raw",
    )
    assert finished.returncode == 0, finished.stderr
    assert "over lo (::1)" in finished.stdout


def test_the_users_knobs_reach_the_plugin() -> None:
    finished = run_bench("--quick", "--backends", "plugin", BAGUA_NET_NSTREAMS="a-few")
    assert finished.returncode == 1
    assert "BAGUA_NET_NSTREAMS" in finished.stderr
    assert "a-few" in finished.stderr


def test_a_file_that_is_no_library_is_an_error_that_names_it(tmp_path: Path) -> None:
    broken = tmp_path / "libnccl-net.so"
    broken.write_bytes(b"not an ELF file")
    finished = run_bench("--quick", "--backends", "plugin", "--library", str(broken))
    assert finished.returncode == 1
    assert str(broken) in finished.stderr


def test_another_library_can_be_named(tmp_path: Path) -> None:
    copy = tmp_path / "libnccl-net-copy.so"
    copy.write_bytes(library_path().read_bytes())
    sizes = ["-b", "1K", "-e", "1K", "-n", "2", "--repeats", "1"]
    finished = run_bench(*sizes, "--backends", "plugin", "--library", str(copy))
    assert finished.returncode == 0, finished.stderr
