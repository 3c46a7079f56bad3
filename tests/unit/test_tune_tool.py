"""tools/tune on a recorded case that is made up: turns are drawn as recorded, and the search finds what is best."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MIB = 1 << 20


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(TOOLS), str(TOOLS / "train")])
    import tune.recorded_case
    import tune.simulate

    return tune


def document() -> dict[str, Any]:
    """Two repetitions, of which the second was slower for all; "b" takes half the time of "a"."""
    settings = [["a", None, MIB], ["a", 5 * MIB, None], ["b", None, MIB], ["b", 5 * MIB, None]]
    turns = []
    for level in (1.0, 3.0):
        for setting in settings:
            seconds = level * (0.1 if setting[0] == "a" else 0.05)
            bucket = {"nbytes": 20 * MIB, "communication_s": seconds / 2, "launched_s": 0.001}
            turns.append([setting, {"step_s": seconds, "exposed_s": seconds / 2, "buckets": [bucket]}])
    sizes = {"tensor_bytes": [MIB] * 20, "rate_gbit": 10.0, "delay_ms": 5.0}
    return {"model": "m", "device": "cpu", "default": settings[0], "turns": turns, **sizes}


def test_the_truth_is_what_all_repetitions_agree_on(tune: Any) -> None:
    case = tune.recorded_case.RecordedCase(document())
    default, *_, best = case.settings
    assert str(case) == "m on cpu, 10 Gb/s, 5 ms"
    assert case.step_s[default] == pytest.approx(2 * case.step_s[best])
    assert (case.regret(default), case.loss(best)) == (pytest.approx(1.0), pytest.approx(-0.5))
    turn = case.draw(best, random.Random(1), pauses=0.0, share=1.0)
    assert turn.step_s == pytest.approx(case.step_s[best]), "the repetitions' speeds are no noise"
    assert case.draw(best, random.Random(1), pauses=1.0, share=1.0).step_s == pytest.approx(10 * case.step_s[best])


def test_methods_are_compared(tune: Any) -> None:
    case = tune.recorded_case.RecordedCase(document())
    trials = tune.simulate.simulate([case], 3, 0.0, 1.0, ["bagua", "the default"])
    assert [round(trial.regret, 6) for trial in trials] == [0.0] * 3 + [1.0] * 3
    rows = tune.simulate.table(trials).splitlines()
    assert rows[1].split()[:4] == ["bagua", "3", "100", "%"]
    assert rows[2].split()[:5] == ["the", "default", "3", "0", "%"]
