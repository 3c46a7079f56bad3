"""The runner of tools/measure with a tool without processes: runs that are cut, taken up, and out of time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bagua.net.bench.result_file import Figure, read_result

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.runner import DAY_S, Measure, Plan, Row, Sample, Tool

from bagua.net.bench.api import BenchError, Column, figures


@dataclass(frozen=True)
class Case:
    name: str

    def __str__(self) -> str:
        return self.name


class Toy(Tool):
    name = "toy"
    case_type = Case
    columns = (Column("variant", "", lambda row: row.variant),)
    options = (("steps", int, 1, "any number"),)
    same = ("steps",)
    length = (2, DAY_S, None)
    measured: list[tuple[str, str, int]]
    stop_at: Any = None
    stop: Any = None

    def plan(self) -> dict[str, Plan]:
        return {"here": {Case("one"): ["a", "b"], Case("two"): ["a", "b"]}}

    @contextlib.contextmanager
    def session(self, group: str, plan: Plan) -> Iterator[Measure]:
        yield self._take

    def _take(self, case: Case, variant: str, number: int) -> Sample:
        if (case.name, variant, number) == self.stop_at:
            type(self).stop()
        self.measured.append((case.name, variant, number))
        return {"seconds": 2.0 if variant == "a" else 1.0}

    def figures(self, row: Row) -> list[Figure]:
        return figures({"case": row.case.name, "variant": row.variant}, {("time", "s"): row.values()})


def run(folder: Path, *words: str, keeps: bool = False, at: Any = None, stop: Any = None) -> tuple[int, list[Any]]:
    found: list[tuple[str, str, int]] = []
    kind = type("Toy", (Toy,), {"keeps_turns": keeps, "measured": found, "stop_at": at, "stop": staticmethod(stop)})
    files = ["--json", str(folder / "toy.json"), "--details", str(folder / "toy.jsonl")]
    return kind.main(["--device", "cpu", *files, *words]), found


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


ALL = [("one", "a", 0), ("one", "b", 0), ("one", "b", 1), ("one", "a", 1)]
ALL += [("two", "a", 0), ("two", "b", 0), ("two", "b", 1), ("two", "a", 1)]


@pytest.mark.parametrize(("keeps", "again"), [(True, ALL[7:]), (False, ALL[6:])])
def test_a_run_that_is_ended_reports_and_the_next_measures_what_it_lacks(
    keeps: bool, again: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, measured = run(tmp_path, keeps=keeps, at=("two", "a", 1), stop=terminate)
    assert (code, measured) == (1, ALL[:7])
    assert "interrupted" in capsys.readouterr().out
    assert read_result(tmp_path / "toy.json").find("time", case="two", variant="b").repetitions == 2
    with (tmp_path / "toy.jsonl").open("a") as file:
        file.write('{"case": {"na')  # as if it had been killed
    assert run(tmp_path, keeps=keeps) == (0, again)
    first = read_result(tmp_path / "toy.json").figures
    assert {figure.repetitions for figure in first} == {2}
    assert run(tmp_path, keeps=keeps) == (0, [])
    assert read_result(tmp_path / "toy.json").figures == first


def test_turns_of_other_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    with pytest.raises(SystemExit):
        run(tmp_path, "--steps", "2")
    assert "measured with steps 1, and now it is 2" in capsys.readouterr().err
    (tmp_path / "toy.jsonl").write_text(json.dumps([1]) + "\n")
    with pytest.raises(SystemExit):
        run(tmp_path)


def test_a_variant_that_fails_is_an_error_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BenchError("no more")

    code, measured = run(tmp_path, at=("one", "a", 0), stop=fail)
    assert (code, measured) == (1, [one for one in ALL if one[:2] != ("one", "a")])
    assert "ERROR: here: a with one: no more" in capsys.readouterr().out
