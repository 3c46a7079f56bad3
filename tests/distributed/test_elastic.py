"""examples/train_elastic.py on two nodes that are killed, leave and come back: it ends as an undisturbed run does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.tool_module import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_elastic.py"
# The algorithm has a warm-up and a state that its steps depend on: a run that loses it ends elsewhere.
ARGUMENTS = ["--steps=1000", "--algorithm=qadam"]


@pytest.mark.slow
def test_training_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "alone"), *ARGUMENTS],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    undisturbed = re.search(r"^step 1000: loss (\S+)$", alone.stdout, re.MULTILINE)
    assert undisturbed is not None, alone.stderr
    folder = tmp_path / "disturbed"
    folder.mkdir()
    outcome = load_script("tools/elastic/disturbed_job.py").DisturbedJob(folder, 5, ARGUMENTS, disturbances=1).run()
    assert outcome.events, "nothing was disturbed"
    assert outcome.loss == pytest.approx(float(undisturbed[1]), rel=0.02), outcome
