"""--json and --csv hold every figure and the machine's facts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bagua.net.bench.export import check_writable
from bagua.net.bench.figures import measurement_case, measurement_figures, result_of, write_csv
from bagua.net.bench.machine import cpu_model, describe_machine, source_commit
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.result_file import ResultFile, read_result, write_result

ROW = Measurement.from_samples(
    backend="NCCL default",
    collective="all_reduce",
    size_bytes=1 << 20,
    ranks=2,
    iterations=7,
    repetition_seconds=[1e-3, 2e-3],
)


def result(monkeypatch: pytest.MonkeyPatch) -> ResultFile:
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "3")
    monkeypatch.setenv("UNRELATED_SECRET", "hidden")
    machine = describe_machine(["bagua-net-bench", "-b", "8", "a b"])
    found = measurement_figures(ROW, measurement_case(ROW, ranks=2))
    return result_of("a run", found, machine=machine, parameters={"ranks": 2}, versions={"nccl": None, "torch": 2})


def test_json_has_the_figures_and_what_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_result(path, result(monkeypatch))
    assert "UNRELATED_SECRET" not in path.read_text()
    run = read_result(path)
    time = run.find("time", backend="nccl", collective="all_reduce", size_bytes=1 << 20, ranks=2, gpus=0)
    assert (time.median, time.low, time.high, time.repetitions) == pytest.approx((1500, 1000, 2000, 2))
    assert run.command == "bagua-net-bench -b 8 'a b'"
    assert run.parameters["environment"]["BAGUA_NET_NSTREAMS"] == "3"
    assert set(run.machine) == {"cpu_model", "cpus_usable", "kernel", "tcp_congestion_control"}
    assert set(run.versions) == {"bagua", "python", "torch"}


def test_csv_has_a_row_for_each_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.csv"
    write_csv(path, result(monkeypatch))
    lines = path.read_text().splitlines()
    facts = [line for line in lines if line.startswith("# ")]
    assert any(line.startswith("# cpu_model: ") for line in facts)
    time, busbw = csv.DictReader(lines[len(facts) :])
    assert (time["backend"], time["metric"], time["unit"], time["median"]) == ("nccl", "time", "us", "1500.0")
    assert (busbw["metric"], busbw["repetitions"]) == ("busbw", "2")


def test_the_commit_is_that_of_the_version() -> None:
    assert source_commit("1.2.dev3+g0123abcd.d20260102") == "0123abcd"


def test_the_caption_names_what_a_figure_depends_on() -> None:
    machine = describe_machine()
    for part in (machine.cpu_model, machine.kernel, machine.tcp_congestion_control, machine.package_version):
        assert part in machine.caption()


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nmodel name\t: AMD  EPYC 9B14\nprocessor : 1\nmodel name : other\n", "AMD EPYC 9B14"),
        ("processor : 0\nHardware : x\nModel : Raspberry Pi 5\n", "Raspberry Pi 5"),
    ],
)
def test_cpu_model(cpuinfo: str, expected: str) -> None:
    assert cpu_model(cpuinfo) == expected


def test_cpu_model_is_never_empty() -> None:
    assert cpu_model("processor : 0\nCPU implementer : 0x41\n")


def test_paths_that_cannot_be_written_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--json .*no/such.* does not exist; create it"):
        check_writable("--json", tmp_path / "no/such/run.json")
    with pytest.raises(ValueError, match=r"--csv .* is a directory"):
        check_writable("--csv", tmp_path)
    with pytest.raises(ValueError, match=r"--json '/proc/version' cannot be written \("):
        check_writable("--json", Path("/proc/version"))
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    check_writable("--json", kept)
    assert kept.read_text() == "before"
