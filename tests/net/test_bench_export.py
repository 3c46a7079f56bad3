"""--json and --csv hold every figure and the machine's facts."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path

import pytest

from bagua.net.bench.export import check_writable, write_csv, write_json
from bagua.net.bench.machine import cpu_model, describe_machine
from bagua.net.bench.measurement import Measurement

ROWS = [
    Measurement.from_samples(
        contender=name,
        collective="all_reduce",
        size_bytes=1 << 20,
        ranks=2,
        iterations=7,
        repetition_seconds=[1e-3, 2e-3],
        verified=verified,
        note="a, b",
    )
    for name, verified in (("plugin", True), ("bare", False))
]


def test_json_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "3")
    monkeypatch.setenv("UNRELATED_SECRET", "hidden")
    path = tmp_path / "run.json"
    machine = describe_machine(["bagua-net-bench", "-b", "8", "a b"])
    write_json(path, ROWS, machine, parameters={"ranks": 2}, summary={"ok": True})
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert [Measurement(**row) for row in document["measurements"]] == ROWS
    assert document["parameters"] == {"ranks": 2}
    assert document["summary"] == {"ok": True}
    facts = document["machine"]
    assert facts["command_line"] == "bagua-net-bench -b 8 'a b'"
    assert facts["environment"]["BAGUA_NET_NSTREAMS"] == "3"
    assert "UNRELATED_SECRET" not in path.read_text()
    for name in ("host", "cpu_model", "kernel", "tcp_congestion_control", "package_version", "date"):
        assert facts[name], name
    assert facts["cpus_usable"] >= 1


def test_csv_has_a_head_and_a_row_each(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write_csv(path, ROWS, describe_machine(["bagua-net-bench"]))
    lines = path.read_text().splitlines()
    facts = [line for line in lines if line.startswith("# ")]
    assert any(line.startswith("# cpu_model: ") for line in facts)
    rows = list(csv.DictReader(lines[len(facts) :]))
    assert list(rows[0]) == [field.name for field in fields(Measurement)]
    assert [row["contender"] for row in rows] == ["plugin", "bare"]
    assert [row["verified"] for row in rows] == ["True", "False"]
    assert rows[0]["note"] == "a, b"
    assert float(rows[0]["time_us"]) == pytest.approx(1500)


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
