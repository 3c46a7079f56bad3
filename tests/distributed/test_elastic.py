"""examples/train_elastic.py with ranks that leave and come back: it ends as an undisturbed run does. An agent that
starts ranks again is in test_restart.py; `make deep` has both together, with nodes that are killed."""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.tool_module import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_elastic.py"
# The algorithm has a warm-up and a state that its steps depend on: a run that loses it ends elsewhere.
ARGUMENTS = ["--steps=400", "--algorithm=qadam"]
# How many ranks train up to which step: as many as before, fewer and more.
ATTEMPTS = [(2, 150), (2, 200), (1, 300), (2, 400)]


def _train(folder: str, arguments: list[str]) -> str:
    sys.argv = [str(SCRIPT), folder, *arguments]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile("w+") as printed:
        patch.setattr("os._exit", lambda _: None)  # which its last line calls
        patch.setattr(sys, "stdout", printed)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        printed.seek(0)
        return printed.read()


def _undisturbed(folder: Path) -> float:
    (printed,) = run_ranks(1, _train, str(folder), ARGUMENTS)
    return _loss(printed)


def _loss(printed: str) -> float:
    found = re.search(r"^step 400: loss (\S+)$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


def test_each_attempt_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    folder = tmp_path / "disturbed"
    folder.mkdir()
    begin, printed = 0, ""
    for ranks, end in ATTEMPTS:
        printed = run_ranks(ranks, _train, str(folder), [*ARGUMENTS, f"--steps={end}"])[0]
        assert printed.startswith(f"step {begin}: {ranks} ranks\n")
        begin = end
    assert _loss(printed) == pytest.approx(_undisturbed(tmp_path / "undisturbed"), rel=0.02)


@pytest.mark.deep
def test_training_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    undisturbed = _undisturbed(tmp_path)
    job = load_script("tools/elastic/disturbed_job.py").DisturbedJob
    for attempt in range(5):
        folder = tmp_path / f"disturbed-{attempt}"
        folder.mkdir()
        outcome = job(folder, 5, ARGUMENTS, disturbances=1).run()
        if outcome.events:
            break  # otherwise one node had trained to the end before the other was there
    assert outcome.events, "nothing was disturbed"
    assert outcome.loss == pytest.approx(undisturbed, rel=0.02), outcome
