"""examples/train_elastic.py on two nodes that are killed, leave and come back: it ends as an undisturbed run does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tool_module import load_script

# 2 ranks, 1 and 3 compute the same mean in other orders.
LOSS_TOLERANCE = 0.02


@pytest.mark.slow
def test_training_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    disturbed = load_script("tools/elastic/disturbed_job.py")
    losses = []
    for seed, disturbances in ((0, 0), (5, 3)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        job = disturbed.DisturbedJob(folder, seed, ["--steps=1000", "--algorithm=qadam"], disturbances)
        losses.append(job.run().loss)
    assert losses[1] == pytest.approx(losses[0], rel=LOSS_TOLERANCE)
