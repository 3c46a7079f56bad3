"""Table, result files and progress of the benchmarks. Result files keep what was measured, and refuse what
is not one."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from bagua.net.bench.command_line import check_writable
from bagua.net.bench.machine import cpu_model, describe_machine, source_commit
from bagua.net.bench.measurement import Measurement, Sample
from bagua.net.bench.result_file import (
    Figure,
    ResultFile,
    measurement_case,
    measurement_figures,
    read_result,
    result_of,
    write_csv,
    write_result,
)
from bagua.net.bench.table import LOUD, RESET, render_table
from bagua.progress import Progress


def row(backend: str, size: int, verified: bool | None = None, *, collective: str = "all_reduce") -> Measurement:
    samples = [Sample(7, seconds, (), 1.0, 10**9) for seconds in (1e-3, 2e-3)]
    return Measurement(backend, collective, size, 2, samples, share_of_raw=0.99, verified=verified)


ROW = row("NCCL default", 1 << 20)


def test_wrong_data_is_loud_and_a_blank_line_separates_sizes() -> None:
    rows = [row("a", 8, verified=False), row("raw x2", 8, collective="one_way"), row("b", 16, verified=True)]
    lines = render_table(rows, colour=True).splitlines()
    assert lines[2].startswith(LOUD)
    assert lines[2].endswith(RESET)
    assert [bool(line) for line in lines[2:]] == [True, True, False, True]
    assert "\x1b" not in render_table(rows)
    assert "p50" not in lines[0], "a column without a value is left out"


def test_files_have_the_figures_and_what_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "3")
    monkeypatch.setenv("UNRELATED_SECRET", "hidden")
    machine = describe_machine(["bagua-net-bench", "-b", "8", "a b"])
    found = measurement_figures(ROW, measurement_case(ROW, ranks=2))
    result = result_of("a run", found, machine=machine, parameters={"ranks": 2}, versions={"nccl": None, "torch": 2})
    write_result(tmp_path / "run.json", result)
    assert "UNRELATED_SECRET" not in (tmp_path / "run.json").read_text()
    run = read_result(tmp_path / "run.json")
    time = run.find("time", backend="nccl", collective="all_reduce", size_bytes=1 << 20, ranks=2, gpus=0)
    assert (time.median, time.low, time.high, time.repetitions) == pytest.approx((1500, 1000, 2000, 2))
    assert run.command == "bagua-net-bench -b 8 'a b'"
    assert run.parameters["environment"]["BAGUA_NET_NSTREAMS"] == "3"
    assert set(run.versions) == {"bagua", "python", "torch"}
    write_csv(tmp_path / "run.csv", result)
    lines = (tmp_path / "run.csv").read_text().splitlines()
    first = next(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert (first["backend"], first["metric"], first["unit"], first["median"]) == ("nccl", "time", "us", "1500.0")
    assert source_commit("1.2.dev3+g0123abcd.d20260102") == "0123abcd"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nmodel name\t: AMD  EPYC 9B14\nprocessor : 1\nmodel name : other\n", "AMD EPYC 9B14"),
        ("processor : 0\nHardware : x\nModel : Raspberry Pi 5\n", "Raspberry Pi 5"),
    ],
)
def test_cpu_model(cpuinfo: str, expected: str) -> None:
    assert cpu_model(cpuinfo) == expected


def test_paths_that_cannot_be_written_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--json .*no/such.* does not exist; create it"):
        check_writable("--json", tmp_path / "no/such/run.json")
    with pytest.raises(ValueError, match=r"--json '/proc/version' cannot be written \("):
        check_writable("--json", Path("/proc/version"))
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    check_writable("--json", kept)
    assert kept.read_text() == "before"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_redrawn_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    with Progress(4, stream=stream) as progress:
        progress.advance("x" * 200)
        assert len(stream.getvalue().removeprefix("\r\x1b[2K")) == 39, "it never wraps"
        progress.message("that stays")
    assert stream.getvalue().endswith("\r\x1b[2Kthat stays\n\r\x1b[2K")


def test_a_file_gets_plain_lines_now_and_then() -> None:
    stream = io.StringIO()
    progress = Progress(100, stream=stream)
    for step in range(30):
        progress.advance(f"step {step}")
    assert stream.getvalue() == "  1% step 0, 0 s\n"


RESULT = ResultFile(
    title="All-reduce on one machine",
    command="bagua-net-bench -b 8 -e 16",
    date="2026-11-23T12:00:00+00:00",
    commit=None,
    machine={"cpus_usable": 2},
    versions={"bagua": "1.0.0"},
    figures=(
        Figure({"backend": "plugin", "size_bytes": 8}, "time", "us", 14.5, 14.2, 30.1, 7),
        Figure({"backend": "plugin", "size_bytes": 16}, "time", "us", 15.0, repetitions=None),
    ),
    parameters={"channels": 2},
    notes=("Other programs were running.",),
)


@pytest.mark.parametrize("figures", [RESULT.figures, ()])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, figures: tuple[Figure, ...]) -> None:
    path = tmp_path / "result.json"
    result = ResultFile(**{**vars(RESULT), "figures": figures})
    write_result(path, result)
    assert read_result(path) == result


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "measurements": []}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_result(path)
