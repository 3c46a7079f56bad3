"""examples/train_elastic.py on two nodes that are killed, leave and come back: it ends as an undisturbed run does."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.tool_module import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_elastic.py"
# The algorithm has a warm-up and a state that its steps depend on: a run that loses it ends elsewhere.
ARGUMENTS = ["--steps=1000", "--algorithm=qadam"]


def _alone(folder: str) -> str:
    sys.argv = [str(SCRIPT), folder, *ARGUMENTS]
    with pytest.MonkeyPatch.context() as patch, (Path(folder) / "printed").open("w+") as printed:
        patch.setattr("os._exit", lambda _: None)  # which its last line calls
        patch.setattr(sys, "stdout", printed)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        printed.seek(0)
        return printed.read()


@pytest.mark.slow
def test_training_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    (printed,) = run_ranks(1, _alone, str(tmp_path))
    undisturbed = re.search(r"^step 1000: loss (\S+)$", printed, re.MULTILINE)
    assert undisturbed is not None, printed
    job = load_script("tools/elastic/disturbed_job.py").DisturbedJob
    for attempt in range(5):
        folder = tmp_path / f"disturbed-{attempt}"
        folder.mkdir()
        outcome = job(folder, 5, ARGUMENTS, disturbances=1).run()
        if outcome.events:
            break  # otherwise one node had trained to the end before the other was there
    assert outcome.events, "nothing was disturbed"
    assert outcome.loss == pytest.approx(float(undisturbed[1]), rel=0.02), outcome
