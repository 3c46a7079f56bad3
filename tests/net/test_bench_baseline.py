"""--baseline-library: another build of the plugin as a backend of the same run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_command import SMALL_RUN, Bench

from bagua.net.bench.driver import DriverRequest, DriverSettings
from bagua.net.bench.errors import BenchError
from bagua.net.bench.result_file import read_result
from bagua.net.bench.ring.options import parse_options
from bagua.net.library import library_path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    library = tmp_path / "libslow.so"
    library.write_text("1.25", encoding="utf-8")
    return library


def test_it_stands_beside_the_plugin_in_every_output(bench: Bench, slow: Path, tmp_path: Path) -> None:
    json_path, csv_path = tmp_path / "run.json", tmp_path / "run.csv"
    outputs = ["--json", str(json_path), "--csv", str(csv_path)]
    finished = bench.run(*SMALL_RUN, "--backends", "plugin,bare", "--baseline-library", str(slow), *outputs)
    assert finished.returncode == 0, finished.stderr
    assert f"devices lo, {slow}" in finished.stdout
    assert "plugin vs baseline: busbw at 4 MiB 1.25x (spread 1.25..1.25), p50 time at 1 KiB 0.80x" in finished.stdout
    result = read_result(json_path)
    assert list(result.parameters["backends"]) == ["plugin", "baseline", "bare"]
    for size in (1 << 10, 1 << 16, 1 << 22):
        mine, other = (result.find("time", backend=name, size_bytes=size).median for name in ("plugin", "baseline"))
        assert other == pytest.approx(1.25 * mine)
        for metric, ratio in (("speedup", 1.25), ("cpu_ratio", 0.8)):
            figure = result.find(metric, backend="plugin", baseline="baseline", size_bytes=size)
            assert (figure.low, figure.median, figure.high) == pytest.approx((ratio, ratio, ratio))
        assert result.find("speedup", baseline="bare", size_bytes=size).median == pytest.approx(1.0)
    lines = [line for line in csv_path.read_text().splitlines() if not line.startswith("#")]
    assert {row["backend"] for row in csv.DictReader(lines)} == {"plugin", "baseline", "bare"}


def test_a_library_that_is_missing_or_fails_is_named(bench: Bench, slow: Path) -> None:
    words = [*SMALL_RUN, "--backends", "plugin", "--baseline-library"]
    missing = bench.run(*words, "/no/libold.so")
    assert missing.returncode == 1
    assert "the baseline's library '/no/libold.so' does not exist; name a libnccl-net.so" in missing.stderr
    folder = bench.run(*words, "/")
    assert "the baseline's library '/' is no file; name a libnccl-net.so" in folder.stderr
    assert missing.stdout == ""
    fault = {"at": "start", "do": "error", "rank": 1, "library": slow.name}
    failing = bench.run(*words, str(slow), fault=fault)
    assert failing.returncode == 1
    assert "baseline rank 1 failed while starting: injected" in failing.stderr
    assert "Traceback" not in failing.stderr


def test_it_needs_the_plugin_to_be_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(["--baseline-library", "x.so"]).backends[:3] == ("plugin", "baseline", "plugin-1")
    assert "baseline" not in parse_options([]).backends
    with pytest.raises(SystemExit):
        parse_options(["--baseline-library", "x.so", "--backends", "bare"])
    assert "without the backend plugin, which it is compared with; add plugin to --backends" in (
        capsys.readouterr().err
    )


def settings(baseline: Path | None) -> DriverSettings:
    return DriverSettings(
        driver=Path("/d"),
        library=Path("/new.so"),
        channels=2,
        address="127.0.0.1",
        interface="lo",
        local_ranks=2,
        timeout_s=10,
        environment={"ENABLE_BAGUA_NET": "0", "BAGUA_NET_NSTREAMS": "3"},
        baseline_library=baseline,
    )


def test_the_only_interface_is_joined_with_no_other() -> None:
    joining = {"BAGUA_NET_JOIN_NICS": "eth0+eth1"}
    for interface, left in (("lo", {"NCCL_SOCKET_IFNAME": "=lo"}), ("", joining)):
        one = replace(settings(None), interface=interface, environment=joining)
        assert one.process_environment(DriverRequest("plugin", 0, 2)) == {"LOCAL_WORLD_SIZE": "2", **left}


def test_a_rank_that_was_started_without_the_option_says_so() -> None:
    """Across hosts rank 0 asks for a backend by name; each rank knows its own path."""
    with pytest.raises(
        BenchError, match=r"baseline rank 1 was asked for, but .* no --baseline-library; give all ranks"
    ):
        settings(None).command(DriverRequest("baseline", 1, 2))


def test_the_installed_library_against_a_copy_of_itself(tmp_path: Path) -> None:
    copy = tmp_path / "libnccl-net-old.so"
    copy.write_bytes(library_path().read_bytes())
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not an ELF file")
    words = ["-b", "1K", "-e", "1M", "-f", "1024", "-n", "2", "--repeats", "2", "--local", "--backends", "plugin"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "BAGUA_NET_"))}
    path = tmp_path / "run.json"

    def run(library: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bagua.cli.net_bench", *words, "--baseline-library", str(library)]
        return subprocess.run([*command, "--json", str(path)], env=clean, capture_output=True, text=True, timeout=120)

    finished = run(copy)
    assert finished.returncode == 0, finished.stderr
    result = read_result(path)
    assert [one.case["backend"] for one in result.select("time")] == ["plugin", "baseline"] * 2
    assert (result.parameters["verified"], result.notes) == (True, ())
    refused = run(broken)
    assert refused.returncode == 1
    assert str(broken) in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.deep
def test_rounds_of_fresh_processes_give_verdicts(bench: Bench, slow: Path, tmp_path: Path) -> None:
    """A baseline that takes 1.25 times as long, and then the other way round, which is an exit code of its own."""
    path = tmp_path / "run.json"
    words = ["-b", "1K", "-e", "4M", "-f", "64", "-n", "3", "--repeats", "1", "--fresh-processes", "11"]
    faster = bench.run(*words, "--baseline-library", str(slow), "--fail-on-slower", "--json", str(path))
    assert faster.returncode == 0, faster.stderr
    assert "faster: 3 of 3 rows: 1 KiB, 64 KiB, 4 MiB\n" in faster.stdout
    result = read_result(path)
    for size in (1 << 10, 1 << 16, 1 << 22):
        labels = {"baseline": "baseline", "size_bytes": size, "channels": 2}
        times = [result.find(metric, **labels) for metric in ("time_ratio", "cpu_ratio")]
        assert [(one.low, one.median, one.repetitions) for one in times] == [(pytest.approx(0.8),) * 2 + (12,)] * 2
        assert result.find("time_ratio", baseline="bare", size_bytes=size).median == pytest.approx(1.0)
    slower = bench.run(*words, "--library", str(slow), "--baseline-library", str(bench.library), "--fail-on-slower")
    assert slower.returncode == 3, slower.stderr
    assert "slower: 3 of 3 rows" in slower.stdout
    assert "more CPU: 3 of 3 rows" in slower.stdout
