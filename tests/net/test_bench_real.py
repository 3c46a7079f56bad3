"""bagua-net-bench with the installed driver and library on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bench_command import run_installed, start_installed
from support.ports import free_port

from bagua.net.bench.result_file import read_result
from bagua.net.library import library_path

SHORT = ["-b", "1K", "-e", "1M", "-f", "1024", "-n", "2", "--repeats", "2"]


def test_every_backend_moves_correct_data_on_busy_cpus(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    # Odd sizes are summed as bytes, multiples of four as float32; 3 ranks make uneven chunks.
    words = ["-b", "5", "-e", "4M", "-f", "64", "--ranks", "3", "--channels", "2", "--busy-per-cpu", "1"]
    words += ["-n", "3", "-w", "1", "--repeats", "2", "--backends", "plugin,plugin-1,bare,raw", "--json", str(path)]
    code, output, errors = run_installed(*words)
    assert code == 0, errors
    assert "1 busy process per CPU" in output
    assert "every byte of every size correct" in output
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


def test_ranks_of_a_launcher_and_another_build_of_the_library(tmp_path: Path) -> None:
    copy, path = tmp_path / "libnccl-net-old.so", tmp_path / "run.json"
    copy.write_bytes(library_path().read_bytes())
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(2))}
    words = [*SHORT, "--backends", "plugin,bare,raw", "--baseline-library", str(copy), "--json", str(path)]
    ranks = [start_installed(*words, RANK=rank, LOCAL_RANK=rank, **launch) for rank in ("0", "1")]
    ended = [(*rank.communicate(timeout=200), rank.returncode) for rank in ranks]
    assert [code for _, _, code in ended] == [0, 0], ended
    result = read_result(path)
    assert list(result.parameters["backends"]) == ["plugin", "baseline", "bare"]
    assert (result.parameters["verified"], result.notes) == (True, ())
    assert all(time.median > 0 for time in result.select("time"))


def test_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    code, output, errors = run_installed(*SHORT, "--address", "::1", "--backends", "plugin,bare,raw")
    assert code == 0, errors
    assert "over lo (::1)" in output


@pytest.mark.parametrize("option", ["--library", "--baseline-library"])
def test_a_file_that_is_no_library_is_an_error_that_names_it(option: str, tmp_path: Path) -> None:
    broken = tmp_path / "libnccl-net.so"
    broken.write_bytes(b"not an ELF file")
    code, _, errors = run_installed("--quick", "--backends", "plugin", option, str(broken))
    assert code == 1
    assert str(broken) in errors
    assert "Traceback" not in errors


def test_the_users_settings_reach_the_plugin() -> None:
    # A library that is named may know other values than the package's, which is asked before the run.
    words = ["--quick", "--backends", "plugin", "--library", library_path()]
    code, _, errors = run_installed(*words, BAGUA_NET_NSTREAMS="a-few")
    assert code == 1
    assert "BAGUA_NET_NSTREAMS" in errors
    assert "a-few" in errors
