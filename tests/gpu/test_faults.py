"""DDP while its connections are cut: the same losses, bit for bit. Communicators aborted again and again: nothing
grows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.gpu_job import RANKS, RunJob

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "ddp_train.py"


def test_losses_are_the_same_while_connections_are_cut(run_job: RunJob, tmp_path: Path) -> None:
    def losses(**variables: str) -> list[float]:
        result = tmp_path / "result.json"
        words = ["--model", "resnet", "--steps", "150", "--json", str(result)]
        job = run_job(*words, script=SCRIPT, ENABLE_BAGUA_NET="1", BAGUA_NET_RECOVERY="1", **variables)
        assert (job.code, job.networks) == (0, {"BaguaNet"}), job.output + job.logs
        # "... were cut N times ..."
        cuts.append(sum(int(count) for count in re.findall(r"has cut (\d+) connections", job.logs)))
        found: list[float] = json.loads(result.read_text())["losses"]
        return found

    cuts: list[int] = []
    undisturbed = losses()
    disturbed = losses(BAGUA_NET_FAULT="cut=20/s,seed=3")
    assert cuts[0] == 0
    assert cuts[1] > 5
    assert disturbed == undisturbed


def test_nothing_grows_over_a_hundred_aborts(run_job: RunJob) -> None:
    job = run_job("100", script=Path(__file__).with_name("aborting_job.py"), ENABLE_BAGUA_NET="1")
    assert (job.code, job.networks) == (0, {"BaguaNet"}), job.output + job.logs
    reports = [json.loads(line) for line in job.output.splitlines() if line.startswith('{"rank"')]
    assert len(reports) == RANKS
    for report in reports:
        assert report["right"]
        assert report["longest_s"] < 10
        early, end = report["early"], report["end"]
        assert end["threads"] <= early["threads"] + 2
        assert end["descriptors"] <= early["descriptors"] + 8
        assert end["resident_kib"] <= early["resident_kib"] + 32 * 1024
