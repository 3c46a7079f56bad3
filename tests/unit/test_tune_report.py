"""`bagua tune report` and its advice, from results that are made up."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.cli.main import main
from bagua.tuning import memory
from bagua.tuning.advice import advice
from bagua.tuning.memory import Answer, Fingerprint
from bagua.tuning.setting import MIB, Outcome, Setting, Tried

DEFAULT = Setting("gradient_allreduce", None, MIB)
FAST = Setting("gradient_allreduce", 5 * MIB, None)


def answer_of(
    chosen: Setting, exposed_s: float, compressed: dict[str, float] | None = None, model: str = "Net abc"
) -> Answer:
    fingerprint = Fingerprint(model, "2 ranks on 2 nodes", "cpu, 2 CPUs", "gloo, eth0 at 10000 Mb/s", "all")
    speedup = 1.0 if chosen == DEFAULT else 1.25
    tried = (Tried(DEFAULT, 0.1, exposed_s, 0.06, 1.0, 9), Tried(FAST, 0.08, math.nan, math.nan, 0.8, 9))
    return Answer.of(Outcome(chosen, speedup, "faster in 5 paired comparisons", tried), fingerprint, 120, compressed)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_of(DEFAULT, 0.001), "communication is hidden: nothing to gain"),
        (answer_of(DEFAULT, 0.05), "keep the default.*2.00x as fast"),
        (answer_of(FAST, 0.05), "keep gradient_allreduce, buckets of 5 MiB: 1.25x"),
        (answer_of(FAST, 0.05), "BAGUA_DEFAULT_BUCKET_SIZE=5M"),
        (answer_of(FAST, 0.05, {"int8": 2.3}), r'bytegrad would give about 2.3x \(estimated.*allow=\["bytegrad"\]'),
        (
            answer_of(FAST, 0.05, {"int8": 2.3, "int4": 2.6}),
            r'int4 would give about 2.6x .*4 bits.*codec="int4"',
        ),
    ],
)
def test_advice(answer: Answer, words: str) -> None:

    assert re.search(words, "\n".join(advice(answer)), re.DOTALL)


def test_an_estimate_that_promises_little_is_not_told() -> None:
    assert not any("bytegrad" in line for line in advice(answer_of(FAST, 0.05, {"int8": 1.3, "int4": 1.35})))
    assert not any("int4" in line for line in advice(answer_of(FAST, 0.05, {"int8": 2.3, "int4": 2.4})))


def test_what_compresses_already_is_not_told_to() -> None:
    answer = answer_of(DEFAULT, 0.05, {"int8": 2.3})
    default = dataclasses.replace(answer.tried[0], setting=Setting("bytegrad", None, MIB))
    compressed = dataclasses.replace(answer, setting=default.setting, tried=(default, *answer.tried[1:]))
    assert any("bytegrad would" in line for line in advice(answer))
    assert not any("bytegrad would" in line for line in advice(compressed))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_no_command_of_this_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    assert "  report    " in capsys.readouterr().err
    for name in ("doctor", "stats"):
        with pytest.raises(SystemExit, match="2"):
            main([name])
        assert f"unknown command '{name}'; that is `bagua-net {name}`\n" in capsys.readouterr().err


def test_the_package_as_a_program_names_the_commands() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "bagua"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    for name in ("usage: bagua ", "bagua-net ", "bagua-net-bench ", "baguarun ", "python -m bagua.distributed.run "):
        assert name in done.stderr


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "report"]) == 1
    assert "autotune=True" in capsys.readouterr().err
    memory.store(answer_of(DEFAULT, 0.001, model="Other def"))
    memory.store(answer_of(FAST, 0.05))
    assert main(["tune", "report"]) == 0
    text = capsys.readouterr().out
    assert "Other" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["*", "gradient_allreduce,", "buckets", "of", "5", "MiB", "80.0", "-", "-", "1.25x", "9"] in rows
    assert ["gradient_allreduce,", "default", "buckets", "100.0", "50.0", "60.0", "1.00x", "9"] in rows
    assert "Speed compares steps" not in text
    slower = dataclasses.replace(answer_of(FAST, 0.05).tried[1], ratio=1.1)  # in pairs, although its median is less
    answer = answer_of(DEFAULT, 0.05, model="Third")
    memory.store(dataclasses.replace(answer, tried=(answer.tried[0], slower)))
    assert main(["tune", "report", "Third"]) == 0
    assert "Where the two disagree, rely on the speed." in " ".join(capsys.readouterr().out.split())
    assert main(["tune", "report", "--all"]) == 0
    assert "Other" in capsys.readouterr().out
    assert main(["tune", "report", "Other", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["advice"] == ["communication is hidden: nothing to gain"]
    assert document["tried"][1]["exposed_s"] is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert main(["tune", "report"]) == 1
    assert "XDG_CACHE_HOME" in capsys.readouterr().err


def test_the_plot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.store(answer_of(FAST, 0.05))
    assert main(["tune", "report", "--plot", str(folder / "tried.svg")]) == 0
    assert "exposed communication" in (folder / "tried.svg").read_text()
    assert main(["tune", "report", "--plot", str(folder / "tried.xyz")]) == 1
    assert ".xyz" in capsys.readouterr().err
